"""Run a MariaDB until the test run that started this process is over, however it ended; then remove its
directory.

Started by tests/mariadb.py as `mariadb_guard.py DIRECTORY PROGRAM ARGUMENTS…`. The sign is the end of
standard input, which the kernel gives even when the test run was killed and could not clean up.
"""

from __future__ import annotations

import shutil
import subprocess
import sys

if __name__ == "__main__":
    directory, *command = sys.argv[1:]
    with open(f"{directory}/log", "ab") as log:  # noqa: PTH123 - as short as can be
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    sys.stdin.read()
    server.kill()
    server.wait()
    shutil.rmtree(directory, ignore_errors=True)
