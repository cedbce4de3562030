"""Callers who have a driver's connection and no SQLAlchemy, each in a mode of its own, behind one face."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import sqlite3
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import asyncpg
import psycopg
import psycopg2
import psycopg2.extras
import pymysql
import pymysql.cursors
import pytest
from psycopg import rows
from sqlalchemy import Engine, make_url

import sqlq
from sqlq import Job, NewJob
from tests.kit import committed
from tests.kit.databases import DATABASES
from tests.kit.sessions import without_mysqlclient


class Mode(NamedTuple):
    """How a caller's connection is made, and by which words its transactions begin (None: by themselves)."""

    connect: Callable[[str], Any]
    begins: str | None = None
    is_async: bool = False


def _dsn(url: str) -> str:
    return make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)


def _file(url: str) -> str:
    return make_url(url).database or ""


def _address(url: str) -> dict[str, Any]:
    where = make_url(url)
    return {
        "host": where.host,
        "port": where.port,
        "user": where.username,
        "password": where.password or "",
        "database": where.database,
    }


def _mysqlclient(url: str, cursor: str = "Cursor", **options: Any) -> Any:
    mysqlclient: Any = importlib.import_module("MySQLdb")
    kind = getattr(importlib.import_module("MySQLdb.cursors"), cursor)
    return mysqlclient.connect(**_address(url), cursorclass=kind, **options)


def _with_rows(connection: Any, factory: Any, text: Any = str) -> Any:
    connection.row_factory, connection.text_factory = factory, text
    return connection


def _automatic(connection: Any) -> Any:
    connection.autocommit = True
    return connection


def _dict(cursor: Any, row: Any) -> dict[str, Any]:
    return dict(zip([column[0] for column in cursor.description], row, strict=True))


MODES: dict[str, dict[str, Mode]] = {
    "postgresql": {
        "psycopg": Mode(lambda url: psycopg.connect(_dsn(url))),
        "psycopg-dicts": Mode(lambda url: psycopg.connect(_dsn(url), row_factory=rows.dict_row)),
        "psycopg-scalars": Mode(lambda url: psycopg.connect(_dsn(url), row_factory=rows.scalar_row)),
        "psycopg-raw": Mode(lambda url: psycopg.connect(_dsn(url), cursor_factory=psycopg.RawCursor)),
        "psycopg-client": Mode(lambda url: psycopg.connect(_dsn(url), cursor_factory=psycopg.ClientCursor)),
        "psycopg-autocommit": Mode(lambda url: psycopg.connect(_dsn(url), autocommit=True), "BEGIN"),
        "psycopg2": Mode(lambda url: psycopg2.connect(_dsn(url))),
        "psycopg2-dicts": Mode(
            lambda url: psycopg2.connect(_dsn(url), cursor_factory=psycopg2.extras.RealDictCursor)
        ),
        "psycopg2-autocommit": Mode(lambda url: _automatic(psycopg2.connect(_dsn(url))), "BEGIN"),
        "psycopg-async": Mode(
            lambda url: psycopg.AsyncConnection.connect(_dsn(url), row_factory=rows.dict_row), is_async=True
        ),
        "psycopg-async-autocommit": Mode(
            lambda url: psycopg.AsyncConnection.connect(_dsn(url), autocommit=True), "BEGIN", is_async=True
        ),
        "asyncpg": Mode(lambda url: asyncpg.connect(_dsn(url)), "BEGIN", is_async=True),
        "asyncpg-no-cache": Mode(
            lambda url: asyncpg.connect(_dsn(url), statement_cache_size=0), "BEGIN", is_async=True
        ),
    },
    "sqlite": {
        "sqlite3": Mode(lambda url: sqlite3.connect(_file(url))),
        "sqlite3-rows": Mode(lambda url: _with_rows(sqlite3.connect(_file(url)), sqlite3.Row, bytes)),
        "sqlite3-dicts": Mode(lambda url: _with_rows(sqlite3.connect(_file(url)), _dict)),
        "sqlite3-immediate": Mode(lambda url: sqlite3.connect(_file(url), isolation_level="IMMEDIATE")),
        "sqlite3-none": Mode(lambda url: sqlite3.connect(_file(url), isolation_level=None), "BEGIN"),
    },
}
MODES["mariadb"] = {
    "pymysql": Mode(lambda url: pymysql.connect(**_address(url))),
    "pymysql-dicts": Mode(
        lambda url: pymysql.connect(**_address(url), cursorclass=pymysql.cursors.SSDictCursor)
    ),
    "pymysql-bytes": Mode(lambda url: pymysql.connect(**_address(url), use_unicode=False)),
    "pymysql-autocommit": Mode(lambda url: pymysql.connect(**_address(url), autocommit=True), "BEGIN"),
    "mysqlclient": Mode(_mysqlclient),
    "mysqlclient-dicts": Mode(lambda url: _mysqlclient(url, "SSDictCursor")),
    "mysqlclient-autocommit": Mode(lambda url: _mysqlclient(url, autocommit=True), "BEGIN"),
}
if sys.version_info >= (3, 12):
    MODES["sqlite"] |= {
        "sqlite3-autocommit": Mode(lambda url: sqlite3.connect(_file(url), autocommit=True), "BEGIN"),
        "sqlite3-pep249": Mode(lambda url: sqlite3.connect(_file(url), autocommit=False)),
    }


COMMON = ("psycopg", "asyncpg", "sqlite3", "pymysql")


def modes(
    wanted: Callable[[str, Mode], bool] = lambda name, mode: True,
    *,
    in_all: bool = False,
    databases: Sequence[str] = DATABASES,
) -> pytest.MarkDecorator:
    """Give a test each of these modes as `mode`, with the database that goes with it.

    A feature runs on the common modes and on one other: the modes differ in the primitives of sqlq's
    `DriverConnection` only. The tests of these primitives run `in_all`.
    """
    return pytest.mark.parametrize(
        ("database_url", "mode"),
        [
            pytest.param(
                database,
                mode,
                id=name,
                marks=(
                    *(() if in_all or name in COMMON else (pytest.mark.variants,)),
                    *(without_mysqlclient if "mysqlclient" in name else ()),
                ),
            )
            for database, known in MODES.items()
            if database in databases
            for name, mode in known.items()
            if wanted(name, mode)
        ],
        indirect=["database_url"],
    )


def _is_automatic(name: str, mode: Mode) -> bool:
    return mode.begins is not None


common_modes = modes()
every_mode = modes(in_all=True)
automatic = modes(_is_automatic)
"""Where each statement outside a transaction is a transaction by itself."""
every_automatic = modes(_is_automatic, in_all=True)


class Caller:
    """Somebody with a connection of a driver. An asynchronous one has a loop of its own."""

    def __init__(self, url: str, mode: Mode) -> None:
        self.mode = mode
        self._runner = asyncio.Runner() if mode.is_async else None
        self.connection: Any = self.do(mode.connect(url))

    def do(self, result: Any) -> Any:
        """Return what a call of the driver returns, awaited where it has to be."""

        async def wait() -> Any:
            return await result

        return self._runner.run(wait()) if self._runner and hasattr(result, "__await__") else result

    def enqueue(self, app: sqlq.App, job: NewJob) -> Job:
        if self._runner:
            return self._runner.run(app.aenqueue(job, session=self.connection))
        return app.enqueue(job, session=self.connection)

    def enqueue_many(self, app: sqlq.App, jobs: Sequence[NewJob]) -> list[Job]:
        if self._runner:
            return self._runner.run(app.aenqueue_many(jobs, session=self.connection))
        return app.enqueue_many(jobs, session=self.connection)

    def execute(self, statement: str) -> Any:
        return self.do(self.executing(statement))

    def executing(self, statement: str) -> Any:
        """Execute a statement; on an asynchronous connection return what is to be awaited."""
        on = self.connection if hasattr(self.connection, "execute") else self.connection.cursor()
        return on.execute(statement)

    def order(self, id: int) -> None:
        """Write as the caller does, in a transaction that the job is to share."""
        self.execute(f"INSERT INTO orders (id) VALUES ({id})")

    def begin(self) -> None:
        if self.mode.begins:
            self.execute(self.mode.begins)

    def commit(self) -> None:
        if self.mode.begins:
            self.execute("COMMIT")
        else:
            self.do(self.connection.commit())

    def rollback(self) -> None:
        if self.mode.begins:
            self.execute("ROLLBACK")
        else:
            self.do(self.connection.rollback())

    def close(self) -> None:
        self.do(self.connection.close())
        if self._runner:
            self._runner.close()

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def order(connection: Any, id: int) -> None:
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO orders (id) VALUES (%s)", [id])


def orders_and_jobs(engine: Engine) -> tuple[list[int], list[int]]:
    """Return what a caller has committed."""
    return committed(engine, "orders"), committed(engine)
