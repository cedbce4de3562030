"""A standby of the tests' own PostgreSQL, made with pg_basebackup: a real one, that streams and can be
promoted."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import psycopg
from sqlalchemy import NullPool, create_engine, make_url, text

from tests.kit.databases import migrate
from tests.kit.postgresql import OwnPostgreSQL, free_port, own_postgresql
from tests.kit.waiting import wait_until


class Standby:
    def __init__(self, primary: OwnPostgreSQL, name: str = "standby") -> None:
        self._primary = primary
        self._data = primary.directory / name
        self._log = str(primary.directory / f"{name}.log")
        self.port = free_port()
        primary.run(
            *("pg_basebackup", "-h", "127.0.0.1", "-p", str(primary.port), "-U", "postgres"),
            *("--write-recovery-conf", "--checkpoint=fast", "--no-sync"),
            data=self._data,
        )
        with (self._data / "postgresql.conf").open("a") as configuration:
            configuration.write(f"port = {self.port}\n")
        primary.run("pg_ctl", "start", "-w", "-l", self._log, data=self._data)

    def url(self, database: str) -> str:
        return make_url(self._primary.url(database)).set(port=self.port).render_as_string(hide_password=False)

    def list_url(self, database: str, *, first: bool = False, attrs: str = "read-write") -> str:
        """Return a URL with both servers, this one `first` or last."""
        ports = (self.port, self._primary.port) if first else (self._primary.port, self.port)
        named = "&".join(f"host=127.0.0.1:{port}" for port in ports)
        return f"postgresql+psycopg://postgres@/{database}?{named}&target_session_attrs={attrs}"

    def catch_up(self) -> None:
        """Wait until everything that is committed on the primary is here."""
        there = self._ask(self._primary.url("postgres"), "SELECT pg_current_wal_lsn()")
        reached = f"SELECT pg_last_wal_replay_lsn() >= '{there}'"
        has_it = partial(self._ask, self.url("postgres"), reached)
        wait_until(has_it, timeout=30, what="the standby having what the primary has")

    def promote(self) -> None:
        """Make it a primary, and return when it takes writes."""
        self._primary.run("pg_ctl", "promote", "-w", data=self._data)

    def close(self) -> None:
        self._primary.run("pg_ctl", "stop", "-w", "-m", "immediate", data=self._data)
        shutil.rmtree(self._data)

    def _ask(self, url: str, question: str) -> object:
        with create_engine(url, poolclass=NullPool).connect() as conn:
            return conn.execute(text(question)).scalar_one()

    def configure(self, setting: str, *, of_primary: bool = True) -> None:
        """Change a setting of the primary, or of this server, while it runs."""
        url = self._primary.url("postgres") if of_primary else self.url("postgres")
        with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as conn:
            conn.execute(f"ALTER SYSTEM SET {setting}".encode())
            conn.execute("SELECT pg_reload_conf()")


class Pair(NamedTuple):
    """A primary that may be killed, its standby, and the name of a database with our tables."""

    primary: OwnPostgreSQL
    standby: Standby
    database: str


@contextmanager
def pair_of_servers() -> Iterator[Pair]:
    """Run a primary of its own and a standby beside it."""
    with own_postgresql() as primary:
        url = primary.create_database()
        migrate(url)
        with standby_of(primary) as standby:
            standby.catch_up()
            yield Pair(primary, standby, make_url(url).database or "")


@contextmanager
def standby_of(primary: OwnPostgreSQL, name: str = "standby") -> Iterator[Standby]:
    """Run a standby beside a server."""
    standby = Standby(primary, name)
    try:
        yield standby
    finally:
        standby.close()
