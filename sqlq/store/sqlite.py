"""SQLite: one writer at a time, so a write transaction takes the lock when it begins and waits for it there.

A transaction that reads first and writes later can be refused at once, whatever the busy timeout, because somebody else
wrote in between. BEGIN IMMEDIATE cannot: it waits before it has read anything.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import Connection, Engine, bindparam, cast, column, event, func, select
from sqlalchemy.dialects import sqlite
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql.selectable import FromClause
from sqlalchemy.types import Text

from sqlq.errors import ConfigurationError
from sqlq.schema.tables import SQLITE_NOW, milliseconds_of
from sqlq.store.dialect import Ask, Batch, Dialect, claimed_columns
from sqlq.store.patience import Patience

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

T = TypeVar("T")

BUSY_TIMEOUT_MS = 10_000
READ_ONLY = "sqlq_read_only"
"""Execution option of connections that only read, and so need not queue up for the write lock."""


class SQLite(Dialect):
    name = "sqlite"
    insert = staticmethod(sqlite.insert)

    def claim(self, ask: Ask, schema: str | None, names: Sequence[str], limit: int, owner: str, lease_ms: int) -> list[Sequence[Any]]:
        due: list[int] = []
        paused = {name for (name,) in ask(_PAUSED, ())}
        for name in names:
            levels = [] if name in paused else ask(_TOP_LEVEL, (name,))
            while levels and len(due) < limit:
                ((level,),) = levels
                due += [id for (id,) in ask(_DUE_AT_LEVEL, (name, level, limit - len(due)))]
                levels = ask(_NEXT_LEVEL, (name, level))
        return ask(_RESERVE, (owner, lease_ms, json.dumps(due))) if due else []

    def rows(self, batch: Batch) -> FromClause:
        each = func.json_each(bindparam("batch", type_=Text)).table_valued(column("value"), name="each")
        columns = (
            cast(func.json_extract(each.c.value, f"$[{i}]"), kind).label(name) for i, (name, kind) in enumerate(batch.columns.items())
        )
        return select(*columns).subquery("batch")

    def parameters(self, batch: Batch, rows: Sequence[Sequence[Any]]) -> dict[str, Any]:
        return {"batch": json.dumps([list(row) for row in rows], ensure_ascii=False, default=milliseconds_of)}

    def texts(self) -> FromClause:
        each = func.json_each(bindparam("texts", type_=Text)).table_valued(column("value", Text), column("key"), name="each")
        return select(each.c.value, each.c.key.label("place")).subquery("texts")

    def joined(self, texts: Sequence[str]) -> str | None:
        return json.dumps(texts, ensure_ascii=False)

    def run(self, driver: Any, statement: str, parameters: Any) -> list[Sequence[Any]]:
        # by itself it takes the write lock as it begins, and waits for it as BEGIN IMMEDIATE does; committed when all its rows are read
        rows: list[Sequence[Any]] = driver.execute(statement, parameters).fetchall()
        return rows

    def whole(self, ask: Ask, work: Callable[[Ask], T]) -> T:
        ask("BEGIN IMMEDIATE", ())
        done = work(ask)
        ask("COMMIT", ())
        return done

    def rolled_back(self, error: DBAPIError) -> bool:
        return any(words in str(error.orig) for words in ("database is locked", "database table is locked", "database schema is locked"))

    def is_away(self, error: DBAPIError) -> bool:
        return self.rolled_back(error) or any(words in str(error.orig) for words in ("disk I/O error", "unable to open database file"))

    def prepare(self, engine: Engine, patience: Patience) -> None:
        begin_explicitly(engine, immediate=True)

        @event.listens_for(engine, "connect")
        def _connected(dbapi_connection: Any, record: Any) -> None:
            cursor = dbapi_connection.cursor()
            dbapi_connection.text_factory = _text
            # readers never block the writer, nor it them; the mode stays with the file
            cursor.execute("PRAGMA journal_mode = WAL")
            cursor.fetchall()
            cursor.close()


_PAUSED = "SELECT queue FROM main.sqlq_queues WHERE paused_at IS NOT NULL"
_TOP_LEVEL = "SELECT priority FROM main.jobs WHERE queue = ? AND reserved_at IS NULL ORDER BY priority DESC LIMIT 1"
_NEXT_LEVEL = "SELECT priority FROM main.jobs WHERE queue = ? AND reserved_at IS NULL AND priority < ? ORDER BY priority DESC LIMIT 1"
_DUE_AT_LEVEL = f"""
SELECT id FROM main.jobs
 WHERE queue = ? AND reserved_at IS NULL AND priority = ? AND available_at <= {SQLITE_NOW}
 ORDER BY available_at, id
 LIMIT ?
"""
_RESERVE = f"""
UPDATE main.jobs
   SET reserved_at = {SQLITE_NOW},
       reserved_by = ?,
       lease_expires_at = {SQLITE_NOW} + ?,
       lease_token = lease_token + 1,
       attempts = attempts + 1
 WHERE id IN (SELECT value FROM json_each(?))
RETURNING {claimed_columns(sqlite.dialect())}
"""


def _text(data: bytes) -> str:
    """Read text that may not be UTF-8: SQLite stores what it is given, and one such row would fail every claim of its queue.

    What is not UTF-8 reads as text that is no JSON, no task's name and no queue's, so that its job ends as a row to look at.
    """
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "\ufffd" + data.decode(errors="replace")


def begin_explicitly(engine: Engine, *, immediate: bool) -> None:
    """Make SQLAlchemy's transactions on this engine real ones, begun where they say they begin.

    Python's driver opens a transaction before the first INSERT, UPDATE or DELETE only: a SAVEPOINT before that opens
    none, so its RELEASE commits what the outer ROLLBACK should have undone.
    """

    @event.listens_for(engine, "connect")
    def _connected(dbapi_connection: Any, record: Any) -> None:
        dbapi_connection.isolation_level = None
        cursor = dbapi_connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _began(conn: Connection) -> None:
        read_only = conn.get_execution_options().get(READ_ONLY, False)
        conn.exec_driver_sql("BEGIN IMMEDIATE" if immediate and not read_only else "BEGIN")


def configure_sqlite(engine: Engine | AsyncEngine, *, immediate: bool = False) -> None:
    """Make an engine's SQLite transactions real: begun explicitly, so that savepoints and rollbacks cover all of them.

    Call it once where your engine is made. With `immediate` each transaction takes the write lock as it begins, and waits
    for it there up to ten seconds; without, a transaction that reads first can be refused when it writes, because somebody
    else wrote in between. The rule and the remedy are those of SQLAlchemy's notes on pysqlite and savepoints.

    >>> engine = create_engine("sqlite:///shop.db")
    >>> sqlq.configure_sqlite(engine)
    """
    sync = engine if isinstance(engine, Engine) else engine.sync_engine
    if sync.dialect.name != "sqlite":
        raise ConfigurationError(f"configure_sqlite was given an engine for {sync.dialect.name}; it is of use for SQLite only")
    begin_explicitly(sync, immediate=immediate)
    sync.pool.dispose()  # connections made before know nothing of it


def savepoint_may_be_outermost(conn: Connection) -> bool:
    """Whether this connection is in a savepoint for which its driver may have begun no transaction (see above).

    SQLite itself cannot be asked. Safe are connections whose transactions are begun explicitly: `isolation_level` None,
    as set by `begin_explicitly`, or Python 3.12's `autocommit=False`.
    """
    if not conn.in_nested_transaction():
        return False
    dbapi_connection: Any = conn.connection.dbapi_connection
    return dbapi_connection.isolation_level is not None and getattr(dbapi_connection, "autocommit", None) is not False
