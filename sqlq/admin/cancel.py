"""Cancels live jobs in batches, and waits a limited time for rows that other transactions have locked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from functools import partial
from typing import TypeAlias

from sqlalchemy.exc import DBAPIError

from sqlq.database.database import Database
from sqlq.store.flows import unblock
from sqlq.store.jobs import lookup, operate, prune
from sqlq.store.jobs.lookup import Selection
from sqlq.store.jobs.rows import OVER

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


_Work: TypeAlias = Callable[..., operate.CancelledBatch]


class Canceller:
    """Cancels jobs in one database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def cancel(
        self, selections: Iterable[Selection], *, force: bool, reason: str | None
    ) -> dict[int, Cancellation]:
        """Cancel the live jobs that are selected, and return the effect on each, and on each id."""
        work = partial(operate.cancel, force=force, reason=reason)
        deadline = time.monotonic() + PATIENCE_SECONDS
        done: dict[int, Cancellation] = {}
        for chosen in selections:
            for batch in batches(self._database, operate.live, chosen):
                done |= self._cancel(batch, work, deadline)
            if left := [id for id in chosen.ids if id not in done]:
                done |= self._why_not(left)
        return done

    def _cancel(self, batch: Sequence[int], work: _Work, deadline: float) -> dict[int, Cancellation]:
        done = self._database.run(partial(work, ids=batch))
        unblocked_after(self._database, done.gone)
        found = _cancellations(done)
        for id in batch:
            if id not in found:  # locked at that time, or ended meanwhile
                found |= self._cancel_patiently(id, work, deadline)
        return found

    def _cancel_patiently(self, id: int, work: _Work, deadline: float) -> dict[int, Cancellation]:
        if not self._database.may_wait:
            return {id: Cancellation.LOCKED}
        wait_ms = max(1, round((deadline - time.monotonic()) * 1000))  # 0 would mean for ever
        try:
            done = self._database.run(partial(work, ids=[id], wait_ms=wait_ms), tries=1)
        except DBAPIError as error:
            if not self._database.dialect.trouble(error).rolled_back:
                raise
            return {id: Cancellation.LOCKED}
        unblocked_after(self._database, done.gone)
        return _cancellations(done) or self._why_not([id])

    def _why_not(self, ids: Sequence[int]) -> dict[int, Cancellation]:
        with self._database.read() as conn:
            jobs = lookup.handles(conn, Selection(ids=tuple(ids)))
        found = {
            job.id: Cancellation.ENDED if job.state in OVER else Cancellation.PASSED_OVER for job in jobs
        }
        return dict.fromkeys(ids, Cancellation.UNKNOWN) | found


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


def _cancellations(done: operate.CancelledBatch) -> dict[int, Cancellation]:
    return dict.fromkeys(done.ended, Cancellation.CANCELLED) | dict.fromkeys(
        done.requested, Cancellation.REQUESTED
    )
