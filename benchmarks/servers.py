"""The databases everything is measured on: one PostgreSQL for all, one MariaDB, files of SQLite, one Redis.

PostgreSQL and MariaDB are the tests' own, but on disk and with a flush for each commit, which is the
durability of production. A server named by URL is used as it is. Every measurement gets a database of its
own, as its subject prepares it. It is a copy, but on MariaDB, which cannot copy a database.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pymysql
from sqlalchemy import make_url

from tests.kit.mariadb import MariaDB, OwnMariaDB
from tests.kit.mariadb import found as program
from tests.kit.postgresql import OwnPostgreSQL, PostgreSQL

MARIADB = (
    "--innodb-flush-log-at-trx-commit=1",
    "--innodb-buffer-pool-size=1G",  # it passes by the system's cache, which the others have beside theirs
    "--innodb-log-file-size=1G",  # as PostgreSQL's max_wal_size
)


class UnavailableError(Exception):
    """A server that is not to be had on this machine; what needs it is reported so."""


class Place:
    """A database for one measurement."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.kind = make_url(url).get_backend_name()

    def number(self, question: str | Sequence[Sequence[str]]) -> int:
        """Return the number an SQL query gives, or the sum of what some Redis commands do."""
        if not isinstance(question, str):
            return sum(self._redis(*command) for command in question)
        return _first(self.rows(question))

    def rows(self, statement: str) -> list[tuple[Any, ...]]:
        """Run a statement, committed at once, and return its rows, if it has any."""
        if self.kind == "sqlite":
            with closing(sqlite3.connect(self.file, isolation_level=None, timeout=60)) as connection:
                return connection.execute(statement).fetchall()
        if self.kind == "mariadb":
            with mariadb_connection(self.url) as mariadb, mariadb.cursor() as cursor:
                cursor.execute(statement)
                return list(cursor.fetchall())
        with self._postgresql() as postgresql:
            done = postgresql.execute(statement)
            return done.fetchall() if done.description else []

    @property
    def file(self) -> str:
        return self.url.removeprefix("sqlite:///")

    @contextmanager
    def questions(self) -> Iterator[Callable[[str | Sequence[Sequence[str]]], int]]:
        """Yield what `number` does, on one connection that stays open."""
        if self.kind == "postgresql":
            with self._postgresql() as postgresql:
                yield lambda question: _first(postgresql.execute(str(question)).fetchall())
        elif self.kind == "sqlite":
            with closing(sqlite3.connect(self.file, isolation_level=None, timeout=60)) as connection:
                yield lambda question: _first(connection.execute(str(question)).fetchall())
        elif self.kind == "mariadb":
            with mariadb_connection(self.url) as mariadb, mariadb.cursor() as cursor:
                yield lambda question: cursor.execute(str(question)) and _first(cursor.fetchall())
        else:
            yield self.number

    def rest(self) -> None:
        """Let the database finish with what was filled in, so that nobody's measurement pays for it."""
        if self.kind == "postgresql":
            self.rows("VACUUM (ANALYZE)")
            self.rows("CHECKPOINT")
        elif self.kind == "sqlite":
            self.rows("PRAGMA wal_checkpoint(TRUNCATE)")
        elif self.kind == "mariadb":
            tables = ", ".join(
                f'"{name}"'
                for (name,) in self.rows(
                    "SELECT table_name FROM information_schema.tables WHERE table_schema = DATABASE()"
                    " AND table_type = 'BASE TABLE'"
                )
            )
            self.rows(f"ANALYZE TABLE {tables}")
            self.rows(f"FLUSH TABLES {tables} FOR EXPORT")  # writes their pages; the connection's end unlocks

    def _postgresql(self) -> psycopg.Connection[Any]:
        # the database may have a time-out of its own, as that of `benchmarks.neighbour` has
        return psycopg.connect(self.url, autocommit=True, options="-c lock_timeout=0")

    def _redis(self, *command: str) -> int:
        url = make_url(self.url)
        with socket.create_connection((url.host or "127.0.0.1", url.port or 6379), timeout=10) as connection:
            connection.sendall((" ".join(command) + "\r\n").encode())
            answer = connection.makefile().readline().strip()
        if not answer.startswith((":", "+")):
            raise RuntimeError(f"Redis answered {answer!r} to {' '.join(command)}")
        return int(answer[1:]) if answer[1:].isdigit() else 0


class Servers:
    """Starts a server when it is first needed, and stops what it started."""

    def __init__(self, postgresql_url: str | None, redis_url: str | None) -> None:
        self._postgresql_url = postgresql_url
        self._redis_url = redis_url
        self._postgresql: PostgreSQL | None = None
        self._mariadb: MariaDB | None = None
        self._templates: dict[str, str] = {}
        self._exit = ExitStack()
        self.folder = Path(self._exit.enter_context(tempfile.TemporaryDirectory(prefix="sqlq-benchmarks-")))

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *exc: object) -> None:
        for url in self._templates.values():
            if url.startswith("postgresql"):
                self.postgresql().drop_database(url)
        self._exit.close()

    def postgresql(self) -> PostgreSQL:
        if self._postgresql is None:
            if self._postgresql_url:
                self._postgresql = PostgreSQL(make_url(self._postgresql_url))
            else:
                own = OwnPostgreSQL("18", on_disk=True)
                self._exit.callback(own.close)
                self._postgresql = own
                place = Place(_plain(own.url("postgres")))
                place.rows("ALTER SYSTEM SET fsync = on")
                place.rows("SELECT pg_reload_conf()")
        return self._postgresql

    def mariadb(self) -> MariaDB:
        if self._mariadb is None:
            own = OwnMariaDB(*MARIADB, on_disk=True)
            self._exit.callback(own.close)
            self._mariadb = own
        return self._mariadb

    def redis(self) -> str:
        """Return the URL of Redis: the one given, or of a server of our own with the settings it comes
        with."""
        if self._redis_url is None:
            redis = shutil.which("redis-server")
            if redis is None:
                raise UnavailableError("there is no redis-server on PATH, and no --redis-url was given")
            with socket.create_server(("127.0.0.1", 0)) as probe:
                port = probe.getsockname()[1]
            command = [redis, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
            server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            self._exit.callback(server.wait)
            self._exit.callback(server.terminate)
            self._redis_url = f"redis://127.0.0.1:{port}/0"
            _until_it_answers(port)
        return self._redis_url

    @contextmanager
    def place(self, kind: str, subject: str, prepare: Callable[[str], None]) -> Iterator[Place]:
        """Yield a database of a kind, which `prepare` has prepared for the subject; where it can be copied,
        once."""
        template = f"{subject} on {kind}"
        match kind:
            case "postgresql":
                if template not in self._templates:
                    made = self.postgresql().create_database()
                    prepare(_plain(made))
                    self._templates[template] = made
                url = self.postgresql().create_database(self._templates[template])
                try:
                    yield Place(_plain(url))
                finally:
                    self.postgresql().drop_database(url)
            case "sqlite":
                if template not in self._templates:
                    made = tempfile.mkdtemp(dir=self.folder)
                    prepare(f"sqlite:///{made}/benchmark.db")
                    self._templates[template] = made
                with tempfile.TemporaryDirectory(dir=self.folder) as folder:
                    shutil.copytree(self._templates[template], folder, dirs_exist_ok=True)
                    yield Place(f"sqlite:///{folder}/benchmark.db")
            case "mariadb":
                url = self.mariadb().create_database()
                try:
                    prepare(url)
                    yield Place(url)
                finally:
                    self.mariadb().drop_database(url)
            case "redis":
                place = Place(self.redis())
                place.number([["FLUSHDB"]])
                yield place

    def settings(self) -> dict[str, str]:
        """Return the versions and settings of the used servers, for the report."""
        found = {}
        if self._postgresql is not None:
            place = Place(_plain(self._postgresql.url("postgres")))
            for name in ("server_version", "fsync", "synchronous_commit", "shared_buffers", "max_wal_size"):
                found[f"PostgreSQL {name}"] = str(place.rows(f"SHOW {name}")[0][0])
        if self._mariadb is not None:
            for name in ("version", "innodb_flush_log_at_trx_commit", "innodb_buffer_pool_size"):
                found[f"MariaDB {name}"] = str(self._mariadb.administer(f"SELECT @@{name}")[0][0])
        found["SQLite"] = sqlite3.sqlite_version + ", WAL, synchronous FULL"
        return found


def mariadb_connection(url: str) -> Any:
    """Connect with PyMySQL, in the mode that reads standard SQL; each statement commits at once."""
    at = make_url(url)
    return pymysql.connect(
        host=at.host,
        port=at.port or 3306,
        user=at.username,
        password=at.password or "",
        database=at.database,
        sql_mode="ANSI,STRICT_ALL_TABLES",
        autocommit=True,
    )


def why_no_mariadb() -> str | None:
    """Return why no MariaDB can be started here; None where it can."""
    try:
        program("mariadbd")
    except RuntimeError as error:
        return str(error)
    return None


def _first(rows: Sequence[tuple[Any, ...]]) -> int:
    return int(rows[0][0])


def _plain(url: str) -> str:
    return url.replace("postgresql+psycopg://", "postgresql://")


def _until_it_answers(port: int) -> None:
    for _ in range(200):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.02)
    raise RuntimeError(f"redis-server did not answer on port {port} within four seconds")
