"""Wait until the test run that started this process is over, however it ended; then end its server and remove
the server's directory.

The arguments are DIRECTORY, a file in it that begins with the server's process id, and the number of a
signal. The sign is the end of standard input, which the kernel gives even when the test run was killed.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path

if __name__ == "__main__":
    directory, note = Path(sys.argv[1]), Path(sys.argv[1], sys.argv[2])
    sys.stdin.read()
    with suppress(OSError):  # it has ended, or never began
        server = int(note.read_text().split()[0])
        for _ in range(100):
            os.kill(server, int(sys.argv[3]))
            time.sleep(0.05)  # noqa: TID251 - until the kernel has cleared it away
            if not note.exists():  # PostgreSQL removes it when it ends
                break
    shutil.rmtree(directory, ignore_errors=True)
