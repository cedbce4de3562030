"""Changes waiting jobs and moves failed ones back, in batches; waits shortly for rows that others have
locked."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

from sqlalchemy.exc import DBAPIError

from sqlq.admin.cancel import PATIENCE_SECONDS, batches
from sqlq.database.database import Database
from sqlq.store.jobs import operate
from sqlq.store.jobs.lookup import Selection
from sqlq.store.jobs.operate import JobChange
from sqlq.store.workers import notify


def change(database: Database, selections: Iterable[Selection], **values: Any) -> dict[int, JobChange]:
    """Change the waiting jobs that are selected, each batch in its own transaction; return the effect on
    each."""
    effects: dict[int, JobChange] = {}
    wait_ms = round(PATIENCE_SECONDS * 1000)
    for chosen in selections:
        for batch in batches(database, partial(operate.live, waiting=True), chosen):
            work = partial(operate.change, **values)
            done = database.run(partial(work, ids=batch))
            left = sorted(set(batch) - set(done))  # locked at that time, or claimed meanwhile
            if left and database.may_wait:
                try:
                    done |= database.run(partial(work, ids=left, wait_ms=wait_ms), tries=1)
                except DBAPIError as error:
                    if not database.dialect.trouble(error).rolled_back:
                        raise
                    wait_ms = 1  # the time is over for the batches after this one, too
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
