"""A standby of the tests' own PostgreSQL, made with pg_basebackup: a real one, that streams and can be
promoted."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import NullPool, create_engine, make_url, text

from tests.servers import OwnPostgreSQL
from tests.waiting import wait_until


class Standby:
    def __init__(self, primary: OwnPostgreSQL) -> None:
        self._primary = primary
        self._data = primary.directory / "standby"
        self._log = str(primary.directory / "standby.log")
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port: int = probe.getsockname()[1]
        where = ("-h", "127.0.0.1", "-p", str(primary.port), "-U", "postgres")
        primary.run(
            "pg_basebackup",
            *where,
            "--write-recovery-conf",
            "--checkpoint=fast",
            "--no-sync",
            data=self._data,
        )
        with (self._data / "postgresql.conf").open("a") as configuration:
            configuration.write(f"port = {self.port}\n")
        primary.run("pg_ctl", "start", "-w", "-l", self._log, data=self._data)

    def url(self, database: str) -> str:
        return make_url(self._primary.url(database)).set(port=self.port).render_as_string(hide_password=False)

    def catch_up(self) -> None:
        """Wait until everything that is committed on the primary is here."""
        there = self._ask(self._primary.url("postgres"), "SELECT pg_current_wal_lsn()")
        reached = f"SELECT pg_last_wal_replay_lsn() >= '{there}'"
        wait_until(
            lambda: self._ask(self.url("postgres"), reached),
            timeout=30,
            what="the standby having what the primary has",
        )

    def promote(self) -> None:
        """Make it a primary, and return when it takes writes."""
        self._primary.run("pg_ctl", "promote", "-w", data=self._data)

    def close(self) -> None:
        self._primary.run("pg_ctl", "stop", "-w", "-m", "immediate", data=self._data)
        shutil.rmtree(self._data)

    def _ask(self, url: str, question: str) -> object:
        with create_engine(url, poolclass=NullPool).connect() as conn:
            return conn.execute(text(question)).scalar_one()


@contextmanager
def standby_of(primary: OwnPostgreSQL) -> Iterator[Standby]:
    """Run a standby beside a server."""
    standby = Standby(primary)
    try:
        yield standby
    finally:
        standby.close()
