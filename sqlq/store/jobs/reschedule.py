"""Moves waiting jobs to another time."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, Connection, case, literal, select, update

from sqlq.database.dialects import dialect_of
from sqlq.schema.tables import jobs
from sqlq.schema.types import Moment, after, far, now
from sqlq.store.jobs.lookup import Selection
from sqlq.store.limits.wakes import Wake, write
from sqlq.store.workers.notify import wake_others

BATCH = 500
"""Jobs in one transaction: their rows stay locked until it ends."""
_WAITS = jobs.c.reserved_at.is_(None)


def waiting(conn: Connection, chosen: Selection, *, after_id: int, up_to_id: int) -> list[int]:
    """Return the next waiting jobs of a selection by their ids, ascending, at most a batch."""
    among = (chosen.where(jobs), _WAITS, jobs.c.id > after_id, jobs.c.id <= up_to_id)
    return list(conn.scalars(select(jobs.c.id).where(*among).order_by(jobs.c.id).limit(BATCH)))


def reschedule(
    conn: Connection,
    ids: Sequence[int],
    *,
    at: datetime | None = None,
    delay_ms: int = 0,
    wait_ms: int | None = None,
) -> list[int]:
    """Make a batch of waiting jobs due at a time, else after a delay; return those that were moved.

    The row's lock decides: a job that a worker claims meanwhile is not touched. A row that another
    transaction has locked is skipped, or with `wait_ms` waited for that long. A job with a limit returns to
    its line. So none holds a slot until its new time.
    """
    dialect = dialect_of(conn)
    if wait_ms is not None:
        dialect.limit_time(conn, lock_ms=wait_ms)
    # guard: the-claimed-are-not-rescheduled
    chosen = select(jobs.c.id, jobs.c.limit_key, jobs.c.blocked_by).where(jobs.c.id.in_(ids), _WAITS)
    rows = dialect.lock(conn, chosen.order_by(jobs.c.id), waits=wait_ms is not None)
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
    if rows and not delay_ms and (at is None or bool(conn.scalar(select(literal(at, Moment) <= now())))):
        wake_others(conn)
    return [row.id for row in rows]
