"""Wait until the test run that started this process is over, however it ended; then stop its PostgreSQL and
remove its directory.

`postgresql.py` starts it with the arguments DIRECTORY PG_CTL [ACCOUNT]. The sign is the end of standard
input, which the kernel gives even when the test run was killed and could not clean up.
"""

from __future__ import annotations

import pwd
import shutil
import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    directory, pg_ctl, name = sys.argv[1:]
    sys.stdin.read()
    if Path(directory, "data", "postmaster.pid").exists():
        account = pwd.getpwnam(name) if name else None
        subprocess.run(
            [pg_ctl, "stop", "-w", "-m", "immediate", "-D", f"{directory}/data"],
            cwd=directory,
            stdout=subprocess.DEVNULL,
            user=account and account.pw_uid,
            group=account and account.pw_gid,
            extra_groups=[] if account else None,
            check=False,
        )
    shutil.rmtree(directory, ignore_errors=True)
