"""Callers with a session on a driver, a driver's connection, or Django's, behind one face."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import itertools
import sqlite3
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import asyncpg
import django
import django.conf
import django.db
import psycopg
import psycopg2
import psycopg2.extras
import pymysql
import pymysql.cursors
import pytest
from psycopg import rows
from sqlalchemy import Connection, Engine, create_engine, make_url, text
from sqlalchemy.ext import asyncio as aio
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker

import sqlq
from sqlq import Job, NewJob
from tests.kit.databases import DATABASES
from tests.kit.sql import committed


class Base(DeclarativeBase): ...


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)


class Caller(AbstractContextManager["Caller"]):
    """Somebody in a transaction of their own, who enqueues in it. An asynchronous one has its own loop."""

    begins: str | None = None  # the words by which its transactions begin, or they begin by themselves

    def __init__(self, *, is_async: bool) -> None:
        self.is_async = is_async
        self._closing = ExitStack()
        self._runner = self._closing.enter_context(asyncio.Runner()) if is_async else None
        self._names = (f"s{number}" for number in itertools.count())
        self.session: Any = None
        self.watch: Any = None

    def do(self, result: Any) -> Any:
        """Return what a call of the session returns, awaited where it has to be."""

        async def wait() -> Any:
            return await result

        return self._runner.run(wait()) if self._runner and hasattr(result, "__await__") else result

    def enqueue(self, app: sqlq.App, job: NewJob) -> Job:
        done: Job = self.do((app.aenqueue if self.is_async else app.enqueue)(job, session=self.session))
        return done

    def enqueue_many(self, app: sqlq.App, jobs: Sequence[NewJob]) -> list[Job]:
        enqueue_many = app.aenqueue_many if self.is_async else app.enqueue_many
        done: list[Job] = self.do(enqueue_many(jobs, session=self.session))
        return done

    def executing(self, statement: str) -> Any:
        """Execute a statement; on an asynchronous connection return what is to be awaited."""
        raise NotImplementedError

    def execute(self, statement: str) -> Any:
        return self.do(self.executing(statement))

    def order(self, id: int) -> None:
        """Write as the caller does, in a transaction that the job is to share."""
        self.execute(f"INSERT INTO orders (id) VALUES ({id})")

    def committed(self) -> tuple[list[int], list[int]]:
        """Return the orders and the jobs that others see."""
        return orders_and_jobs(self.watch)

    def begin(self) -> None:
        if self.begins:
            self.execute(self.begins)

    def commit(self) -> None:
        self.execute("COMMIT") if self.begins else self.do(self.session.commit())

    def rollback(self) -> None:
        self.execute("ROLLBACK") if self.begins else self.do(self.session.rollback())

    @contextmanager
    def savepoint(self) -> Iterator[Callable[[], None]]:
        """A savepoint, released at the end unless the function was called that rolls back to it."""
        release, roll_back = self._savepoint()
        undone = []

        def undo() -> None:
            roll_back()
            undone.append(True)

        yield undo
        if not undone:
            release()

    def _savepoint(self) -> tuple[Callable[[], object], Callable[[], object]]:
        """Begin one; return what releases it, and what rolls back to it."""
        name = next(self._names)
        self.execute(f"SAVEPOINT {name}")
        ends = ("RELEASE SAVEPOINT", "ROLLBACK TO SAVEPOINT")
        release, roll_back = (partial(self.execute, f"{end} {name}") for end in ends)
        return release, roll_back

    def close(self) -> None:
        self._closing.close()

    def __exit__(self, *exc: object) -> None:
        self.close()


Way = Callable[..., Caller]
"""Takes the URL of a database."""


class SessionCaller(Caller):
    def __init__(
        self, url: str, driver: str, kind: type[Any], *, configured: bool = True, **options: Any
    ) -> None:
        super().__init__(is_async="async" in driver or driver == "aiosqlite")
        parsed = make_url(url)
        parsed = parsed.set(drivername=f"{parsed.get_backend_name()}+{driver}")
        self.engine: Any = (aio.create_async_engine if self.is_async else create_engine)(parsed, **options)
        self._closing.callback(lambda: self.do(self.engine.dispose()))
        if configured and parsed.get_backend_name() == "sqlite":
            sqlq.configure_sqlite(self.engine)
        makers: dict[type[Any], Callable[[Any], Any]] = {
            scoped_session: lambda engine: scoped_session(sessionmaker(engine)),
            aio.async_scoped_session: lambda engine: kind(aio.async_sessionmaker(engine), lambda: None),
            Connection: lambda engine: engine.connect(),
            aio.AsyncConnection: lambda engine: engine.connect(),
        }
        self.session = makers.get(kind, kind)(self.engine)
        if kind is aio.AsyncConnection:
            self.do(self.session.start())
        self._closing.callback(lambda: self.do(self.session.close()))

    def executing(self, statement: str) -> Any:
        return self.session.execute(text(statement))

    def _savepoint(self) -> tuple[Callable[[], object], Callable[[], object]]:
        transaction = self.do(self.session.begin_nested())
        return lambda: self.do(transaction.commit()), lambda: self.do(transaction.rollback())


@dataclass(frozen=True)
class OfSqlalchemy:
    """A kind of session on a driver."""

    driver: str
    kind: type[Any]

    def __call__(self, url: str, **options: Any) -> Caller:
        return SessionCaller(url, self.driver, self.kind, **options)


SYNC: tuple[type[Any], ...] = (Session, scoped_session, Connection)
ASYNC: tuple[type[Any], ...] = (aio.AsyncSession, aio.async_scoped_session, aio.AsyncConnection)
KINDS: dict[str, dict[str, tuple[type[Any], ...]]] = {
    "postgresql": {
        "psycopg": SYNC,
        "psycopg2": SYNC,
        "asyncpg": ASYNC,
        "psycopg_async": (aio.AsyncSession, aio.AsyncConnection),
    },
    "sqlite": {"pysqlite": SYNC, "aiosqlite": ASYNC},
    "mariadb": {"pymysql": SYNC, "mysqldb": (Session, Connection), "asyncmy": ASYNC},
}
SESSIONS: dict[str, dict[str, Way]] = {
    database: {
        f"{driver}-{kind.__name__}": OfSqlalchemy(driver, kind)
        for driver, kinds in drivers.items()
        for kind in kinds
    }
    for database, drivers in KINDS.items()
}


def async_session_of(url: str) -> Way:
    """Return the way to have an aio.AsyncSession on the common driver of a database."""
    drivers = {"postgresql": "asyncpg", "mariadb": "asyncmy", "sqlite": "aiosqlite"}
    return OfSqlalchemy(drivers[make_url(url).get_backend_name()], aio.AsyncSession)


class DriverCaller(Caller):
    def __init__(self, url: str, mode: Mode) -> None:
        super().__init__(is_async=mode.is_async)
        self.begins = mode.begins
        self.session = self.do(mode.connect(url))
        self._closing.callback(lambda: self.do(self.session.close()))

    def executing(self, statement: str) -> Any:
        on = self.session if hasattr(self.session, "execute") else self.session.cursor()
        return on.execute(statement)


@dataclass(frozen=True)
class Mode:
    """How a driver's connection is made, and by which words its transactions begin."""

    connect: Callable[[str], Any]
    begins: str | None = None
    is_async: bool = False

    def __call__(self, url: str) -> Caller:
        return DriverCaller(url, self)


def dsn(url: str) -> str:
    """Return the address of a database of PostgreSQL as drivers take it."""
    return make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)


def file_of(url: str) -> str:
    return make_url(url).database or ""


def _address(url: str) -> dict[str, Any]:
    return {"password": "", **make_url(url).translate_connect_args(username="user")}


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


def _by(connect: Any, address: Callable[[str], str] = dsn, **options: Any) -> Callable[[str], Any]:
    return lambda url: connect(address(url), **options)


MODES: dict[str, dict[str, Mode]] = {
    "postgresql": {
        "psycopg": Mode(_by(psycopg.connect)),
        "psycopg-dicts": Mode(_by(psycopg.connect, row_factory=rows.dict_row)),
        "psycopg-scalars": Mode(_by(psycopg.connect, row_factory=rows.scalar_row)),
        "psycopg-raw": Mode(_by(psycopg.connect, cursor_factory=psycopg.RawCursor)),
        "psycopg-client": Mode(_by(psycopg.connect, cursor_factory=psycopg.ClientCursor)),
        "psycopg-autocommit": Mode(_by(psycopg.connect, autocommit=True), "BEGIN"),
        "psycopg2": Mode(_by(psycopg2.connect)),
        "psycopg2-dicts": Mode(_by(psycopg2.connect, cursor_factory=psycopg2.extras.RealDictCursor)),
        "psycopg2-autocommit": Mode(lambda url: _automatic(psycopg2.connect(dsn(url))), "BEGIN"),
        "psycopg-async": Mode(_by(psycopg.AsyncConnection.connect, row_factory=rows.dict_row), is_async=True),
        "psycopg-async-autocommit": Mode(
            _by(psycopg.AsyncConnection.connect, autocommit=True), "BEGIN", is_async=True
        ),
        "asyncpg": Mode(_by(asyncpg.connect), "BEGIN", is_async=True),
        "asyncpg-no-cache": Mode(_by(asyncpg.connect, statement_cache_size=0), "BEGIN", is_async=True),
    },
    "sqlite": {
        "sqlite3": Mode(_by(sqlite3.connect, file_of)),
        "sqlite3-rows": Mode(lambda url: _with_rows(sqlite3.connect(file_of(url)), sqlite3.Row, bytes)),
        "sqlite3-dicts": Mode(lambda url: _with_rows(sqlite3.connect(file_of(url)), _dict)),
        "sqlite3-immediate": Mode(_by(sqlite3.connect, file_of, isolation_level="IMMEDIATE")),
        "sqlite3-none": Mode(_by(sqlite3.connect, file_of, isolation_level=None), "BEGIN"),
    },
    "mariadb": {
        "pymysql": Mode(lambda url: pymysql.connect(**_address(url))),
        "pymysql-dicts": Mode(
            lambda url: pymysql.connect(**_address(url), cursorclass=pymysql.cursors.SSDictCursor)
        ),
        "pymysql-bytes": Mode(lambda url: pymysql.connect(**_address(url), use_unicode=False)),
        "pymysql-autocommit": Mode(lambda url: pymysql.connect(**_address(url), autocommit=True), "BEGIN"),
        "mysqlclient": Mode(_mysqlclient),
        "mysqlclient-dicts": Mode(lambda url: _mysqlclient(url, "SSDictCursor")),
        "mysqlclient-autocommit": Mode(lambda url: _mysqlclient(url, autocommit=True), "BEGIN"),
    },
}
if sys.version_info >= (3, 12):
    MODES["sqlite"] |= {
        "sqlite3-autocommit": Mode(_by(sqlite3.connect, file_of, autocommit=True), "BEGIN"),
        "sqlite3-pep249": Mode(_by(sqlite3.connect, file_of, autocommit=False)),
    }


@contextmanager
def django_connection(url: str) -> Iterator[Any]:
    """Django's connection to a database, made as by a project's settings."""
    if not django.conf.settings.configured:
        django.conf.settings.configure(USE_TZ=True)
        django.setup()
    parsed = make_url(url)
    engine = {"sqlite": "sqlite3", "mariadb": "mysql"}.get(parsed.get_backend_name(), "postgresql")
    if importlib.util.find_spec("MySQLdb") is None:
        pymysql.install_as_MySQLdb()
    place = {"NAME": parsed.database, "HOST": parsed.host, "PORT": parsed.port, "USER": parsed.username}
    settings = {"ENGINE": f"django.db.backends.{engine}", **{key: place[key] or "" for key in place}}
    alias, connections = f"shop_{abs(hash(url))}", django.db.connections
    known = connections.configure_settings({"default": {}, alias: settings})
    connections.settings[alias] = known[alias]
    yield connections[alias]
    connections[alias].close()
    del connections[alias]
    del connections.settings[alias]


class DjangoCaller(Caller):
    def __init__(self, url: str) -> None:
        super().__init__(is_async=False)
        self.session = self._closing.enter_context(django_connection(url))

    def begin(self) -> None:
        self.session.set_autocommit(False)

    def executing(self, statement: str) -> None:
        with self.session.cursor() as cursor:
            cursor.execute(statement)


COMMON = (
    *("psycopg-Session", "psycopg2-Connection", "pysqlite-scoped_session"),
    *("asyncpg-AsyncSession", "psycopg_async-AsyncConnection", "aiosqlite-async_scoped_session"),
    *("pymysql-Session", "asyncmy-AsyncSession", "psycopg", "asyncpg", "sqlite3", "pymysql"),
)
"""Ways with each driver and each kind of session in one of them."""
without_mysqlclient = pytest.mark.skipif(
    importlib.util.find_spec("MySQLdb") is None,
    reason="NOT TESTED: mysqlclient is not installed, which takes a compiler and libmariadb-dev",
)


def _each(
    ways: Iterable[tuple[str, str, Way]], is_alike: Callable[[str], bool] = lambda name: name not in COMMON
) -> pytest.MarkDecorator:
    """Give a test each of these ways, with its database; one of those that are alike runs by default."""
    return pytest.mark.parametrize(
        ("database_url", "way"),
        [
            pytest.param(
                *(database, way),
                id=name,
                marks=(
                    *((pytest.mark.variants,) if is_alike(name) else ()),
                    *((without_mysqlclient,) if "mysqldb" in name or "mysqlclient" in name else ()),
                ),
            )
            for database, name, way in ways
        ],
        indirect=["database_url"],
    )


def _of(table: Mapping[str, Mapping[str, Way]], databases: Sequence[str]) -> list[tuple[str, str, Way]]:
    return [(database, name, way) for database in databases for name, way in table[database].items()]


def sessions(*databases: str) -> pytest.MarkDecorator:
    """Sessions of SQLAlchemy, at these databases or at those that are tested."""
    return _each(_of(SESSIONS, databases or DATABASES), lambda name: False)


def modes(
    wanted: Callable[[str, Mode], bool] = lambda name, mode: True, *, databases: Sequence[str] = DATABASES
) -> pytest.MarkDecorator:
    """Connections of drivers: they differ in the primitives of sqlq's `DriverConnection` only."""
    return _each(
        (database, name, mode)
        for database in databases
        for name, mode in MODES[database].items()
        if wanted(name, mode)
    )


_ALL = [
    *_of(SESSIONS, DATABASES),
    *_of(MODES, DATABASES),
    *((database, f"django-{database}", DjangoCaller) for database in DATABASES),
]
_ALIKE = {name for named in MODES.values() for name in named} - {*COMMON}
every_way = _each(_ALL, lambda name: name in _ALIKE)
common_ways = _each(_ALL)
common_sessions = _each(_of(SESSIONS, DATABASES))
common_modes = modes()
of_django = pytest.mark.parametrize("way", [DjangoCaller])
automatic = modes(lambda name, mode: mode.begins is not None)
"""Where each statement outside a transaction is a transaction by itself."""


def orders_and_jobs(engine: Engine) -> tuple[list[int], list[int]]:
    """Return what a caller has committed."""
    return committed(engine, "orders"), committed(engine)
