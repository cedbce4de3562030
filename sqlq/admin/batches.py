"""The verbs on many jobs, in batches, each in its own transaction. It waits a limited time for rows that
other transactions have locked.

Each batch goes on with the ids behind the last one. The same action once more finds what an interrupted one
has left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, TypeVar

from sqlalchemy.exc import DBAPIError

from sqlq.database.database import Database
from sqlq.schema.tables import failed_jobs, finished_jobs
from sqlq.store.blockers import free_after
from sqlq.store.jobs import lookup, operate
from sqlq.store.jobs.lookup import Selection
from sqlq.store.jobs.operate import JobChange, Replay
from sqlq.store.jobs.rows import OVER
from sqlq.store.workers import notify

T = TypeVar("T")
E = TypeVar("E")
LOCK_TIMEOUT_SECONDS = 5.0
"""How long an operation waits for rows that other transactions have locked, all in all. Claims and settles
last milliseconds; a handler's own transaction after complete() may last longer, and then its job is about to
end anyway."""


@dataclass
class Watch:
    """Somebody who follows an action: `see` is called with the number of jobs that each batch has changed,
    and stops it by False."""

    see: Callable[[int], bool]
    is_stopped: bool = False
    """Whether the action has been stopped, by whomever."""


_watches: ContextVar[tuple[Watch, ...]] = ContextVar("sqlq_watches", default=())


@contextmanager
def watched(see: Callable[[int], bool]) -> Iterator[Watch]:
    """Follow the actions of the block."""
    watch = Watch(see)
    token = _watches.set((*_watches.get(), watch))
    try:
        yield watch
    finally:
        _watches.reset(token)


def may_proceed(changed: int) -> bool:
    """Report what a batch has changed to those who follow the action; return whether to go on."""
    watches = _watches.get()
    stops = [watch for watch in watches if not watch.see(changed)]
    for watch in watches:
        watch.is_stopped = bool(stops)
    return not stops


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
    """It is not of the task, queue or batch named with its id."""
    LOCKED = "locked"
    """Another transaction held its row for long: nothing was changed; try again."""


def cancel(
    database: Database, selections: Sequence[Selection], *, force: bool, reason: str | None
) -> dict[int, Cancellation]:
    """Cancel the live jobs that are selected, and return the effect on each, and on each id."""

    def effects_of(done: operate.CancelledBatch) -> dict[int, Cancellation]:
        return {
            **dict.fromkeys(freed_after(database, done.gone), Cancellation.CANCELLED),
            **dict.fromkeys(done.requested, Cancellation.REQUESTED),
        }

    effects = _apply(database, selections, partial(operate.cancel, force=force, reason=reason), effects_of)
    for selection in selections:
        if left := tuple(id for id in selection.ids if id not in effects):
            with database.read() as conn:
                kept = lookup.handles(conn, Selection(left))
            effects |= dict.fromkeys(left, Cancellation.UNKNOWN)
            for job in kept:
                effects[job.id] = Cancellation.ENDED if job.state in OVER else Cancellation.PASSED_OVER
    return {id: effect or Cancellation.LOCKED for id, effect in effects.items()}


def change(database: Database, selections: Iterable[Selection], **values: Any) -> dict[int, JobChange]:
    """Change the waiting jobs that are selected; return the effect on those that are not locked."""
    work: Callable[..., dict[int, JobChange]] = partial(operate.change, **values)
    effects = _apply(database, selections, work, dict[int, JobChange], waiting=True)
    database.after_commit(partial(notify.notify, database))
    return {id: effect for id, effect in effects.items() if effect is not None}


def _apply(
    database: Database,
    selections: Iterable[Selection],
    work: Callable[..., T],
    effects_of: Callable[[T], dict[int, E]],
    *,
    waiting: bool = False,
) -> dict[int, E | None]:
    """Do the work on the live or `waiting` jobs that are selected. Return the effect on each, None on those
    that stayed locked."""
    deadline = time.monotonic() + LOCK_TIMEOUT_SECONDS
    effects: dict[int, E | None] = {}
    for batch in _batches(database, selections, partial(operate.live, waiting=waiting)):
        before = len(effects)
        effects |= effects_of(database.run(partial(work, ids=batch)))
        for id in batch:
            if id not in effects:  # locked at that time, claimed or ended meanwhile
                done = _with_lock_timeout(database, work, id, deadline)
                effects |= {id: None} if done is None else effects_of(done)
        if not may_proceed(len(effects) - before):
            break
    return effects


def _batches(
    database: Database, selections: Iterable[Selection], read: Callable[..., list[int]]
) -> Iterator[list[int]]:
    """Yield the ids of the jobs that are selected, in batches that are read one after the other."""
    for selection in selections:
        batch = [0]
        while True:
            with database.read() as conn:
                batch = read(conn, selection, after_id=batch[-1])
            if not batch:
                break
            yield batch


def _with_lock_timeout(database: Database, work: Callable[..., T], id: int, deadline: float) -> T | None:
    """Do the work on a row that another has locked, and wait for it until the deadline; None where it stays
    locked."""
    if not database.may_wait:
        return None
    wait_ms = max(1, round((deadline - time.monotonic()) * 1000))  # 0 would mean for ever
    try:
        return database.run(partial(work, ids=[id], wait_ms=wait_ms), tries=1)
    except DBAPIError as error:
        if not database.dialect.driver.problem(error).rolled_back:
            raise
        return None


def move_back(database: Database, selections: Iterable[Selection]) -> tuple[list[int], list[int]]:
    """Move the failed jobs that are selected back to be run again. Return those, and those that stay because
    a live job holds their unique key."""
    moved: list[int] = []
    blocked: list[int] = []
    for selection in selections:
        last = 0
        while True:
            batch, keyed = database.run(partial(operate.retry_failed, selection=selection, after_id=last))
            if not batch and not keyed:
                break
            moved += batch
            blocked += keyed
            last = max(batch + keyed)
            if not may_proceed(len(batch)):
                return moved, blocked
    return moved, blocked


def delete(database: Database, selections: Iterable[Selection]) -> list[int]:
    """Delete the failed jobs that are selected, and ended ones by their ids; return the ids."""
    deleted: list[int] = []
    for selection in selections:
        for source in (failed_jobs, finished_jobs) if selection.ids else (failed_jobs,):
            while batch := database.run(partial(operate.forget, selection=selection, source=source)):
                deleted += freed_after(database, batch)
                if not may_proceed(len(batch)):
                    return deleted
    return deleted


def replay(database: Database, selections: Sequence[Selection]) -> Iterator[list[Replay]]:
    """Copy the ended jobs that are selected, and yield the copies: those of ids at once, others by batches.
    Without ids it leaves out jobs of which a copy is kept. So the same replay again copies nothing twice."""
    if any(each.ids for each in selections):
        yield database.run(
            lambda conn: operate.replay(conn, [id for each in selections for id in operate.ended(conn, each)])
        )
        return
    with database.read() as conn:
        done = operate.replayed(conn)
    for batch in _batches(database, selections, operate.ended):
        # guard: nothing-is-replayed-twice
        copies = database.run(partial(operate.replay, ids=[id for id in batch if id not in done]))
        yield copies
        if not may_proceed(len(copies)):
            return


def freed_after(database: Database, ended: Sequence[Any]) -> list[int]:
    """Free what waits for jobs that have just ended, or are gone; return their ids."""
    # guard: operators-unblock
    database.after_commit(lambda: free_after(database.for_claims, ended))
    return [row.id for row in ended]
