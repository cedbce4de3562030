"""Connections that a caller made without SQLAlchemy: of psycopg, psycopg2, asyncpg, PyMySQL, mysqlclient,
sqlite3 or Django.

The connection stays the caller's. This module runs statements on it, and reads the rows in spite of the
caller's settings for rows. It does not change these. The caller has imported the driver, so this module finds
it among the loaded modules. It imports nothing for a kind of connection that is not in use.

On an asynchronous connection the work is awaited on the caller's own event loop, by greenlets, as in
SQLAlchemy's asynchronous sessions.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import lru_cache
from typing import Any, cast
from weakref import WeakKeyDictionary

from sqlalchemy import URL
from sqlalchemy.util import await_only

from sqlq.database.caller.driver import NOTHING, Answer, DriverConnection, Endpoint, answer
from sqlq.database.sqlite.driver import autocommit_of, commits_at_once
from sqlq.errors import UnsupportedDatabaseError
from sqlq.schema.qualify import in_catalog

# -- PostgreSQL ----------------------------------------------------------------------------------------------

_IDLE = 0
"""The transaction status of libpq outside any transaction; also if unknown."""

# The default schema comes from the connection's initial search_path and not from a later SET. So a tenant's
# SET sends no job elsewhere.
_LOOK = in_catalog(
    """
SELECT current_database(), CAST(current_setting('server_version_num') AS integer),
       (SELECT n.nspname
          FROM pg_catalog.pg_settings s
         CROSS JOIN LATERAL regexp_split_to_table(s.reset_val, '[[:space:]]*,[[:space:]]*')
                    WITH ORDINALITY AS path (part, place)
          JOIN pg_catalog.pg_namespace n
            ON n.nspname = CASE WHEN path.part = ANY (ARRAY['"$user"', '$user'])
                                THEN CAST(current_user AS varchar)
                                WHEN path.part ~~ '"_%"' THEN btrim(path.part, '"')
                                ELSE lower(path.part) END
         WHERE s.name = 'search_path' AND has_schema_privilege(n.oid, 'USAGE')
         ORDER BY path.place
         LIMIT 1)
"""
)


class _PostgreSQL(DriverConnection):
    database = "postgresql"

    def look(self) -> Endpoint:
        _, host, port, _, user, *_ = self.identity() or (None,) * 5
        ((name, number, schema),) = self.run(_LOOK, ()).rows
        return Endpoint(
            URL.create(f"postgresql+{self.driver}", user, host=host or None, port=port, database=name),
            (number // 10_000, number % 10_000),
            schema,
        )

    def identity(self) -> tuple[Any, ...] | None:
        info = self.connection.info
        return self.driver, info.host, info.port, info.dbname, info.user, info.options

    def in_transaction(self) -> bool:
        return bool(self.connection.info.transaction_status != _IDLE)

    def commits_at_once(self) -> bool:
        return bool(self.connection.autocommit) and not self.in_transaction()


class Psycopg(_PostgreSQL):
    """A `psycopg.Connection`."""

    driver = module = "psycopg"
    plain = "Cursor"
    """The class of plain cursors: that of the caller may return rows as dicts, or take other parameters."""

    def run(self, statement: str, parameters: Any) -> Answer:
        kind = getattr(sys.modules["psycopg"], self.plain)
        cursor = kind(self.connection, row_factory=sys.modules["psycopg.rows"].tuple_row)
        self._wait(cursor.execute(statement, parameters or None))
        if cursor.pgresult is not None and cursor.description is None:
            return NOTHING
        rows = self._wait(cursor.fetchall())  # in a pipeline the result comes now, with its description
        return answer(cursor.description, rows)

    def send(self, command: str) -> None:
        self._wait(self.connection.execute(command))

    def _wait(self, result: Any) -> Any:
        return result


class AsyncPsycopg(Psycopg):
    """A `psycopg.AsyncConnection`."""

    is_async = True
    plain = "AsyncCursor"

    def _wait(self, result: Any) -> Any:
        return await_only(result)


class Psycopg2(_PostgreSQL):
    """A connection of psycopg2."""

    driver = module = "psycopg2"

    def run(self, statement: str, parameters: Any) -> Answer:
        with self.connection.cursor(cursor_factory=sys.modules["psycopg2.extensions"].cursor) as cursor:
            cursor.execute(statement, parameters or None)
            return NOTHING if cursor.description is None else answer(cursor.description, cursor.fetchall())

    def commits_at_once(self) -> bool:
        if self.connection.autocommit and not self.in_transaction():
            # inside `with connection:` it begins one even so; guard: psycopg2-block-begins-a-transaction
            self.run("SELECT 1", ())
        return super().commits_at_once()

    def transaction(self) -> Any:
        return self.connection


class Asyncpg(_PostgreSQL):
    """A connection of asyncpg, or one of its pool."""

    driver = "asyncpg"
    is_async = True

    @property
    def errors(self) -> Any:
        asyncpg: Any = sys.modules["asyncpg"]
        return asyncpg.PostgresError, asyncpg.InterfaceError

    def run(self, statement: str, parameters: Any) -> Answer:
        rows = await_only(self.connection.fetch(statement, *parameters))
        return Answer(list(rows[0].keys()), [tuple(row.values()) for row in rows]) if rows else NOTHING

    def identity(self) -> tuple[Any, ...] | None:
        # asyncpg's private attributes: without them, each connection is queried
        address = getattr(self.connection, "_addr", None)
        parameters = getattr(self.connection, "_params", None)
        if parameters is None or getattr(parameters, "server_settings", None):
            return None
        host, port = address if isinstance(address, tuple) else (address, None)
        return self.driver, host, port, parameters.database, parameters.user

    def in_transaction(self) -> bool:
        return bool(self.connection.is_in_transaction())

    def commits_at_once(self) -> bool:
        return not self.in_transaction()


# -- SQLite --------------------------------------------------------------------------------------------------


class Sqlite3(DriverConnection):
    """A `sqlite3.Connection`."""

    database = "sqlite"
    driver = "pysqlite"
    module = "sqlite3"

    def run(self, statement: str, parameters: Any) -> Answer:
        cursor = sys.modules["sqlite3"].Cursor(self.connection)  # which ignores the row_factory
        try:
            cursor.execute(statement, parameters)
            return answer(cursor.description, cursor.fetchall())
        finally:
            cursor.close()

    def identity(self) -> Hashable | None:
        return self._file() or None

    def look(self) -> Endpoint:
        url = URL.create(f"sqlite+{self.driver}", database=self._file() or ":memory:")
        return Endpoint(url, sys.modules["sqlite3"].sqlite_version_info, "main")

    def _file(self) -> str:
        """Return the path of the file; empty for a database in memory."""
        ((_, _, file), *_) = self.run("PRAGMA database_list", ()).rows  # the first one is always "main"
        return str(file)

    def in_transaction(self) -> bool:
        return bool(self.connection.in_transaction)

    def has_started(self) -> bool:
        # with autocommit=False one is always open
        return self.in_transaction() and autocommit_of(self.connection) is not False

    def commits_at_once(self) -> bool:
        return commits_at_once(self.connection)

    def begin(self) -> None:
        if not self.in_transaction():
            self.run(f"BEGIN {self.connection.isolation_level}", ())

    @contextmanager
    def transaction(self) -> Iterator[None]:
        conn = self.connection
        by_statement = autocommit_of(conn) is True  # then its commit and rollback do nothing
        if not conn.in_transaction:  # else it is always in one, as by autocommit=False
            conn.execute("BEGIN IMMEDIATE")
        try:
            yield
            conn.execute("COMMIT") if by_statement else conn.commit()
        except BaseException:
            conn.execute("ROLLBACK") if by_statement else conn.rollback()
            raise


# -- MariaDB -------------------------------------------------------------------------------------------------


class PyMySQL(DriverConnection):
    """A connection of PyMySQL."""

    database = "mariadb"
    driver = module = "pymysql"

    def run(self, statement: str, parameters: Any) -> Answer:
        # the caller's class of cursors may return rows as dicts
        with self.connection.cursor(sys.modules[f"{self.module}.cursors"].Cursor) as cursor:
            cursor.execute(statement, parameters or None)
            return answer(cursor.description, cursor.fetchall())

    def identity(self) -> Hashable | None:
        return self.driver, *self._seen()

    def look(self) -> Endpoint:
        version, name, user, host, port = self._seen()
        if "MariaDB" not in version:
            raise UnsupportedDatabaseError(
                f"sqlq runs on MariaDB, not on MySQL, and this connection leads to MySQL {version}"
            )
        return Endpoint(
            URL.create(
                f"mariadb+{self.driver}", user.rpartition("@")[0], host=host, port=port, database=name
            ),
            tuple(map(int, version.partition("-")[0].split("."))),
            name,
        )

    def _seen(self) -> tuple[Any, ...]:
        if self.connection not in _SEEN:
            ((version, name, user, host, port),) = self.run(
                "SELECT VERSION(), DATABASE(), USER(), @@hostname, @@port", ()
            ).rows
            host, port = getattr(self.connection, "host", host), getattr(self.connection, "port", port)
            _SEEN[self.connection] = version, name, user, host, port
        return _SEEN[self.connection]

    def in_transaction(self) -> bool:
        # drivers keep the status of an earlier answer
        return bool(self.run("SELECT @@in_transaction", ()).rows[0][0])

    def commits_at_once(self) -> bool:
        return bool(self.connection.get_autocommit()) and not self.in_transaction()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self.connection.begin()
        try:
            yield
            self.connection.commit()
        except BaseException:
            with suppress(self.errors):  # it may be cut off
                self.connection.rollback()
            raise

    def cut_off(self) -> None:
        self.connection._force_close()  # noqa: SLF001 - after close() a `with` block of the caller's raises


class MySQLClient(PyMySQL):
    """A connection of mysqlclient."""

    driver, module = "mysqldb", "MySQLdb"

    def cut_off(self) -> None:
        with socket.socket(fileno=os.dup(self.connection.fileno())) as its:  # as above
            its.shutdown(socket.SHUT_RDWR)


_SEEN: WeakKeyDictionary[Any, tuple[Any, ...]] = WeakKeyDictionary()
"""The place of each connection, as it was at first: a later USE sends no job elsewhere."""


# -- Django --------------------------------------------------------------------------------------------------


def _aware(value: Any) -> Any:
    """Return a value, a time with the project's time zone, which Django leaves out where USE_TZ is False."""
    is_naive = isinstance(value, datetime) and value.tzinfo is None
    return sys.modules["django.utils.timezone"].make_aware(value) if is_naive else value


class Django(DriverConnection):
    """A connection of Django's, before the class of the driver's connection in it.

    Statements go to that connection, as from Django's own cursors. Errors come as Django's, and mark its
    atomic block, as those of its ORM do.
    """

    is_each_threads_own = True
    wrapper: Any

    def run(self, statement: str, parameters: Any) -> Answer:
        try:
            with self.wrapper.wrap_database_errors:
                names, rows = super().run(statement, parameters)
        except sys.modules["django.db"].Error:
            if self.wrapper.in_atomic_block:
                self.wrapper.needs_rollback = True
            raise
        if not sys.modules["django.conf"].settings.USE_TZ:
            rows = [tuple(map(_aware, row)) for row in rows]
        return Answer(names, rows)

    def has_started(self) -> bool:
        return False  # atomic() checks it better: that of a test case does not count

    def send(self, command: str) -> None:
        with self.wrapper.wrap_database_errors:
            super().send(command)

    def transaction(self) -> Any:
        return sys.modules["django.db.transaction"].atomic(using=self.wrapper.alias, durable=True)

    def on_commit(self, callback: Callable[[], object]) -> bool:
        if not self.wrapper.in_atomic_block:
            return False
        self.wrapper.on_commit(callback)
        return True

    def refuse_broken(self) -> None:
        self.wrapper.validate_no_broken_transaction()

    def cut_off(self) -> None:
        if self.wrapper.in_atomic_block:
            self.wrapper.needs_rollback = True
        else:
            super().cut_off()


def _in_django(wrapper: Any) -> DriverConnection:
    """Return a connection of Django's, `django.db.connection` or one of `connections`."""
    if not hasattr(wrapper, "validate_no_broken_transaction"):  # the proxy for the default connection
        wrapper = sys.modules["django.db"].connections[wrapper.alias]
    wrapper.ensure_connection()
    wrapper.validate_thread_sharing()
    driver: Any = driver_of(wrapper.connection)
    if driver is None or driver.is_async:
        raise UnsupportedDatabaseError(
            f"sqlq runs on PostgreSQL, MariaDB and SQLite; Django's connection {wrapper.alias!r} "
            f"leads to {wrapper.display_name}"
        )
    driver.__class__ = type("Django", (Django, type(driver)), {})
    driver.wrapper = wrapper
    return cast("DriverConnection", driver)


# -- which one it is -----------------------------------------------------------------------------------------

_KINDS: dict[tuple[str, str], type[DriverConnection]] = {
    ("psycopg", "Connection"): Psycopg,
    ("psycopg", "AsyncConnection"): AsyncPsycopg,
    ("psycopg2", "connection"): Psycopg2,
    ("asyncpg", "Connection"): Asyncpg,
    ("asyncpg", "PoolConnectionProxy"): Asyncpg,
    ("pymysql", "Connection"): PyMySQL,
    ("MySQLdb", "Connection"): MySQLClient,
    ("sqlite3", "Connection"): Sqlite3,
    ("django", "BaseDatabaseWrapper"): Django,
    ("django", "ConnectionProxy"): Django,
}


def driver_of(session: Any) -> DriverConnection | None:
    """Return a caller's connection as its driver's class here; None for anything else.

    The names of its classes decide, so that no driver has to be imported. A tracing wrapper has the class of
    a connection, and the connection as `__wrapped__`.
    """
    if hasattr(session, "driver_connection"):  # one of SQLAlchemy's pool, as from engine.raw_connection()
        session = session.driver_connection
    kind = kind_of(session.__class__)
    if kind is Django:
        return _in_django(session)
    return None if kind is None else kind(getattr(session, "__wrapped__", session))


@lru_cache
def kind_of(cls: type) -> type[DriverConnection] | None:
    """Return the class of this module for a class of connections; None for any other."""
    for each in cls.__mro__:
        if kind := _KINDS.get((each.__module__.partition(".")[0], each.__name__)):
            return kind
    return None
