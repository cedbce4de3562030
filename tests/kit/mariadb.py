"""The MariaDB that tests run on: a server of their own, of the programs that the system has, or any other by
its URL.

Debian's package mariadb-server-core has the programs. Its service need not run, and is not touched.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from uuid import uuid4

import pymysql
from sqlalchemy import URL, make_url

from tests.kit.postgresql import OwnServer, ShutdownMode, free_port
from tests.kit.waiting import wait_until

SETTINGS = (
    "--innodb-flush-log-at-trx-commit=0",  # no power is lost during a test
    "--innodb-buffer-pool-size=256M",
    "--innodb-log-file-size=64M",
    "--max-connections=200",
    "--skip-log-bin",
    "--skip-name-resolve",
    "--table-open-cache=4000",
)


class MariaDB:
    """A server that tests may make databases on. `url` is an administrator's URL."""

    def __init__(self, url: URL) -> None:
        self._url = url.set(drivername="mariadb+pymysql")

    def url(self, database: str) -> str:
        """Return the URL of one of the server's databases."""
        return self._url.set(database=database).render_as_string(hide_password=False)

    def create_database(self) -> str:
        """Create a database with a name nobody else uses and return its URL."""
        name = f"sqlq_test_{uuid4().hex}"
        self.administer(f"CREATE DATABASE {name}")
        return self.url(name)

    def drop_database(self, url: str) -> None:
        """Drop a database, and end the connections that are still open to it."""
        name = make_url(url).database
        sessions = f"SELECT id FROM information_schema.processlist WHERE db = '{name}'"
        for (number,) in self.administer(sessions):
            with suppress(pymysql.Error):  # it has ended by itself
                self.administer(f"KILL {number}")
        self.administer(f"DROP DATABASE IF EXISTS {name}")

    def administer(self, statement: str) -> Any:
        """Run a statement as the administrator and return its rows."""
        with self._connect() as conn, conn.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchall()

    def _connect(self) -> Any:
        url = self._url
        where: dict[str, Any] = {"host": url.host, "port": url.port or 3306, "user": url.username}
        return pymysql.connect(**where, password=url.password or "", autocommit=True)


class OwnMariaDB(OwnServer, MariaDB):
    """A server of the tests' own, on a free port of 127.0.0.1, in a directory that goes with it; in memory
    unless `on_disk`. Where the tests run as root it is of another account, if one is named."""

    def __init__(self, *settings: str, on_disk: bool = False, account: str = "root") -> None:
        program, install = found("mariadbd"), found("mariadb-install-db")
        self.make_directory("mariadb", on_disk=on_disk)
        data, temporary = self.directory / "data", self.directory / "temporary"
        temporary.mkdir()  # each server that starts removes others' tables from a directory they share
        user = [f"--user={account}"] if os.geteuid() == 0 else []
        if user:
            shutil.chown(self.directory, account)
            shutil.chown(temporary, account)
        subprocess.run(
            [install, "--no-defaults", f"--datadir={data}", f"--tmpdir={temporary}", "--skip-test-db",
             "--auth-root-authentication-method=normal", *user],
            check=True, capture_output=True, start_new_session=True,
        )  # fmt: skip
        self.port = free_port()
        self.guard("server", signal.SIGKILL)
        self._command = [
            *(program, "--no-defaults", *user, f"--datadir={data}", f"--tmpdir={temporary}"),
            *(f"--socket={self.directory}/socket", f"--pid-file={self.directory}/pid"),
            *("--bind-address=127.0.0.1", f"--port={self.port}", *SETTINGS, *settings),
        ]
        super().__init__(URL.create("mariadb", "root", host="127.0.0.1", port=self.port))
        self.start()

    def start(self, *settings: str) -> None:
        """Start the server, also after a `stop()`, on the same port, and return when it answers."""
        command = [*self._command, *settings]
        with (self.directory / "log").open("ab") as log:
            self._server = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        (self.directory / "server").write_text(str(self._server.pid))
        wait_until(self._answers, what="the tests' MariaDB")

    def stop(self, mode: ShutdownMode = "fast") -> None:
        """Stop the server; "immediate" is a crash, and the next start recovers from the log."""
        self._server.send_signal(signal.SIGKILL if mode == "immediate" else signal.SIGTERM)
        self._server.wait(60)

    def _answers(self) -> bool:
        try:
            self.administer("SELECT 1")
        except pymysql.Error:
            return False
        return True

    def close(self) -> None:
        """Stop the server for good and remove its directory."""
        self.stop("immediate")
        super().close()


def found(program: str) -> str:
    """Return the path of one of MariaDB's programs."""
    path = shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if path is None:
        raise RuntimeError(
            f"there is no {program}: install MariaDB's server, as by apt-get install mariadb-server"
        )
    return path


@contextmanager
def own_mariadb() -> Iterator[MariaDB]:
    """Run a server of the tests' own, or use the one that SQLQ_TEST_MARIADB_URL names."""
    if url := os.environ.get("SQLQ_TEST_MARIADB_URL"):
        yield MariaDB(make_url(url))
        return
    server = OwnMariaDB()
    try:
        yield server
    finally:
        server.close()
