"""Cancels waiting and running jobs for an operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import Connection, case, exists, func, literal, select, update

from sqlq.database.dialects import dialect_of
from sqlq.model import history
from sqlq.model.outcome import ON_REQUEST
from sqlq.schema.tables import failed_jobs, jobs
from sqlq.schema.types import now
from sqlq.store.jobs import settle
from sqlq.store.jobs.lookup import Selection, possible
from sqlq.store.jobs.prune import Gone
from sqlq.store.jobs.rows import TABLES
from sqlq.store.workers import workers

BATCH = 500
"""Jobs in one transaction: their rows stay locked until it ends."""
RUNNING_REASON = "cancelled on request while it ran; what that attempt still did does not count"

# -- cancelling ----------------------------------------------------------------------------------------------


def newest(conn: Connection) -> int:
    """Return the largest id of a live job; 0 where there are none."""
    return int(conn.scalar(select(func.coalesce(func.max(jobs.c.id), 0))) or 0)


def live(conn: Connection, chosen: Selection, *, after_id: int, up_to_id: int) -> list[int]:
    """Return the next live jobs of a selection by their ids, ascending, at most a batch."""
    query = select(jobs.c.id).where(chosen.where(jobs), jobs.c.id > after_id, jobs.c.id <= up_to_id)
    return list(conn.scalars(query.order_by(jobs.c.id).limit(BATCH)))


class CancelledBatch(NamedTuple):
    """Jobs of a batch that ended as cancelled, and running ones that now have a request to cancel."""

    gone: Gone
    requested: list[int]

    @property
    def ended(self) -> list[int]:
        return self.gone.ids


def cancel(
    conn: Connection,
    ids: Sequence[int],
    *,
    force: bool = False,
    reason: str | None = None,
    wait_ms: int | None = None,
) -> CancelledBatch:
    """Cancel a batch of live jobs.

    - A job that no worker has reserved ends here and now.
    - A running job gets a request to cancel, or with `force` ends as well.

    An ended job's row has the `reason`; until then a requested one's history has it.

    The row's lock decides the state of a job: if a claim came first, the job gets a request. A row that
    another transaction has locked is skipped and not returned. With `wait_ms` the statement waits for it that
    long, then raises the database's error. A forced cancel raises the token before any other write: from then
    on the owner matches no row.
    """
    dialect = dialect_of(conn)
    if wait_ms is not None:
        dialect.limit_time(conn, lock_ms=wait_ms)
    running = case((jobs.c.reserved_at.is_(None), 0), else_=1).label("running")
    chosen = select(jobs.c.id, running, jobs.c.flow_id, jobs.c.limit_key).where(jobs.c.id.in_(ids))
    # guard: cancel-passes-over-locked
    rows = dialect.lock(conn, chosen.order_by(jobs.c.id), waits=wait_ms is not None)
    ending = [row for row in rows if force or not row.running]
    keys = [row.limit_key for row in ending if row.limit_key is not None]
    settle.wake(conn, keys)  # guard: cancelled-slots-are-looked-at
    waiting = [row.id for row in rows if not row.running]
    held = [row.id for row in rows if row.running]
    settle.cancel(conn, waiting, reason or ON_REQUEST)
    if force:
        settle.revoke(conn, held)
        settle.cancel(conn, held, reason or RUNNING_REASON)
        return CancelledBatch(Gone.of(rows), [])
    requested = func.coalesce(jobs.c.cancel_requested_at, now())  # guard: cancel-is-requested
    line = literal(history.note(None, "cancel_requested", reason=reason))
    errors = jobs.c.errors if reason is None else settle.errors_and(line)
    changes = update(jobs).values(cancel_requested_at=requested, errors=errors)
    conn.execute(changes.where(jobs.c.id.in_(held)))
    if held:
        # guard: cancels-are-hinted-at
        workers.hint_at_cancels(conn, workers.running_of(conn, held))
    return CancelledBatch(Gone.of(row for row in rows if not row.running), held)


class Found(NamedTuple):
    """Where named jobs are: in `jobs`, or ended."""

    live: set[int]
    ended: set[int]


def find(conn: Connection, ids: Sequence[int]) -> Found:
    """Look for jobs by id in all three tables."""
    in_jobs, in_finished, in_failed = (
        set(conn.scalars(select(table.c.id).where(table.c.id.in_(possible(ids))))) for table, _ in TABLES
    )
    return Found(in_jobs, in_finished | in_failed)


def holds_jobs(conn: Connection, name: str) -> bool:
    """Whether a queue has live or failed jobs. (Finished ones do not count: there may be many, and they have
    no index.)"""
    # in two halves, since each has an index
    waiting = exists().where(jobs.c.queue == name, jobs.c.reserved_at.is_(None))
    running = exists().where(jobs.c.queue == name, jobs.c.reserved_at.is_not(None))
    failed = exists().where(failed_jobs.c.queue == name)
    return bool(conn.scalar(select(case((waiting | running | failed, 1), else_=0))))
