"""SQLite's own forms of statements, and its lock of migrations: the write lock of the file."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, bindparam, cast, column, func, select
from sqlalchemy.dialects import sqlite
from sqlalchemy.exc import OperationalError
from sqlalchemy.sql.selectable import FromClause
from sqlalchemy.types import Text

from sqlq.database.batch import Batch
from sqlq.database.dialect import Dialect, Migrations
from sqlq.database.sql import Sql
from sqlq.database.sqlite import health
from sqlq.database.sqlite.driver import SQLiteDriver
from sqlq.database.values import LARGEST_WINDOW, Claimant, ClaimRequest, Execute, RawRows, claimed_columns
from sqlq.schema.tables import LARGEST_TOKEN, MAX_COUNT
from sqlq.schema.types import SQLITE_NOW, milliseconds_since_epoch


class SQLiteSql(Sql):
    _insert = staticmethod(sqlite.insert)
    _time_in_json = staticmethod(milliseconds_since_epoch)

    def claim(self, execute: Execute, request: ClaimRequest, by: Claimant) -> RawRows:
        names, limit, order, _ = request
        paused = {name for (name,) in execute(_PAUSED, ())}
        served = [name for name in names if name not in paused]  # guard: pause-sqlite
        several = order == "evenly" and 0 < len(served) <= limit  # guard: queues-without-order-share-a-claim
        share = limit // len(served) if several else limit
        due: list[int] = []
        more: list[str] = []
        statements = _DUE_LAST if order == "newest" else _DUE_FIRST
        # at most `share` of each as long as others have some
        for name in served:
            if len(due) < limit:
                rows = self._due_in_one(execute, statements, name, min(share, limit - len(due)), 1)
                due += [id for id, _ in rows]
                more += [name] if len(rows) == share else []
        for name in more:
            if len(due) < limit:
                rows = self._due_in_one(execute, statements, name, share + limit - len(due), 1)
                due += [id for id, _ in rows[share:]]
        if not due:
            return []
        started, ids = time.monotonic(), json.dumps(due)
        rows = execute(_RESERVE, (*by, ids))
        if (time.monotonic() - started) * 2_000 > by.lease_ms:
            # large rows: a rescue might follow the COMMIT; guard: sqlite-claim-renews-its-lease
            execute(_RENEW, (by.lease_ms, ids))
        return rows

    def due_in(self, execute: Execute, names: Sequence[str], after: str | None = None) -> RawRows:
        known = json.dumps(list(names))
        return execute(_DUE_IN, (known,)) if after is None else execute(_DUE_IN_WINDOW, (after, known))

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


_PAUSED = "SELECT queue FROM main.sqlq_queues WHERE paused_at IS NOT NULL"
_TOP_LEVEL = (
    "SELECT priority FROM main.jobs WHERE queue = ? AND reserved_at IS NULL ORDER BY priority DESC LIMIT 1"
)
_NEXT_LEVEL = "SELECT max(priority) FROM main.jobs WHERE queue = ? AND reserved_at IS NULL AND priority < ?"


def _due_at(level: str, order: str) -> str:
    # guard: sqlite-claim-takes-due-jobs
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
# With 60,000 due jobs in three queues a GROUP BY took 7 ms instead of 0.13.
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
       attempts = min(attempts + 1, {MAX_COUNT}),
       max_attempts = coalesce(max_attempts, (SELECT value FROM json_each(?) WHERE key = task))
 WHERE id IN (SELECT value FROM json_each(?))
RETURNING {claimed_columns(sqlite.dialect())}
"""
_RENEW = f"""
UPDATE main.jobs SET lease_expires_at = {SQLITE_NOW} + ? WHERE id IN (SELECT value FROM json_each(?))
RETURNING id
"""


class SQLiteMigrations(Migrations):
    relations = "SELECT lower(name) FROM sqlite_master WHERE :schema IS NULL"
    script = ("sqlite3 -bail", "BEGIN IMMEDIATE;\n\n", "COMMIT;\n")

    def lock(self, conn: Connection, schema: str | None) -> bool:
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


DIALECT = Dialect(
    name="sqlite",
    title="SQLite",
    oldest=(3, 35),
    sql=SQLiteSql(),
    driver=SQLiteDriver(),
    migrations=SQLiteMigrations(),
    health=health,
    in_a_file=True,
)
