"""Moves failed jobs back, to be run again."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import Connection, Integer, Row, bindparam, select

from sqlq.config.constants import ERROR_BYTES
from sqlq.database.batch import inserted
from sqlq.database.dialects import dialect_of
from sqlq.model import history
from sqlq.model.history import AttemptTimes
from sqlq.model.outcome import ErrorText
from sqlq.model.retry import error_record
from sqlq.schema.tables import CARRIED, failed_jobs, jobs
from sqlq.schema.types import now
from sqlq.store.jobs.lookup import Selection, records
from sqlq.store.jobs.rows import in_line
from sqlq.store.jobs.unique import LIVE_KEY
from sqlq.store.limits.wakes import Wake, write

CARRIED_BATCH = 100
"""Rows of one move, which carries them through this process with payloads of up to 1 MiB."""


# -- mending -------------------------------------------------------------------------------------------------


def retry_failed(conn: Connection, chosen: Selection, *, after_id: int = 0) -> tuple[list[int], list[int]]:
    """Move a batch of failed jobs back to be run again. Return the ids moved, and those that stay because a
    live job holds their unique key.

    At most 100 with ids above `after_id`, in ascending order. The id and the token stay, so that a worker of
    the failed attempt still matches no row. The last error joins those of the earlier attempts.
    """
    dialect = dialect_of(conn)
    failed = select(failed_jobs).where(chosen.where(failed_jobs), failed_jobs.c.id > after_id)
    rows = dialect.lock(conn, failed.order_by(failed_jobs.c.id).limit(CARRIED_BATCH))
    if not rows:
        return [], []
    keys = {row.id: row.limit_key for row in rows if row.limit_key is not None}
    values = _IN_LINE if keys else {"available_at": now()}
    statement = dialect.upsert(jobs, LIVE_KEY, values, returning=(jobs.c.id,))
    # in the order of their keys, as enqueue inserts them, so that the two cannot deadlock on each other
    ordered = sorted(rows, key=lambda row: (row.queue, row.unique_key or ""))
    given = [_put_back(row) | ({"in_line": int(row.id in keys)} if keys else {}) for row in ordered]
    moved = sorted(id for (id,) in inserted(conn, statement, given))
    write(conn, {Wake(keys[id]) for id in moved if id in keys})
    dialect.delete(conn, failed_jobs.c.id, moved)
    return moved, [row.id for row in rows if row.id not in set(moved)]


# guard: a-failed-retry-holds-no-slot
_IN_LINE = in_line(bindparam("in_line", type_=Integer) == 1, now())

# guard: retry-keeps-the-token
_RESET = (
    *("attempts", "releases", "available_at", "reserved_at", "reserved_by", "errors"),
    *("progress", "progress_of", "progress_note", "start_by"),
)


def _put_back(row: Row[Any]) -> dict[str, Any]:
    kept = {name: getattr(row, name) for name in CARRIED if name not in _RESET}
    return {**kept, "attempts": 0, "releases": 0, "errors": _history_with_the_last(row)}


def _history_with_the_last(row: Row[Any]) -> str:
    """Return the history with two more records: the last failure, and the operator's retry. A full history
    keeps its oldest records, as in a retry; records of operators may exceed that size."""
    found = records(row.errors)
    if len(row.errors or "") <= ERROR_BYTES:
        started_at = history.started_at(row.reserved_at, row.start_ms)
        course = AttemptTimes(row.reserved_at, started_at, row.failed_at, row.reserved_by)
        error = ErrorText(row.exception or "", row.message or "")
        found.append(json.loads(error_record(row.attempts, row.reason, error, course)))
    if len(row.errors or "") <= 2 * ERROR_BYTES:
        found.append(json.loads(history.note(None, "put_back")))  # guard: a-put-back-is-seen
    return json.dumps(found, ensure_ascii=False)
