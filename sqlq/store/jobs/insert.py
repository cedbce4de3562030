"""Inserts jobs, on a connection of a caller's or of sqlq's.

A job with a unique key is inserted, finds the existing one, or replaces the waiting one. A call touches all
its keys in one order, whatever happens to each, so that two producers cannot deadlock. One statement handles
each run of sorted keys with the same rule for conflicts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, lru_cache, partial
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Any, TypeAlias

from sqlalchemy import (
    BigInteger,
    Connection,
    Text,
    and_,
    bindparam,
    case,
    cast,
    literal,
    null,
    select,
    text,
    union_all,
)

from sqlq.database.batch import CHANGED, NEW, Batch, Expression, Key, insert_returning, with_returning
from sqlq.database.compiled import Compiled
from sqlq.database.dialect import Dialect
from sqlq.database.dialects import dialect_named, dialect_of, stricter_isolation
from sqlq.database.schemas import schema_of
from sqlq.database.sql import portions
from sqlq.errors import EnqueueError
from sqlq.model.checks import OnConflict
from sqlq.model.job import Job, NewJob, State
from sqlq.schema.qualify import qualified
from sqlq.schema.tables import HOLDS_KEY, HOLDS_KEY_TO_THE_END, IS_UNRESERVED, TOKEN_SCHEMA, jobs
from sqlq.schema.types import far, milliseconds_of, moment_after
from sqlq.store.jobs.rows import (
    NEW_OR_BLOCKED,
    NEW_STATE,
    OVER,
    TABLES,
    columns_but,
    computed,
    driver_row_of,
    insert_of_many,
    is_delayed,
    is_due_at_once,
    parameters_of,
    row_of,
    said_by,
    said_by_any,
    slices,
    texts_of,
)
from sqlq.store.limits.wakes import wake, wakes_of

# -- insert --------------------------------------------------------------------------------------------------


def insert(conn: Connection, new: Sequence[NewJob]) -> list[Job]:
    """Insert jobs on a caller's connection or one of sqlq's and return them in the order given.

    Runs inside the caller's transaction. A job whose unique key is
    live is not inserted; the live one is returned with `created` False. This raises nothing that would abort
    the transaction.
    """
    if len(new) == 1 and new[0].limit_key is None and new[0].unique_key is None:
        statement = insert_statement(new[0], conn.dialect, schema_of(conn))
        return [inserted(new[0], conn.exec_driver_sql(*statement).one())]
    require_read_committed(conn, new)
    wake(conn, wakes_of(new))  # guard: a-limited-job-is-looked-at
    keyed = [i for i, job in enumerate(new) if job.unique_key is not None]
    plain = [job for job in new if job.unique_key is None]
    sql = dialect_of(conn).sql
    parts = (part for some in slices(plain, _ROWS_AT_ONCE) for part in portions(sql, some, texts_of))
    done = iter([job for part in parts for job in _insert_plain(conn, part)])
    found = insert_keyed(conn, new, keyed) if keyed else {}
    return [found[i] if i in found else next(done) for i in range(len(new))]


def _insert_plain(conn: Connection, new: Sequence[NewJob]) -> list[Job]:
    """Insert jobs without unique keys, by one statement."""
    statement, parameters = insert_of_many(dialect_of(conn), new)
    # ids rise in the order of the rows: the statement sorts them before it numbers them
    rows = sorted(conn.execute(statement, parameters).all(), key=itemgetter(0))
    if len(rows[0]) == 1:  # all are due at once
        return [_job(job, id, State.AVAILABLE) for job, (id,) in zip(new, rows, strict=True)]
    return [_job(job, id, state) for job, (id, state) in zip(new, rows, strict=True)]


def created(conn: Any, ids: Sequence[int]) -> dict[int, int]:
    """Return the creation times of jobs, as SQLite stores them."""
    asked = ({"ids": list(part)} for part in slices(ids, _ROWS_AT_ONCE))
    return {id: milliseconds_of(at) for each in asked for id, at in conn.execute(_CREATED, each)}


_CREATED = select(jobs.c.id, jobs.c.created_at).where(jobs.c.id.in_(bindparam("ids", expanding=True)))


def insert_statement(job: NewJob, dialect: Any, schema: str | None) -> tuple[str, Any]:
    """Return the statement that inserts one job without a unique key, and its parameters, as the driver takes
    them. Pass the returned row to `inserted`."""
    said = said_by(job)
    compiled = _compiled(dialect, schema, said)
    return compiled.statement, compiled.parameters(driver_row_of(job, said, dialect))


def inserted(job: NewJob, row: Sequence[Any]) -> Job:
    """Return the job from the row that an `insert_statement` returned."""
    return _job(job, row[0], State.AVAILABLE if is_due_at_once(job) else row[1])


def foreign_statement(job: NewJob, kind: str, style: str, schema: str | None) -> tuple[str, Any]:
    """Return a statement that inserts one job, and its parameters, for a driver of any kind whose parameters
    are in this style. It returns the job's id, or where a live job holds the unique key no row, on MariaDB
    that job's id. Without a schema the table is found by the connection's search_path."""
    said = said_by(job)
    keyed = job.unique_key is not None
    dialect, compiled = _compiled_for_others(kind, style, schema, said, keyed, _conflict_of(job))
    return compiled.statement, compiled.parameters(driver_row_of(job, said, dialect))


@lru_cache(maxsize=256)
def _compiled_for_others(
    kind: str, style: Any, schema: str | None, said: tuple[str, ...], keyed: bool, conflict: Conflict
) -> tuple[Any, Compiled]:
    found = dialect_named(kind)
    dialect = qualified(found.driver.sqlalchemy(paramstyle=style))
    if keyed:
        statement = with_returning(inserting(found, said, conflict, ()), jobs.c.id)
    else:
        statement = insert_returning(jobs, computed(said), jobs.c.id)
    compiled = Compiled.of(statement, dialect, schema or TOKEN_SCHEMA, parameters_of(said))
    return dialect, compiled._replace(statement=compiled.statement.replace(f"{TOKEN_SCHEMA}.", ""))


@lru_cache(maxsize=256)
def _compiled(dialect: Any, schema: str | None, said: tuple[str, ...]) -> Compiled:
    """Return the insert of one job that has these options."""
    returned = (jobs.c.id, NEW_STATE) if is_delayed(said) else (jobs.c.id,)
    statement = insert_returning(jobs, computed(said), *returned)
    return Compiled.of(statement, dialect, schema, parameters_of(said))


def _job(job: NewJob, id: int, state: str) -> Job:
    return Job(id, job.queue, job.task, _STATES[state], True)  # noqa: FBT003 - by name it takes half as long again


_ROWS_AT_ONCE = 1_000
_STATES = {str(state): state for state in State}


# -- unique keys ---------------------------------------------------------------------------------------------


def insert_keyed(conn: Connection, new: Sequence[NewJob], keyed: Iterable[int]) -> dict[int, Job]:
    """Insert the jobs at these places, which have unique keys, and return them by their places."""
    places: dict[JobKey, list[int]] = defaultdict(list)
    for i in keyed:
        places[new[i].queue, new[i].unique_key].append(i)
    lasting = [key for key, found in places.items() if any(new[i].unique_until == "pruned" for i in found)]
    several = (len(places) > 1 or bool(lasting)) and not dialect_of(conn).in_a_file
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
    for conflict, run in groupby(ordered, key=lambda key: _conflict_of(new[counting[key]])):
        chosen = [new[counting[key]] for key in run]
        said = said_by_any(chosen)
        given = [row_of(job, said) for job in chosen]
        statement = _statement(dialect, said, conflict)
        parts = portions(dialect.sql, given, lambda row: row.values())
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


Conflict: TypeAlias = tuple[OnConflict, int | None]
"""How a new job changes the waiting one with its unique key, and the bound of a postponement in milliseconds,
counted from the first enqueue."""
_conflict_of: Callable[[NewJob], Conflict] = attrgetter("on_conflict", "at_most_ms")


@cache
def _statement(dialect: Dialect, said: tuple[str, ...], conflict: Conflict) -> Any:
    returned = (jobs.c.queue, jobs.c.unique_key, jobs.c.id, jobs.c.task, _STATE)
    return inserting(dialect, said, conflict, returned)


# in the rows that an insert returns, SQLite 3.40 takes `NULL IS NOT NULL` for true
_STATE = case((jobs.c.reserved_at < far(), State.RUNNING.value), else_=NEW_OR_BLOCKED)


def inserting(
    dialect: Dialect,
    said: tuple[str, ...],
    conflict: Conflict,
    returning: Sequence[Expression],
) -> Any:
    """Return the insert of a job with a unique key. It leaves the live job with that key alone, or replaces
    it while it waits."""
    on_conflict, at_most_ms = conflict
    if on_conflict == "keep":
        return dialect.sql.upsert(jobs, LIVE_KEY, computed(said), returning=returning)
    # a job that waits for a slot or for other steps stays; guard: only-the-waiting-are-replaced
    return dialect.sql.upsert(
        *(jobs, LIVE_KEY, computed(said), partial(_replacing, at_most_ms=at_most_ms)),
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


def require_read_committed(conn: Connection, new: Iterable[NewJob]) -> None:
    """Raise `EnqueueError` for a permanent key under REPEATABLE READ or stricter."""
    job = next((job for job in new if job.unique_until == "pruned"), None)
    if job is not None and (level := stricter_isolation(conn)) is not None:
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
    for some in slices(keys, _ROWS_AT_ONCE):
        given = dialect.sql.batch_parameters(_KEYS, some)
        rows = conn.execute(_holders_of(dialect, live, met), given)
        for queue, key, id, task, state in sorted(rows.all(), key=lambda row: row[2]):
            found[queue, key] = Job(id, queue, task, State(state), created=False)
    return found


def holder(conn: Connection, queue: str, key: str) -> int | None:
    """Return the job that holds a key in one snapshot: a live one, or the newest ended one."""
    dialect = dialect_of(conn)
    rows = conn.execute(_holders_of(dialect, None), dialect.sql.batch_parameters(_KEYS, [(queue, key)]))
    return max(((state not in OVER, id) for _, _, id, _, state in rows), default=(False, None))[1]


_KEYS = Batch(in_queue=Text, held_key=Text)


@cache
def _holders_of(dialect: Dialect, live: bool | None, met: bool = False) -> Any:
    """Choose the jobs that hold the keys of a batch: live ones, or those that have ended; with None both."""
    keys = dialect.sql.batch_table(_KEYS)
    sources = []
    for table, state in TABLES:
        if live is not None and live is not (table is jobs):
            continue
        holds = HOLDS_KEY if table is jobs else HOLDS_KEY_TO_THE_END
        is_its = and_(table.c.queue == keys.c.in_queue, table.c.unique_key == keys.c.held_key)
        columns = (table.c.queue, table.c.unique_key, table.c.id, table.c.task, cast(state, Text))
        sources.append(select(*columns).join_from(keys, table, is_its).where(text(holds)))
    return dialect.sql.newest(sources[0]) if met else union_all(*sources)
