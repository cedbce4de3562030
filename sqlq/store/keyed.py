"""Jobs with unique keys: each is inserted, or found, or takes the place of the one that waits.

All of a call's keys are touched in one order, whatever becomes of each, so that two producers cannot deadlock
on each other: statement by statement in runs of the sorted keys that are treated alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

from sqlalchemy import Connection

from sqlq.errors import EnqueueError
from sqlq.job import Job, NewJob, State
from sqlq.schema.tables import jobs
from sqlq.store import lasting
from sqlq.store.dialect import Dialect
from sqlq.store.lasting import Key
from sqlq.store.rows import insert_of, row_of, said_by_any, state_of


def insert_keyed(
    conn: Connection,
    dialect: Dialect,
    new: Sequence[NewJob],
    keyed: Iterable[int],
    options: Mapping[str, Any],
) -> dict[int, Job]:
    """Insert the jobs at these places, which have unique keys, and return them by their places."""
    places: dict[Key, list[int]] = defaultdict(list)
    for i in keyed:
        places[new[i].queue, new[i].unique_key].append(i)
    lasts = [key for key, found in places.items() if any(map(lasting.lasts, (new[i] for i in found)))]
    several = (len(places) > 1 or bool(lasts)) and not dialect.one_writer
    missed: list[Key] = []
    # A rival's job can end between the insert that met it and the look at it: then the key is free, and we
    # try again. With higher keys in hand that would be out of order, so they are let go of before.
    for _ in range(_ROUNDS):
        with conn.begin_nested() if several else nullcontext() as savepoint:
            done, missed = _insert_in_order(conn, dialect, new, places, lasts, options)
            if not missed and several and lasts:
                # its job may have ended after it was looked for, and before the insert, which waited for that
                made = [key for key in lasts if any(done[i].created for i in places[key])]
                # guard: what-has-just-ended-keeps-its-key
                missed = list(lasting.held(conn, dialect, made, options))
            if not missed:
                return done
            if savepoint is not None:
                savepoint.rollback()  # guard: keys-are-let-go-of
    queue, key = missed[0]
    raise EnqueueError(
        f"unique key {key!r} in queue {queue!r} was taken and freed {_ROUNDS} times while it was being "
        "enqueued: enqueue it again"
    )


def _insert_in_order(
    conn: Connection,
    dialect: Dialect,
    new: Sequence[NewJob],
    places: Mapping[Key, list[int]],
    lasts: Sequence[Key],
    options: Mapping[str, Any],
) -> tuple[dict[int, Job], list[Key]]:
    """Insert one job of each key, or let it take the place of the one that waits, or find the live one;
    return the jobs by their places, and the keys of which there was neither. Of those that last, a job that
    has ended is found, too."""
    waiting = dict(places)
    counts = {key: _that_counts(new, found) for key, found in places.items()}
    done: dict[int, Job] = {}

    def found(key: Key, job: Job) -> None:
        for i in waiting.pop(key, ()):
            is_it = i == counts[key]
            done[i] = job if is_it else replace(job, created=False, replaced=False)

    # guard: what-has-ended-keeps-its-key
    ended = lasting.held(conn, dialect, lasts, options) if lasts else {}
    for key, job in ended.items():
        found(key, job)
    changing = [key for key in waiting if new[counts[key]].on_conflict != "keep"]
    live = lasting.held(conn, dialect, changing, options, live=True)
    for key, job in live.items():
        if job.state is State.RUNNING:  # guard: what-runs-is-not-waited-for
            found(key, job)
    ordered = sorted(waiting, key=lambda key: (key[0], key[1] or ""))  # guard: keys-in-one-order
    for conflict, run in groupby(ordered, key=lambda key: conflict_of(new[counts[key]])):
        chosen = [new[counts[key]] for key in run]
        said = said_by_any(chosen)
        rows = [row_of(job, said) for job in chosen]
        statement = _statement(dialect, said, conflict)
        for queue, key, id, state, *told in conn.execute(statement, rows, execution_options=options).all():
            is_new = conflict is None or (told[0] if told[0] is not None else (queue, key) not in live)
            task = new[counts[queue, key]].task
            found((queue, key), Job(id, queue, task, State(state), created=is_new, replaced=not is_new))
    for key, job in lasting.held(conn, dialect, list(waiting), options, live=True).items():
        found(key, job)
    return done, list(waiting)


def _that_counts(new: Sequence[NewJob], places: Sequence[int]) -> int:
    """Return the place of the job that counts of several with one key: the last that takes another's place,
    or the first where none does."""
    return next((i for i in reversed(places) if new[i].on_conflict != "keep"), places[0])


class Conflict(NamedTuple):
    """What becomes of a waiting job whose unique key a new one has: how long after it was first enqueued it
    may at most be due where it is postponed, None where it is only replaced."""

    at_most_ms: int | None


def conflict_of(job: NewJob) -> Conflict | None:
    """Return what becomes of the waiting job whose unique key this one has; None where it is kept."""
    if job.on_conflict == "keep":
        return None
    return Conflict(job.at_most_ms if job.on_conflict == "postpone" else None)


@cache
def _statement(dialect: Dialect, said: tuple[str, ...], conflict: Conflict | None) -> Any:
    returned = (jobs.c.queue, jobs.c.unique_key, jobs.c.id, state_of(said))
    told = () if conflict is None else (dialect.is_new,)
    return inserting(dialect, said, conflict).returning(*returned, *told)


def inserting(dialect: Dialect, said: tuple[str, ...], conflict: Conflict | None) -> Any:
    """Return the insert of a job with a unique key, that leaves the live job with that key alone, or lets the
    new one take its place while it waits."""
    statement = insert_of(dialect, said)
    if conflict is None:
        return dialect.passing_over_live_keys(statement)
    return dialect.replacing_waiting(statement, conflict.at_most_ms)


_ROUNDS = 20
