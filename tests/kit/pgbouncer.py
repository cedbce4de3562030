"""PgBouncer (the Debian package) in front of the tests' PostgreSQL: transaction mode, few server connections,
nothing else set."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import make_url

from tests.kit.postgresql import free_port
from tests.kit.waiting import wait_until

SETTINGS = """
[databases]
* = host=127.0.0.1 port={server_port}

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = trust
auth_file = {folder}/users
logfile = {folder}/log
pool_mode = transaction
default_pool_size = {pool}
max_client_conn = {clients}
ignore_startup_parameters = options
"""


class PgBouncer:
    def __init__(self, server_url: str, pool: int, clients: int) -> None:
        program = shutil.which("pgbouncer", path=os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin")))
        if program is None:
            raise RuntimeError("this test needs PgBouncer: apt-get install pgbouncer")
        account = pwd.getpwnam("nobody") if os.geteuid() == 0 else None  # it refuses to run as root
        self._folder = Path(tempfile.mkdtemp(prefix="sqlq-pgbouncer-", dir="/tmp" if account else None))
        self.port = free_port()
        url = make_url(server_url)
        (self._folder / "users").write_text(f'"{url.username}" "{url.password or ""}"\n')
        values = {"server_port": url.port, "port": self.port, "pool": pool, "clients": clients}
        (self._folder / "ini").write_text(SETTINGS.format(folder=self._folder, **values))
        if account:
            for path in (self._folder, *self._folder.iterdir()):
                os.chown(path, account.pw_uid, account.pw_gid)
        self._process = subprocess.Popen(
            [program, "-q", str(self._folder / "ini")],
            cwd=self._folder,
            user=account and account.pw_uid,
            group=account and account.pw_gid,
            extra_groups=[] if account else None,
            stdin=subprocess.DEVNULL,
        )
        wait_until(self._answers, what="PgBouncer starting")

    def _answers(self) -> bool:
        assert self._process.poll() is None, self.log()
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True

    def url(self, server_url: str) -> str:
        """Return the URL of the same database through this pooler."""
        url = make_url(server_url).set(host="127.0.0.1", port=self.port)
        return url.render_as_string(hide_password=False)

    def log(self) -> str:
        file = self._folder / "log"
        return file.read_text() if file.exists() else ""

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(10)
        shutil.rmtree(self._folder)


@contextmanager
def pgbouncer(server_url: str, pool: int = 2, clients: int = 200) -> Iterator[PgBouncer]:
    """Run a pooler in front of the server that a URL leads to, with so many connections to it and to its
    clients."""
    pooler = PgBouncer(server_url, pool, clients)
    try:
        yield pooler
    finally:
        pooler.close()
