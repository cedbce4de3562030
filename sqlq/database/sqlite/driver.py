"""SQLite: one writer at a time, so a write transaction waits for the lock at its begin.

SQLite can refuse a transaction that reads first and writes later, because another one wrote in between. It
does so at once, in spite of the busy timeout. It cannot refuse BEGIN IMMEDIATE so, which waits before it has
read anything.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

from sqlalchemy import URL, Connection, Engine, event
from sqlalchemy.dialects import sqlite
from sqlalchemy.util import await_only

from sqlq.config.command_hint import command
from sqlq.config.urls import IN_MEMORY, in_memory
from sqlq.database.dialect import Driver
from sqlq.database.timeouts import AnswerTimeout
from sqlq.database.values import Problem, RawRows
from sqlq.errors import ConfigurationError, MissingFileError

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine


BUSY_TIMEOUT_MS = 10_000
READ_ONLY = "sqlq_read_only"
"""Execution option of connections that only read, and so need not wait for the write lock."""


def may_only_be_read(url: URL) -> bool:
    """Whether a file may only be read, by its permissions or by its URL, as in file:jobs.db?mode=ro."""
    name = url.database or ""
    if name.startswith("file:"):
        return url.query.get("mode") == "ro" or url.query.get("immutable") == "1"
    return os.path.exists(name) and not os.access(name, os.W_OK)  # noqa: PTH110 - the Path of "" exists


def is_open(file: str) -> bool:
    """Whether this process has a file open; False where the system does not show it.

    SQLite counts its locks by process. A child that inherits an open file takes the locks of its parent for
    its own. Then the parent may remove the log to which the child writes. A mutex that another thread held
    stays locked in the child, which then waits for ever. The rule is one of
    https://www.sqlite.org/howtocorrupt.html#_carrying_an_open_database_across_a_fork_
    """
    with suppress(OSError):
        for fd in Path("/dev/fd").iterdir():
            with suppress(OSError):  # that of the directory itself is closed by now
                if fd.samefile(file):
                    return True
    return False


class SQLiteDriver(Driver):
    sqlalchemy = sqlite.dialect
    begins = "BEGIN IMMEDIATE"

    def run(self, driver: Any, statement: str, parameters: Any) -> RawRows:
        # A single statement takes the write lock at its begin, and waits for it as BEGIN IMMEDIATE does. It
        # commits when all its rows are read.
        return cast("RawRows", driver.execute(statement, parameters).fetchall())

    def commits_at_once(self, pooled: Any) -> bool:
        return commits_at_once(pooled.driver_connection)

    def problem(self, error: BaseException) -> Problem:
        code, kind = _code(error), _code(error) & 0xFF  # the extended code, and the primary one
        return Problem(
            is_away=kind in _AWAY,
            rolled_back=kind in _LOCKED,
            refused=kind not in (0, *_AWAY),
            takes_no_writes=kind in _NO_WRITES,
            advice=_SNAPSHOT
            if code == sqlite3.SQLITE_BUSY_SNAPSHOT
            else _BUSY
            if kind == sqlite3.SQLITE_BUSY
            else None,
        )

    def prepare(self, engine: Engine, timeout: AnswerTimeout, *, plans_once: bool) -> None:
        begin_explicitly(engine, immediate=True)  # guard: sqlite-begins-immediate

        @event.listens_for(engine, "connect")
        def _connected(dbapi_connection: Any, record: Any) -> None:
            dbapi_connection.text_factory = _text  # guard: sqlite-bytes-are-read-as-text
            # readers never block the writer, nor the writer them; the mode stays with the file
            try:
                dbapi_connection.execute("PRAGMA journal_mode = WAL").fetchall()
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_READONLY:
                    raise
                # a read-only file keeps its mode


def mind_the_file(url: URL, create: bool) -> tuple[int, int] | None:
    """Return by what the file of a URL differs from others. Raise an error with the path of a missing one,
    instead of making an empty one or "unable to open database file"."""
    name = url.database or ""
    with suppress(OSError):
        seen = os.stat(name)  # noqa: PTH116 - at every enqueue, and a Path costs several times as much
        return seen.st_dev, seen.st_ino
    if in_memory(url):  # guard: memory-is-never-opened
        raise ConfigurationError(IN_MEMORY)
    if name.startswith("file:"):
        return None
    path = Path(name).absolute()
    if not create:
        raise MissingFileError(f"there is no database file {path}: create it with {command('migrate', url)}")
    if not path.parent.is_dir():
        raise ConfigurationError(
            f"there is no directory {path.parent} for the database file: create it first"
        )
    return None


_LOCKED = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)
_NO_WRITES = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY)
# guard: full-disk-is-an-outage
_AWAY = (*_LOCKED, *_NO_WRITES, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)


def _code(error: BaseException) -> int:
    """Return SQLite's extended code of an error; 0 for one that is not SQLite's."""
    return getattr(getattr(error, "orig", error), "sqlite_errorcode", None) or 0


_SNAPSHOT = (
    "SQLite refused the write because another program wrote after this transaction first read: begin such "
    "transactions with the write lock, by BEGIN IMMEDIATE or "
    "sqlq.configure_sqlite(engine, immediate=True), or run this one again"
)
_BUSY = (
    "SQLite refused the write because another program held the write lock for longer than this connection "
    "waits: keep transactions that write short, and run this one again"
)


def _text(data: bytes) -> str:
    """Read text that may not be UTF-8: SQLite stores any bytes, and one such row would fail every claim of
    its queue.

    Other bytes become text that is no JSON, no task's name and no queue's. So their job ends as a failed row
    for an operator.
    """
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "\ufffd" + data.decode(errors="replace")


_IMMEDIATE: WeakKeyDictionary[Engine, bool] = WeakKeyDictionary()
"""Whether the transactions of an engine begin with the write lock."""


def begin_explicitly(engine: Engine, *, immediate: bool) -> None:
    """Make SQLAlchemy's transactions on this engine real ones, which begin in the database when they begin in
    SQLAlchemy.

    Python's driver opens a transaction only before the first INSERT, UPDATE or DELETE. A SAVEPOINT before
    that opens none, so its RELEASE commits writes that the outer ROLLBACK should undo.
    """
    is_known = engine in _IMMEDIATE
    _IMMEDIATE[engine] = immediate
    if is_known:
        return  # guard: transaction-begins-once

    @event.listens_for(engine, "connect")
    def _connected(dbapi_connection: Any, record: Any) -> None:
        dbapi_connection.isolation_level = None
        cursor = dbapi_connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _began(conn: Connection) -> None:
        is_immediate = _IMMEDIATE[engine] and not conn.get_execution_options().get(READ_ONLY)
        conn.exec_driver_sql("BEGIN IMMEDIATE" if is_immediate else "BEGIN")


def configure_sqlite(engine: Engine | AsyncEngine, *, immediate: bool = False) -> None:
    """Make an engine's SQLite transactions real: they begin explicitly, so that savepoints and rollbacks
    cover all of them.

    Call it where your engine is made; the last of several calls counts. With `immediate` each transaction
    takes the write lock as it begins, and waits for it up to ten seconds. Without it, SQLite can refuse the
    write of a transaction that reads first, because another one wrote in between. The rule and the remedy are
    those of SQLAlchemy's notes on pysqlite and savepoints.

    >>> engine = create_engine("sqlite:///shop.db")
    >>> sqlq.configure_sqlite(engine)
    """
    sync = engine if isinstance(engine, Engine) else engine.sync_engine
    if sync.dialect.name != "sqlite":
        raise ConfigurationError(
            f"configure_sqlite was given an engine for {sync.dialect.name}; it is of use for SQLite only"
        )
    begin_explicitly(sync, immediate=immediate)
    sync.pool.dispose()  # earlier connections do not have these settings


def autocommit_of(driver: Any) -> bool | None:
    """Return the `autocommit` of a connection of Python's driver or of aiosqlite. None means that
    `isolation_level` decides, as always before Python 3.12.

    On aiosqlite this awaits it as SQLAlchemy does, since the inner connection works only on its own thread.
    """
    inner = getattr(driver, "_conn", None)  # guard: aiosqlite-autocommit-is-checked
    mode = (
        getattr(driver, "autocommit", None)
        if inner is None
        else await_only(driver._execute(getattr, inner, "autocommit", None))  # noqa: SLF001 - shown nowhere else
    )
    return mode if isinstance(mode, bool) else None


def commits_at_once(driver: Any) -> bool:
    """Whether a write on such a connection commits at once: no transaction is open, and the driver begins
    none for it."""
    if driver.in_transaction:
        return False
    mode = autocommit_of(driver)
    return driver.isolation_level is None if mode is None else mode


def begin_as_for_a_write(conn: Connection) -> None:
    """Begin the transaction that Python's driver would begin before a write.

    The driver recognises a write by its first word. It takes one that begins with WITH for a read, which then
    commits at once.
    """
    driver: Any = conn.connection.driver_connection
    if not driver.in_transaction:
        conn.exec_driver_sql(f"BEGIN {driver.isolation_level}")  # guard: sqlalchemy-begins-as-for-its-own


def savepoint_may_be_outermost(conn: Connection) -> bool:
    """Whether this connection is in a savepoint for which its driver may have begun no transaction (see
    above).

    SQLite itself does not report it. Connections whose transactions begin explicitly are safe: with
    `isolation_level` None, as set by `begin_explicitly`, or Python 3.12's `autocommit=False`.
    """
    if not conn.in_nested_transaction():
        return False
    driver: Any = conn.connection.driver_connection
    return driver.isolation_level is not None and autocommit_of(driver) is not False
