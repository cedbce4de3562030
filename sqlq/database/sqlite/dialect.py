"""SQLite: one writer at a time, so a write transaction waits for the lock at its begin.

SQLite can refuse a transaction that reads first and writes later, because another one wrote in between. It
does so at once, in spite of the busy timeout. It cannot refuse BEGIN IMMEDIATE so, which waits before it has
read anything.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit
from weakref import WeakKeyDictionary

from sqlalchemy import URL, Connection, Engine, bindparam, cast, column, event, func, select
from sqlalchemy.dialects import sqlite
from sqlalchemy.exc import OperationalError
from sqlalchemy.sql.selectable import FromClause
from sqlalchemy.types import Text
from sqlalchemy.util import await_only

from sqlq.database.batch import Batch
from sqlq.database.dialect import Dialect
from sqlq.database.sqlite import health
from sqlq.database.timeouts import Patience
from sqlq.database.values import (
    LARGEST_WINDOW,
    Ask,
    Claimant,
    ClaimRequest,
    RawRows,
    Trouble,
    claimed_columns,
)
from sqlq.errors import ConfigurationError
from sqlq.schema.tables import CARRIED, LARGEST_TOKEN, MOST_COUNTED
from sqlq.schema.types import SQLITE_NOW, milliseconds_of

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine


BUSY_TIMEOUT_MS = 10_000
_IMMUTABLE = "sqlq_immutable"
READ_ONLY = "sqlq_read_only"
"""Execution option of connections that only read, and so need not wait for the write lock."""


_WORDS = {
    "now": SQLITE_NOW,
    "given": "?",
    "greatest": "max",
    "carried": ", ".join(CARRIED),
    "straight_join": "CROSS JOIN",
    # so a live one of a wide join is found at once
    "youngest_first": " ORDER BY open.depends_on DESC LIMIT 1",
    **{
        f"{ended}_recently": f"ended.{ended}_at > {SQLITE_NOW} - ? "
        "AND (ended.flow_id IS NOT NULL OR ended.limit_key IS NOT NULL)"
        for ended in ("finished", "failed")
    },
    # the planner finds the indexes
    **dict.fromkeys(("by_id", "by_parent", "by_line", "by_rank", "by_finished", "by_failed"), ""),
}
"""SQLite's words for the statements of `blocked`."""


def may_only_be_read(url: URL) -> bool:
    """Whether a file may only be read, by its permissions or by its URL, as in file:jobs.db?mode=ro."""
    name = url.database or ""
    if name.startswith("file:"):
        return url.query.get("mode") == "ro" or url.query.get("immutable") == "1"
    return os.path.exists(name) and not os.access(name, os.W_OK)  # noqa: PTH110 - as in `Database`


class SQLite(Dialect):
    name, title = "sqlite", "SQLite"
    words = _WORDS
    oldest = (3, 35)
    in_a_file = True
    single_changes = False
    own_paramstyle = "qmark"
    begins = "BEGIN IMMEDIATE"
    in_json = staticmethod(milliseconds_of)
    one_writer = True
    sees_commits = True
    claims_beyond = False
    most_unwritten = 200
    shortest_us = 1_000
    _insert, _core = staticmethod(sqlite.insert), sqlite.dialect
    health = health

    remove_steps = "DELETE FROM __sqlq__.jobs WHERE id IN ({ids})"

    def claim(self, ask: Ask, wanted: ClaimRequest, by: Claimant) -> RawRows:
        names, limit, order, _ = wanted
        paused = {name for (name,) in ask(_PAUSED, ())}
        served = [name for name in names if name not in paused]  # guard: pause-sqlite
        several = order == "evenly" and 0 < len(served) <= limit  # guard: queues-without-order-share-a-claim
        share = limit // len(served) if several else limit
        due: list[int] = []
        more: list[str] = []
        statements = _DUE_LAST if order == "newest" else _DUE_FIRST
        # at most `share` of each as long as others have some
        for name in served:
            if len(due) == limit:
                break
            rows = self._due_in_one(ask, statements, name, min(share, limit - len(due)), 1)
            due += [id for id, _ in rows]
            more += [name] if len(rows) == share else []
        for name in more:
            if len(due) == limit:
                break
            rows = self._due_in_one(ask, statements, name, share + limit - len(due), 1)
            due += [id for id, _ in rows[share:]]
        if not due:
            return []
        begun, ids = time.monotonic(), json.dumps(due)
        rows = ask(_RESERVE, (*by, ids))
        if (time.monotonic() - begun) * 2_000 > by.lease_ms:
            # large rows: a rescue might follow the COMMIT; guard: a-lease-begins-with-its-rows
            ask(_RENEW, (by.lease_ms, ids))
        return rows

    def due_in(self, ask: Ask, names: Sequence[str], after: str | None = None) -> RawRows:
        known = json.dumps(list(names))
        return ask(_DUE_IN, (known,)) if after is None else ask(_DUE_IN_WINDOW, (after, known))

    def batch_table(self, batch: Batch) -> FromClause:
        each = func.json_each(bindparam("batch", type_=Text)).table_valued(column("value"), name="each")
        columns = (
            cast(func.json_extract(each.c.value, f"$[{i}]"), kind).label(name)
            for i, (name, kind) in enumerate(batch.columns.items())
        )
        return select(*columns).subquery("batch")

    def texts(self) -> FromClause:
        each = func.json_each(bindparam("texts", type_=Text)).table_valued(
            column("value", Text), column("key"), name="each"
        )
        return select(each.c.value, each.c.key.label("place")).subquery("texts")

    def run(self, driver: Any, statement: str, parameters: Any) -> RawRows:
        # A single statement takes the write lock at its begin, and waits for it as BEGIN IMMEDIATE does. It
        # commits when all its rows are read.
        rows: list[Any] = driver.execute(statement, parameters).fetchall()
        return rows

    def commits_at_once(self, pooled: Any) -> bool:
        return commits_at_once(pooled.driver_connection)

    def trouble(self, error: BaseException) -> Trouble:
        code, kind = _code(error), _code(error) & 0xFF  # the extended code, and the primary one
        return Trouble(
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

    def lock_for_migration(self, conn: Connection, schema: str | None) -> bool:
        driver: Any = conn.connection.driver_connection
        if driver.in_transaction:
            return True  # a host's transaction is locked as the host sees fit
        try:
            conn.exec_driver_sql("BEGIN IMMEDIATE")
        except OperationalError as error:
            if "locked" not in str(error.orig):
                raise
            return False
        return True

    def prepare(self, engine: Engine, patience: Patience, *, plans_once: bool) -> None:
        begin_explicitly(engine, immediate=True)  # guard: sqlite-begins-immediate

        @event.listens_for(engine, "do_connect")
        def _connects(dialect: Any, record: Any, arguments: Any, options: Any) -> Any:
            if not is_sealed(engine.url):
                return None
            record.info[_IMMUTABLE] = True  # guard: what-is-immutable-is-opened-anew
            return sqlite3.connect(f"{_file(engine.url).as_uri()}?immutable=1", **{**options, "uri": True})

        @event.listens_for(engine, "connect")
        def _connected(dbapi_connection: Any, record: Any) -> None:
            dbapi_connection.text_factory = _text  # guard: bytes-are-read
            # readers never block the writer, nor the writer them; the mode stays with the file
            try:
                dbapi_connection.execute("PRAGMA journal_mode = WAL").fetchall()
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_READONLY:
                    raise
                # a read-only file keeps its mode

        @event.listens_for(engine, "checkin")
        def _rests(dbapi_connection: Any, record: Any) -> None:
            if dbapi_connection is not None and record.info.pop(_IMMUTABLE, False):
                record.invalidate()  # it sees no changes, and the file may be writable by now


def _file(url: URL) -> Path:
    name = url.database or ""
    return Path(unquote(urlsplit(name).path) if name.startswith("file:") else name).absolute()


def is_sealed(url: URL) -> bool:
    """Whether neither a file nor its directory is writable, and no log lies beside it.

    As far as sqlq can see, no other program uses such a file. SQLite can read it only as immutable: otherwise
    it first makes a log, in which it registers readers.
    """
    file = _file(url)
    if not file.exists() or not may_only_be_read(url):
        return False
    return not os.access(file.parent, os.W_OK) and not file.with_name(f"{file.name}-wal").exists()


_LOCKED = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)
_NO_WRITES = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY)
# guard: full-disk-is-away
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

_PAUSED = "SELECT queue FROM main.sqlq_queues WHERE paused_at IS NOT NULL"
_TOP_LEVEL = (
    "SELECT priority FROM main.jobs WHERE queue = ? AND reserved_at IS NULL ORDER BY priority DESC LIMIT 1"
)
_NEXT_LEVEL = "SELECT max(priority) FROM main.jobs WHERE queue = ? AND reserved_at IS NULL AND priority < ?"


def _due_at(level: str, order: str) -> str:
    # guard: due-sqlite
    return f"""
SELECT id, priority FROM main.jobs
 WHERE queue = ? AND reserved_at IS NULL AND priority = {level} AND available_at <= {SQLITE_NOW}
 ORDER BY {order}
 LIMIT ?
"""


_DUE_FIRST, _DUE_LAST = (
    (_due_at(f"({_TOP_LEVEL})", order), _due_at("?", order), _NEXT_LEVEL)
    for order in ("available_at, id", "available_at DESC, id DESC")
)
"""The statements for the highest priority of a queue, for a given one, and for the next lower one."""
_WINDOW = """
each (queue) AS (
      SELECT min(queue) FROM main.jobs WHERE reserved_at IS NULL AND queue > ?
      UNION ALL
      SELECT (SELECT min(j.queue) FROM main.jobs j WHERE j.reserved_at IS NULL AND j.queue > each.queue)
        FROM each WHERE each.queue IS NOT NULL),"""
_IN_WINDOW = f"""
      UNION ALL
      SELECT queue, row_number() OVER () FROM (
             SELECT queue FROM each WHERE queue IS NOT NULL LIMIT {LARGEST_WINDOW})"""
_LEVELS = """,
levels (queue, place, priority, available_at) AS (
      SELECT j.queue, names.place, j.priority, j.available_at FROM names JOIN main.jobs j ON j.id = (
             SELECT id FROM main.jobs WHERE queue = names.queue AND reserved_at IS NULL
              ORDER BY priority DESC, available_at, id LIMIT 1)
      UNION ALL
      SELECT j.queue, levels.place, j.priority, j.available_at FROM levels JOIN main.jobs j ON j.id = (
             SELECT id FROM main.jobs WHERE queue = levels.queue AND reserved_at IS NULL
                AND priority < levels.priority
              ORDER BY priority DESC, available_at, id LIMIT 1))"""
_WAITS = f"""
SELECT queue,
       CASE WHEN queue NOT IN (SELECT queue FROM main.sqlq_queues WHERE paused_at IS NOT NULL)
            THEN min(available_at) - {SQLITE_NOW} END,
       max(place)
  FROM levels
 GROUP BY queue
"""
_DUE_IN, _DUE_IN_WINDOW = (
    f"""
WITH RECURSIVE{window}
names (queue, place) AS (
      SELECT queue, max(place) FROM (
             SELECT value AS queue, NULL AS place FROM json_each(?){in_window})
       GROUP BY queue){_LEVELS}{_WAITS}"""
    for window, in_window in (("", ""), (_WINDOW, _IN_WINDOW))
)
# guard: claim-sqlite
_RESERVE = f"""
UPDATE main.jobs
   SET reserved_at = {SQLITE_NOW},
       reserved_by = ?,
       lease_expires_at = {SQLITE_NOW} + ?,
       lease_token = CASE WHEN lease_token < {LARGEST_TOKEN} THEN lease_token + 1 ELSE 1 END,
       attempts = min(attempts + 1, {MOST_COUNTED}),
       max_attempts = coalesce(max_attempts, (SELECT value FROM json_each(?) WHERE key = task))
 WHERE id IN (SELECT value FROM json_each(?))
RETURNING {claimed_columns(sqlite.dialect())}
"""
_RENEW = f"""
UPDATE main.jobs SET lease_expires_at = {SQLITE_NOW} + ? WHERE id IN (SELECT value FROM json_each(?))
RETURNING id
"""


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


@dataclass
class _Begins:
    """The way in which an engine's transactions begin."""

    immediate: bool


_BEGINS: WeakKeyDictionary[Engine, _Begins] = WeakKeyDictionary()


def begin_explicitly(engine: Engine, *, immediate: bool) -> None:
    """Make SQLAlchemy's transactions on this engine real ones, which begin in the database when they begin in
    SQLAlchemy.

    Python's driver opens a transaction only before the first INSERT, UPDATE or DELETE. A SAVEPOINT before
    that opens none, so its RELEASE commits writes that the outer ROLLBACK should undo.
    """
    known = _BEGINS.get(engine)
    if known is not None:
        known.immediate = immediate
        return  # guard: a-transaction-is-begun-once
    _BEGINS[engine] = begins = _Begins(immediate)

    @event.listens_for(engine, "connect")
    def _connected(dbapi_connection: Any, record: Any) -> None:
        dbapi_connection.isolation_level = None
        cursor = dbapi_connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _began(conn: Connection) -> None:
        read_only = conn.get_execution_options().get(READ_ONLY, False)
        conn.exec_driver_sql("BEGIN IMMEDIATE" if begins.immediate and not read_only else "BEGIN")


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
    inner = getattr(driver, "_conn", None)  # guard: aiosqlite-is-asked
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
