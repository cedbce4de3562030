"""Changes waiting jobs and moves failed ones back, in batches; waits shortly for rows that others have
locked."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

from sqlq.admin.cancel import PATIENCE_SECONDS, batches, patiently
from sqlq.database.database import Database
from sqlq.store.jobs import operate
from sqlq.store.jobs.lookup import Selection
from sqlq.store.jobs.operate import JobChange
from sqlq.store.workers import notify


def change(database: Database, selections: Iterable[Selection], **values: Any) -> dict[int, JobChange]:
    """Change the waiting jobs that are selected, each batch in its own transaction; return the effect on
    each."""
    work = partial(operate.change, **values)
    deadline = time.monotonic() + PATIENCE_SECONDS
    effects: dict[int, JobChange] = {}
    for chosen in selections:
        for batch in batches(database, partial(operate.live, waiting=True), chosen):
            done = database.run(partial(work, ids=batch))
            if left := sorted(set(batch) - set(done)):  # locked at that time, or claimed meanwhile
                done |= patiently(database, work, left, deadline) or {}
            effects |= done
            database.after_commit(partial(notify.notify, database))
    return effects


class MovedBack(NamedTuple):
    """Which failed jobs were moved back, and which stayed because a live job holds their unique key."""

    moved: list[int]
    held: list[int]


def move_back(database: Database, selections: Iterable[Selection]) -> MovedBack:
    """Move the failed jobs that are selected back to be run again."""
    done = MovedBack([], [])
    for chosen in selections:
        last = 0
        while True:
            moved, held = database.run(partial(operate.retry_failed, chosen=chosen, after_id=last))
            if not moved and not held:
                break
            done.moved.extend(moved)
            done.held.extend(held)
            last = max(moved + held)
    return done
