"""Jobs with unique keys: each is inserted, finds the existing one, or replaces the waiting one.

A call touches all its keys in one order, whatever happens to each, so that two producers cannot deadlock. One
statement handles each run of sorted keys with the same rule for conflicts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Text,
    and_,
    case,
    cast,
    literal,
    null,
    select,
    text,
    union_all,
)

from sqlq.database.batch import CHANGED, NEW, Batch, Key
from sqlq.database.dialect import Dialect
from sqlq.database.dialects import dialect_of
from sqlq.errors import EnqueueError
from sqlq.model.job import Job, NewJob, State
from sqlq.schema.tables import HOLDS_KEY, HOLDS_KEY_TO_THE_END, IS_UNRESERVED, jobs
from sqlq.schema.types import far, moment_after
from sqlq.store.jobs.rows import (
    NEW_OR_BLOCKED,
    OVER,
    TABLES,
    columns_but,
    computed,
    row_of,
    said_by_any,
    slices,
)


def insert_keyed(conn: Connection, new: Sequence[NewJob], keyed: Iterable[int]) -> dict[int, Job]:
    """Insert the jobs at these places, which have unique keys, and return them by their places."""
    places: dict[JobKey, list[int]] = defaultdict(list)
    for i in keyed:
        places[new[i].queue, new[i].unique_key].append(i)
    lasting = [key for key, found in places.items() if any(map(lasts, (new[i] for i in found)))]
    several = (len(places) > 1 or bool(lasting)) and not dialect_of(conn).one_writer
    missed: list[JobKey] = []
    # Another producer's job can end between the insert that met it and the lookup. Then the key is free, and
    # we try again. With locks on higher keys that would be out of order, so the rollback releases them first.
    for _ in range(_ROUNDS):
        with conn.begin_nested() if several else nullcontext() as savepoint:
            done, missed = _insert_in_order(conn, new, places, lasting)
            if not missed and several and lasting:
                # the key's job may have ended between the look for it and the insert, which waited for it
                made = [key for key in lasting if any(done[i].created for i in places[key])]
                # guard: what-has-just-ended-keeps-its-key
                missed = list(held(conn, made))
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
    new: Sequence[NewJob],
    places: Mapping[JobKey, list[int]],
    lasting: Sequence[JobKey],
) -> tuple[dict[int, Job], list[JobKey]]:
    """Insert one job of each key, or let it replace the waiting one, or find the live one. Return the jobs by
    their places, and the keys that had neither. For a permanent key it also finds a job that has ended."""
    dialect = dialect_of(conn)
    counting = {key: _that_counts(new, found) for key, found in places.items()}
    holders = held(conn, lasting)  # guard: what-has-ended-keeps-its-key
    changing = [key for key, i in counting.items() if key not in holders and new[i].on_conflict != "keep"]
    live = held(conn, changing, live=True)
    # guard: what-runs-is-not-waited-for
    holders |= {key: job for key, job in live.items() if job.state is State.RUNNING}
    waiting = [key for key in places if key not in holders]
    ordered = sorted(waiting, key=lambda key: (key[0], key[1] or ""))  # guard: keys-in-one-order
    for conflict, run in groupby(ordered, key=lambda key: conflict_of(new[counting[key]])):
        chosen = [new[counting[key]] for key in run]
        said = said_by_any(chosen)
        given = [row_of(job, said) for job in chosen]
        statement = _statement(dialect, said, conflict)
        parts = dialect.portions(given, lambda row: row.values())
        rows = (row for part in parts for row in conn.execute(statement, part))
        for met, queue, key, id, task, state in rows:
            if met is None:
                met = CHANGED if (queue, key) in live else NEW
            its = Job(id, queue, task, State(state), created=met == NEW, replaced=met == CHANGED)
            holders[queue, key] = its
    holders |= held(conn, [key for key in ordered if key not in holders], live=True, met=True)
    done = {
        i: job if i == counting[key] else replace(job, created=False, replaced=False)
        for key, job in holders.items()
        for i in places[key]
    }
    return done, [key for key in ordered if key not in holders]


def _that_counts(new: Sequence[NewJob], places: Sequence[int]) -> int:
    """Return the place of the effective job among several with one key: the last that replaces a waiting job,
    else the first."""
    return next((i for i in reversed(places) if new[i].on_conflict != "keep"), places[0])


class Conflict(NamedTuple):
    """How a new job changes the waiting one with its unique key. `at_most_ms` bounds a postponement, counted
    from the first enqueue; None if the waiting job is only replaced."""

    at_most_ms: int | None


def conflict_of(job: NewJob) -> Conflict | None:
    """Return how this job changes the waiting one with its unique key; None if that one is kept."""
    if job.on_conflict == "keep":
        return None
    return Conflict(job.at_most_ms if job.on_conflict == "postpone" else None)


@cache
def _statement(dialect: Dialect, said: tuple[str, ...], conflict: Conflict | None) -> Any:
    returned = (jobs.c.queue, jobs.c.unique_key, jobs.c.id, jobs.c.task, _STATE)
    return inserting(dialect, said, conflict, returned)


# in the rows that an insert returns, SQLite 3.40 takes `NULL IS NOT NULL` for true
_STATE = case((jobs.c.reserved_at < far(), State.RUNNING.value), else_=NEW_OR_BLOCKED)


def inserting(
    dialect: Dialect,
    said: tuple[str, ...],
    conflict: Conflict | None,
    returning: Sequence[ColumnElement[Any]],
) -> Any:
    """Return the insert of a job with a unique key. It leaves the live job with that key alone, or replaces
    it while it waits."""
    if conflict is None:
        return dialect.upsert(jobs, LIVE_KEY, computed(said), returning=returning)
    # a job that waits for a slot or for other steps stays; guard: only-the-waiting-are-replaced
    return dialect.upsert(
        *(jobs, LIVE_KEY, computed(said), partial(_replacing, at_most_ms=conflict.at_most_ms)),
        where=and_(IS_UNRESERVED, jobs.c.blocked_by.is_(None)),
        returning=returning,
    )


def _replacing(new: Any, at_most_ms: int | None) -> dict[str, Any]:
    """Return the changed columns of a waiting job that a new one replaces: all but the due time, with its
    counters reset. With `at_most_ms` the later due time of the two counts, but at most `at_most_ms` after the
    first enqueue.

    The id, the token and the creation time stay: a worker that held the job matches no row.
    """
    values = {name: new[name] for name in _REPLACED}
    values |= {name: literal(0) for name in _COUNTED}
    values |= {name: null() for name in _FORGOTTEN}
    if at_most_ms is not None:
        latest = moment_after(jobs.c.created_at, literal(at_most_ms, BigInteger))
        earlier = case((new.available_at < latest, new.available_at), else_=latest)
        # guard: postponed-to-a-limit
        values["available_at"] = case((earlier > jobs.c.available_at, earlier), else_=jobs.c.available_at)
    return values


LIVE_KEY = Key(("queue", "unique_key"), text(HOLDS_KEY))  # guard: unique-arbiter
"""The index of the keys that live jobs hold."""
_REPLACED = (
    *columns_but("queue", "unique_key", "unique_until", "schedule", "scheduled_for"),
    "start_by",
)
"""The columns that a replacing job sets; queue and unique key stay the same."""
_FORGOTTEN = (
    *("errors", "cursor", "progress", "progress_of", "progress_note"),
    *("unknown_since", "cancel_requested_at"),
)
"""The columns that a replacement clears."""
_COUNTED = ("attempts", "releases", "losses")
REPLACED = (*_REPLACED, *_COUNTED, *_FORGOTTEN, "available_at")
"""The columns that an enqueue writes into a job that it replaces or postpones."""


_ROUNDS = 20

JobKey: TypeAlias = tuple[str, str | None]
"""A queue and a unique key in it."""
_KEYS_AT_ONCE = 1_000
"""Drivers take 32,767 parameters in one statement, and each key needs two, in two tables."""


def lasts(job: NewJob) -> bool:
    """Whether a job holds its key until its row is deleted."""
    return job.unique_until == "pruned"


def require_read_committed(conn: Connection, new: Iterable[NewJob]) -> None:
    """Raise `EnqueueError` for a permanent key under REPEATABLE READ or stricter."""
    job = next(filter(lasts, new), None)
    if job is not None and (level := dialect_of(conn).stricter_isolation(conn)) is not None:
        # guard: lasting-keys-need-read-committed
        raise EnqueueError(
            f'unique_until="pruned" of a job of {job.task} needs READ COMMITTED, and this transaction is '
            f"{level}: in it a job with the same key that ends meanwhile would not be seen; make the "
            "engine with isolation_level='READ COMMITTED', or leave session out"
        )


def held(
    conn: Connection, keys: Sequence[JobKey], *, live: bool = False, met: bool = False
) -> dict[JobKey, Job]:
    """Return the ended jobs that hold these keys, the newest of each; or the `live` ones, or those that an
    insert has `met`."""
    dialect = dialect_of(conn)
    found: dict[JobKey, Job] = {}
    for some in slices(keys, _KEYS_AT_ONCE):
        given = dialect.batch_parameters(_KEYS, some)
        rows = conn.execute(_holders_of(dialect, live, met), given)
        for queue, key, id, task, state in sorted(rows.all(), key=lambda row: row[2]):
            found[queue, key] = Job(id, queue, task, State(state), created=False)
    return found


def holder(conn: Connection, queue: str, key: str) -> int | None:
    """Return the job that holds a key in one snapshot: a live one, or the newest ended one."""
    dialect = dialect_of(conn)
    rows = conn.execute(_holders_of(dialect, None), dialect.batch_parameters(_KEYS, [(queue, key)]))
    return max(((state not in OVER, id) for _, _, id, _, state in rows), default=(False, None))[1]


_KEYS = Batch(in_queue=Text, held_key=Text)


@cache
def _holders_of(dialect: Dialect, live: bool | None, met: bool = False) -> Any:
    """Choose the jobs that hold the keys of a batch: live ones, or those that have ended; with None both."""
    keys = dialect.batch_table(_KEYS)
    sources = []
    for table, state in TABLES:
        if live is not None and live is not (table is jobs):
            continue
        holds = HOLDS_KEY if table is jobs else HOLDS_KEY_TO_THE_END
        is_its = and_(table.c.queue == keys.c.in_queue, table.c.unique_key == keys.c.held_key)
        columns = (table.c.queue, table.c.unique_key, table.c.id, table.c.task, cast(state, Text))
        sources.append(select(*columns).join_from(keys, table, is_its).where(text(holds)))
    return dialect.newest(sources[0]) if met else union_all(*sources)
