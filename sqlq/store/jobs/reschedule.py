"""Moves waiting jobs to another time, queue or priority."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import BigInteger, Connection, case, func, literal, select, update
from sqlalchemy.exc import IntegrityError

from sqlq.database.dialects import dialect_of
from sqlq.payload.encryption import HEAD
from sqlq.schema.tables import jobs
from sqlq.schema.types import Moment, after, far, now
from sqlq.store.jobs.lookup import Selection
from sqlq.store.jobs.unique import holder
from sqlq.store.limits.wakes import Wake, write

BATCH = 500
"""Jobs in one transaction: their rows stay locked until it ends."""
_WAITS = jobs.c.reserved_at.is_(None)


def waiting(conn: Connection, chosen: Selection, *, after_id: int, up_to_id: int) -> list[int]:
    """Return the next waiting jobs of a selection by their ids, ascending, at most a batch."""
    among = (chosen.where(jobs), _WAITS, jobs.c.id > after_id, jobs.c.id <= up_to_id)
    return list(conn.scalars(select(jobs.c.id).where(*among).order_by(jobs.c.id).limit(BATCH)))


class JobChange(StrEnum):
    """The effect of a change on a job."""

    CHANGED = "changed"
    SEALED = "sealed"
    """Its payload is signed or encrypted for its queue, which stays."""
    KEY_HELD = "key held"
    """Another job holds its unique key in the other queue."""
    NOT_WAITING = "not waiting"
    """It runs, has ended or does not exist, or another transaction has locked it."""


def change(
    conn: Connection,
    ids: Sequence[int],
    *,
    at: datetime | None = None,
    delay_ms: int | None = None,
    values: Mapping[str, Any] = {},
    wait_ms: int | None = None,
) -> dict[int, JobChange]:
    """Change a batch of waiting jobs; return the effect on those that it could lock. `values` may have a
    queue and a priority. Without `at` and `delay_ms` their times stay.

    The row's lock decides: a job that a worker claims meanwhile is not touched. A row that another
    transaction has locked is skipped, or with `wait_ms` waited for that long. A job with a limit returns to
    its line when its time changes. So none holds a slot until its new time.
    """
    dialect = dialect_of(conn)
    if wait_ms is not None:
        dialect.limit_time(conn, lock_ms=wait_ms)
    sealed = case((func.substr(jobs.c.payload, 1, len(HEAD)) == HEAD, 1), else_=0).label("sealed")
    columns = (jobs.c.id, jobs.c.limit_key, jobs.c.blocked_by, jobs.c.queue, jobs.c.unique_key, sealed)
    # guard: the-claimed-are-not-rescheduled
    chosen = select(*columns).where(jobs.c.id.in_(ids), _WAITS)
    rows = dialect.lock(conn, chosen.order_by(jobs.c.id), waits=wait_ms is not None)
    effects = {row.id: _moved(conn, row, values.get("queue", row.queue)) for row in rows}
    rows = [row for row in rows if effects[row.id] is JobChange.CHANGED]
    if delay_ms is not None or at is not None:
        _postpone(conn, rows, at, delay_ms or 0)
    if values:
        conn.execute(update(jobs).where(jobs.c.id.in_([row.id for row in rows])).values(values))
    return effects


def _moved(conn: Connection, row: Any, queue: str) -> JobChange:
    """Return whether a job may go to a queue; one with a unique key is moved there at once."""
    if row.queue == queue:
        return JobChange.CHANGED
    if row.sealed:
        return JobChange.SEALED
    if row.unique_key is None:
        return JobChange.CHANGED
    if holder(conn, queue, row.unique_key) is None:
        # a producer may take the key at this time
        with suppress(IntegrityError), conn.begin_nested():
            conn.execute(update(jobs).where(jobs.c.id == row.id).values(queue=queue))
            return JobChange.CHANGED
    return JobChange.KEY_HELD


def _postpone(conn: Connection, rows: Sequence[Any], at: datetime | None, delay_ms: int) -> None:
    """Make waiting jobs due at a time, else after a delay."""
    due: Any = after(literal(delay_ms, BigInteger)) if delay_ms else now()
    due = due if at is None else literal(at, Moment)
    free = [row.id for row in rows if row.blocked_by is None and row.limit_key is None]
    blocked = [row.id for row in rows if row.id not in set(free)]
    if free:
        conn.execute(update(jobs).where(jobs.c.id.in_(free)).values(available_at=due))
    if blocked:
        # guard: the-rescheduled-hold-no-slot
        by = case((jobs.c.blocked_by.is_(None), "limit"), else_=jobs.c.blocked_by)
        values = {"available_at": far(), "blocked_by": by, "due_at": due}
        conn.execute(update(jobs).where(jobs.c.id.in_(blocked)).values(values))
    keys = {row.limit_key for row in rows if row.limit_key is not None}
    later = {Wake(key, delay_ms=delay_ms, moment=at) for key in keys}
    # now for the slots that are free, and at the new time; guard: the-rescheduled-are-looked-at
    write(conn, {Wake(key) for key in keys} | later)
