"""Wait until the test run that started this process is over, however it ended; then kill its MariaDB and
remove its directory.

`mariadb.py` starts it with the argument DIRECTORY. The sign is the end of standard input, which the
kernel gives even when the test run was killed and could not clean up.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

if __name__ == "__main__":
    directory = Path(sys.argv[1])
    sys.stdin.read()
    with suppress(OSError):  # it has ended, or never began
        server = int((directory / "server").read_text())
        for _ in range(100):
            os.kill(server, signal.SIGKILL)
            time.sleep(0.05)  # noqa: TID251 - until the kernel has cleared it away
    shutil.rmtree(directory, ignore_errors=True)
