"""Cancels jobs that were not started in time and that no worker has claimed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import Connection, Integer, bindparam, select, text

from sqlq.database.dialects import dialect_of
from sqlq.model.checks import NOT_IN_TIME
from sqlq.schema.tables import IN_TIME_ONLY, jobs
from sqlq.schema.types import now
from sqlq.store.jobs import settle


class Expired(NamedTuple):
    """A job that was cancelled because it was not started in time."""

    id: int
    task: str
    queue: str
    label: str | None
    limit_key: str | None


def expire(conn: Connection, *, limit: int) -> list[Expired]:
    """Cancel at most `limit` waiting jobs whose `start_by` has passed, the earliest first; return them.

    The row's lock decides whether a job still waits, so a claim that came first wins. Its worker then finds
    the job too late. A row that another transaction has locked is left to the next run.
    """

    def cancel(some: Sequence[Expired]) -> None:
        settle.cancel(conn, [job.id for job in some], NOT_IN_TIME)

    late = [Expired(*row) for row in dialect_of(conn).lock(conn, _TOO_LATE, {"most": limit})]
    expired = list(settle.end_apart(conn, late, cancel, "was not started in time"))
    if expired:
        # guard: the-slots-of-the-expired-are-looked-at
        settle.wake(conn, {job.limit_key for job in expired if job.limit_key is not None})
    return expired


# This repeats the predicate of the partial index, or the planner would not use it.
_TOO_LATE = (
    select(jobs.c.id, jobs.c.task, jobs.c.queue, jobs.c.label, jobs.c.limit_key)
    .where(text(IN_TIME_ONLY), jobs.c.start_by <= now())  # guard: expiry-takes-what-is-late
    .order_by(jobs.c.start_by, jobs.c.id)
    .limit(bindparam("most", type_=Integer))
)
