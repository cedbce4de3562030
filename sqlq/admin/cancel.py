"""Cancels live jobs in batches, and waits a limited time for rows that other transactions have locked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from functools import partial
from typing import TypeVar

from sqlalchemy.exc import DBAPIError

from sqlq.database.database import Database
from sqlq.store.flows import unblock
from sqlq.store.jobs import lookup, operate, prune
from sqlq.store.jobs.lookup import Selection
from sqlq.store.jobs.rows import OVER

T = TypeVar("T")
PATIENCE_SECONDS = 5.0
"""How long a cancel waits for rows that other transactions have locked, all in all. Claims and settles last
milliseconds; a handler's own transaction after complete() may last longer, and then its job is about to end
anyway."""


class Cancellation(StrEnum):
    """The effect of a cancel on a job."""

    CANCELLED = "cancelled"
    """It has ended, and is kept among the finished jobs."""
    REQUESTED = "requested"
    """It runs; its worker sees the request within 2 seconds."""
    ENDED = "ended"
    """It had ended already, one way or another."""
    UNKNOWN = "unknown"
    """There is no such job (any more)."""
    PASSED_OVER = "passed over"
    """It is not of the task, queue or group named with its id."""
    LOCKED = "locked"
    """Another transaction held its row for long: nothing was changed; try again."""


def cancel(
    database: Database, selections: Iterable[Selection], *, force: bool, reason: str | None
) -> dict[int, Cancellation]:
    """Cancel the live jobs that are selected, and return the effect on each, and on each id."""
    work = partial(operate.cancel, force=force, reason=reason)
    deadline = time.monotonic() + PATIENCE_SECONDS
    effects: dict[int, Cancellation] = {}
    for chosen in selections:
        for batch in batches(database, operate.live, chosen):
            effects |= _effects(database, database.run(partial(work, ids=batch)))
            for id in batch:
                if id not in effects:  # locked at that time, or ended meanwhile
                    done = patiently(database, work, [id], deadline)
                    effects |= {id: Cancellation.LOCKED} if done is None else _effects(database, done)
        if left := [id for id in chosen.ids if id not in effects]:
            effects |= _why_not(database, left)
    return effects


def _effects(database: Database, done: operate.CancelledBatch) -> dict[int, Cancellation]:
    unblocked_after(database, done.gone)
    effects = dict.fromkeys(done.ended, Cancellation.CANCELLED)
    return effects | dict.fromkeys(done.requested, Cancellation.REQUESTED)


def _why_not(database: Database, ids: Sequence[int]) -> dict[int, Cancellation]:
    with database.read() as conn:
        jobs = lookup.handles(conn, Selection(ids=tuple(ids)))
    effects = dict.fromkeys(ids, Cancellation.UNKNOWN)
    for job in jobs:
        effects[job.id] = Cancellation.ENDED if job.state in OVER else Cancellation.PASSED_OVER
    return effects


def patiently(database: Database, work: Callable[..., T], ids: Sequence[int], deadline: float) -> T | None:
    """Do the work on rows that others have locked, and wait for them until the deadline; None where they stay
    locked."""
    if not database.may_wait:
        return None
    wait_ms = max(1, round((deadline - time.monotonic()) * 1000))  # 0 would mean for ever
    try:
        return database.run(partial(work, ids=ids, wait_ms=wait_ms), tries=1)
    except DBAPIError as error:
        if not database.dialect.trouble(error).rolled_back:
            raise
        return None


def batches(database: Database, select: Callable[..., list[int]], chosen: Selection) -> Iterator[list[int]]:
    """Yield the ids of jobs in batches, but for those that were enqueued after the first."""
    with database.read() as conn:
        newest = operate.newest(conn)
    last = 0
    while True:
        with database.read() as conn:
            batch = select(conn, chosen, after_id=last, up_to_id=newest)
        if not batch:
            return
        yield batch
        last = batch[-1]


def unblocked_after(database: Database, ended: prune.Gone) -> list[int]:
    """Unblock what waits for steps that have just ended, or are gone; return all that ended."""
    if ended.steps:
        # guard: operators-unblock
        database.after_commit(lambda: unblock.after(database.for_claims, ended.steps))
    return ended.ids
