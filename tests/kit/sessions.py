"""Callers: every kind of session on every driver, behind one face, so that one test is the contract for all
of them."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine, make_url, text
from sqlalchemy.ext.asyncio import (
    AsyncConnection,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import sqlq
from sqlq import Job, NewJob
from tests.kit.databases import DATABASES

without_mysqlclient = (
    pytest.mark.skipif(
        importlib.util.find_spec("MySQLdb") is None,
        reason="NOT TESTED: mysqlclient is not installed, which takes a compiler and libmariadb-dev",
    ),
)
DRIVERS: dict[str, dict[str, tuple[type[Any], ...]]] = {
    "postgresql": {
        "psycopg": (Session, scoped_session, Connection),
        "psycopg2": (Session, scoped_session, Connection),
    },
    "sqlite": {"pysqlite": (Session, scoped_session, Connection)},
    "mariadb": {"pymysql": (Session, scoped_session, Connection), "mysqldb": (Session, Connection)},
}
ASYNC_DRIVERS: dict[str, dict[str, tuple[type[Any], ...]]] = {
    "postgresql": {
        "asyncpg": (AsyncSession, async_scoped_session, AsyncConnection),
        "psycopg_async": (AsyncSession, AsyncConnection),
    },
    "sqlite": {"aiosqlite": (AsyncSession, async_scoped_session, AsyncConnection)},
    "mariadb": {"asyncmy": (AsyncSession, async_scoped_session, AsyncConnection)},
}
COMMON = (
    *("psycopg-Session", "psycopg2-Connection", "pysqlite-scoped_session"),
    *("asyncpg-AsyncSession", "psycopg_async-AsyncConnection", "aiosqlite-async_scoped_session"),
    *("pymysql-Session", "asyncmy-AsyncSession"),
)
"""Ways with each driver and each kind of session in one of them."""


Way = tuple[str, type[Any]]


def ways(*databases: str, in_all: bool = False) -> pytest.MarkDecorator:
    """Give a test each way to have a session as `way`, with the database that goes with it.

    The database is one of those named, or of all that are tested.

    A feature runs on the common ways and on one other, the tests of the caller's transaction itself `in_all`.
    """
    every = {
        f"{driver}-{kind.__name__}": (database, (driver, kind))
        for drivers_of in (DRIVERS, ASYNC_DRIVERS)
        for database, drivers in drivers_of.items()
        if database in (databases or DATABASES)
        for driver, kinds in drivers.items()
        for kind in kinds
    }
    return pytest.mark.parametrize(
        ("database_url", "way"),
        [
            pytest.param(
                *values,
                id=name,
                marks=(
                    *(() if in_all or name in COMMON else (pytest.mark.variants,)),
                    *(without_mysqlclient if "mysqldb" in name else ()),
                ),
            )
            for name, values in every.items()
        ],
        indirect=["database_url"],
    )


def session_of(url: str) -> Way:
    """Return the way to have a Session on the common driver of a database."""
    return {"postgresql": "psycopg", "mariadb": "pymysql"}.get(kind_at(url), "pysqlite"), Session


def async_session_of(url: str) -> Way:
    """Return the way to have an AsyncSession on the common driver of a database."""
    return {"postgresql": "asyncpg", "mariadb": "asyncmy"}.get(kind_at(url), "aiosqlite"), AsyncSession


def kind_at(url: str) -> str:
    return make_url(url).get_backend_name()


common_ways = ways()
every_way = ways(in_all=True)


class Caller:
    """Somebody in a transaction of their own, who enqueues in it. Asynchronous ones run on a loop of
    theirs."""

    def __init__(self, url: str, way: Way, *, configured: bool = True, **options: Any) -> None:
        driver, kind = way
        parsed = make_url(url)
        parsed = parsed.set(drivername=f"{parsed.get_backend_name()}+{driver}")
        self._runner = asyncio.Runner() if "async" in driver or driver == "aiosqlite" else None
        self.engine: Any = (
            create_async_engine(parsed, **options) if self._runner else create_engine(parsed, **options)
        )
        if configured and parsed.get_backend_name() == "sqlite":
            sqlq.configure_sqlite(self.engine)
        makers: dict[type[Any], Callable[[], Any]] = {
            Session: lambda: Session(self.engine),
            scoped_session: lambda: scoped_session(sessionmaker(self.engine)),
            Connection: self.engine.connect,
            AsyncSession: lambda: AsyncSession(self.engine),
            async_scoped_session: lambda: async_scoped_session(
                async_sessionmaker(self.engine), scopefunc=lambda: None
            ),
            AsyncConnection: self.engine.connect,
        }
        self.session = makers[kind]()
        if kind is AsyncConnection:
            self._do(self.session.start())

    def _do(self, result: Any) -> Any:
        async def wait() -> Any:
            return await result

        return self._runner.run(wait()) if self._runner and hasattr(result, "__await__") else result

    def enqueue(self, app: sqlq.App, job: NewJob) -> Job:
        if self._runner:
            return self._runner.run(app.aenqueue(job, session=self.session))
        return app.enqueue(job, session=self.session)

    def enqueue_many(self, app: sqlq.App, jobs: Sequence[NewJob]) -> list[Job]:
        if self._runner:
            return self._runner.run(app.aenqueue_many(jobs, session=self.session))
        return app.enqueue_many(jobs, session=self.session)

    def execute(self, statement: str) -> Any:
        return self._do(self.session.execute(text(statement)))

    @contextmanager
    def savepoint(self) -> Iterator[Any]:
        """A savepoint, released at the end unless `.rollback()` of what it gives was called."""
        savepoint = _Savepoint(self, self._do(self.session.begin_nested()))
        yield savepoint
        if not savepoint.over:
            self._do(savepoint.transaction.commit())

    def commit(self) -> None:
        self._do(self.session.commit())

    def rollback(self) -> None:
        self._do(self.session.rollback())

    def in_transaction(self) -> bool:
        session = (
            self.session()
            if isinstance(self.session, (scoped_session, async_scoped_session))
            else self.session
        )
        return bool(session.in_transaction())

    def close(self) -> None:
        self._do(self.session.close())
        self._do(self.engine.dispose())
        if self._runner:
            self._runner.close()

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Savepoint:
    def __init__(self, caller: Caller, transaction: Any) -> None:
        self._caller = caller
        self.transaction = transaction
        self.over = False

    def rollback(self) -> None:
        self._caller._do(self.transaction.rollback())
        self.over = True
