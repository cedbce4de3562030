"""Moves waiting jobs to another time in batches, and waits shortly for rows that others have locked."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from functools import partial

from sqlalchemy.exc import DBAPIError

from sqlq.admin.cancel import PATIENCE_SECONDS, batches
from sqlq.database.database import Database
from sqlq.store.jobs import reschedule as rescheduling
from sqlq.store.jobs.lookup import Selection
from sqlq.store.workers import notify


def reschedule(
    database: Database, selections: Iterable[Selection], *, at: datetime | None, delay_ms: int
) -> list[int]:
    """Move the waiting jobs that are selected, each batch in its own transaction; return their ids."""
    moved: list[int] = []
    wait_ms = round(PATIENCE_SECONDS * 1000)
    for chosen in selections:
        for batch in batches(database, rescheduling.waiting, chosen):
            work = partial(rescheduling.reschedule, at=at, delay_ms=delay_ms)
            done = database.run(partial(work, ids=batch))
            if left := sorted(set(batch) - set(done)):  # locked at that time, or claimed meanwhile
                try:
                    done += database.run(partial(work, ids=left, wait_ms=wait_ms), tries=1)
                except DBAPIError as error:
                    if not database.dialect.trouble(error).rolled_back:
                        raise
                    wait_ms = 1  # the time is over for the batches after this one, too
            moved += done
    if moved:
        notify.notify(database)
    return sorted(moved)
