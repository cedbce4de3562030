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
from typing import Any

from sqlalchemy import (
    BigInteger,
    Connection,
    Integer,
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
from sqlq.database.dialect import Dialect
from sqlq.database.dialects import dialect_named, dialect_of, stricter_isolation
from sqlq.database.schemas import compiled_for, schema_of
from sqlq.database.sql import portions
from sqlq.errors import EnqueueError
from sqlq.model.checks import OnConflict
from sqlq.model.job import Job, NewJob, State
from sqlq.schema.tables import (
    HOLDS_KEY,
    HOLDS_KEY_TO_THE_END,
    IS_UNRESERVED,
    TOKEN_SCHEMA,
    columns_of,
    jobs,
    names_of,
)
from sqlq.schema.types import Moment, far, milliseconds_since_epoch, time_after
from sqlq.store.jobs.rows import (
    NEW_OR_BLOCKED,
    NEW_STATE,
    NO_OPTIONS,
    OVER,
    TABLES,
    TIMES,
    computed,
    fields,
    insert_of_many,
    option_values,
    options_of,
    options_of_any,
    parameters_of,
    row_of,
    slices,
    texts_of,
)
from sqlq.store.limits.grant import wake, wakes_of

# -- insert --------------------------------------------------------------------------------------------------


def insert(conn: Connection, new: Sequence[NewJob]) -> list[Job]:
    """Insert jobs on a caller's connection or one of sqlq's and return them in the order given.

    Runs inside the caller's transaction. A job whose unique key is
    live is not inserted; the live one is returned with `created` False. This raises nothing that would abort
    the transaction.
    """
    if len(new) == 1 and new[0].limit_key is None and new[0].unique_key is None:
        return [insert_one(conn, new[0], schema_of(conn))]
    require_read_committed(conn, new)
    wake(conn, wakes_of(new))  # guard: a-limited-job-is-looked-at
    keyed = [i for i, job in enumerate(new) if job.unique_key is not None]
    plain = [job for job in new if job.unique_key is None]
    sql = dialect_of(conn).sql
    parts = (part for some in slices(plain, _ROWS_AT_ONCE) for part in portions(sql, some, texts_of))
    done = iter([job for part in parts for job in _insert_plain(conn, part)])
    jobs = insert_keyed(conn, new, keyed) if keyed else {}
    return [jobs[i] if i in jobs else next(done) for i in range(len(new))]


def _insert_plain(conn: Connection, new: Sequence[NewJob]) -> list[Job]:
    """Insert jobs without unique keys, by one statement."""
    # ids rise in the order of the rows: the statement sorts them before it numbers them
    rows = sorted(conn.execute(*insert_of_many(dialect_of(conn), new)).all(), key=itemgetter(0))
    return [_job(job, *row) for job, row in zip(new, rows, strict=True)]


def created(conn: Any, ids: Sequence[int]) -> dict[int, int]:
    """Return the creation times of jobs, as SQLite stores them."""
    parts = ({"ids": list(part)} for part in slices(ids, _ROWS_AT_ONCE))
    return {id: milliseconds_since_epoch(at) for part in parts for id, at in conn.execute(_CREATED, part)}


_CREATED = select(jobs.c.id, jobs.c.created_at).where(jobs.c.id.in_(bindparam("ids", expanding=True)))


# -- one job, without SQLAlchemy -----------------------------------------------------------------------------


def insert_one(conn: Connection, job: NewJob, schema: str | None) -> Job:
    """Insert a job without a unique key and a limit, into this schema."""
    return inserted(job, conn.exec_driver_sql(*insert_statement(job, conn.dialect, schema)).one())


def insert_statement(job: NewJob, dialect: Any, schema: str | None) -> tuple[str, Any]:
    """Return the statement that inserts one job without a unique key, and its parameters, as the driver takes
    them. Pass the returned row to `inserted`."""
    options = () if option_values(job) == NO_OPTIONS else options_of(job)  # nearly all jobs have none
    insert = _insert_of_one(dialect, schema, options)
    return insert.statement, insert.parameters(job)


def inserted(job: NewJob, row: Sequence[Any]) -> Job:
    """Return the job from the row that an `insert_statement` returned."""
    is_due = job.available_at is None and not job.delay_ms
    return _job(job, row[0]) if is_due else _job(job, row[0], row[1])


def foreign_statement(job: NewJob, kind: str, style: str, schema: str | None) -> tuple[str, Any]:
    """Return a statement that inserts one job, and its parameters, for a driver of any kind whose parameters
    are in this style. It returns the job's id, or where a live job holds the unique key no row, on MariaDB
    that job's id. Without a schema the table is found by the connection's search_path."""
    is_keyed = job.unique_key is not None
    insert = _insert_for_others(kind, style, schema, options_of(job), is_keyed, _conflict_of(job))
    return insert.statement.replace(f"{TOKEN_SCHEMA}.", ""), insert.parameters(job)


class SingleInsert:
    """The insert of a job that has certain options, compiled once for a driver. To compile it anew, or look
    it up in SQLAlchemy's cache, takes about as long as the database takes to run it."""

    def __init__(self, insert: Any, dialect: Any, schema: str | None, options: Sequence[str]) -> None:
        self._names = parameters_of(options)
        compiled = compiled_for(insert, dialect, schema, self._names)
        self.statement = str(compiled)
        self._values = fields(self._names)
        self._constants = {name: value for name, value in compiled.params.items() if name not in self._names}
        self._times = TIMES.intersection(options)
        self._dialect = dialect
        self._in_order = None if compiled.positiontup is None else itemgetter(*compiled.positiontup)

    def parameters(self, job: NewJob) -> Any:
        """Return the values of a job by name or in order, whichever the driver takes."""
        row = {**self._constants, **dict(zip(self._names, self._values(job), strict=True))}
        for name in self._times:
            row[name] = Moment().process_bind_param(row[name], self._dialect)
        return row if self._in_order is None else self._in_order(row)


@lru_cache(maxsize=256)
def _insert_of_one(dialect: Any, schema: str | None, options: tuple[str, ...]) -> SingleInsert:
    columns = computed(options)
    returned = (jobs.c.id, NEW_STATE) if "available_at" in columns else (jobs.c.id,)
    return SingleInsert(insert_returning(jobs, columns, *returned), dialect, schema, options)


@lru_cache(maxsize=256)
def _insert_for_others(
    kind: str, style: Any, schema: str | None, options: tuple[str, ...], is_keyed: bool, conflict: Conflict
) -> SingleInsert:
    dialect = dialect_named(kind)
    if is_keyed:
        insert = with_returning(inserting(dialect, options, conflict, ()), jobs.c.id)
    else:
        insert = insert_returning(jobs, computed(options), jobs.c.id)
    return SingleInsert(insert, dialect.driver.sqlalchemy(paramstyle=style), schema or TOKEN_SCHEMA, options)


def _job(job: NewJob, id: int, state: str = State.AVAILABLE) -> Job:
    return Job(id, job.queue, job.task, _STATES[state], True)  # noqa: FBT003 - by name it takes half as long again


_ROWS_AT_ONCE = 1_000
_STATES = {str(state): state for state in State}


# -- unique keys ---------------------------------------------------------------------------------------------


def insert_keyed(conn: Connection, new: Sequence[NewJob], keyed: Iterable[int]) -> dict[int, Job]:
    """Insert the jobs at these places, which have unique keys, and return them by their positions."""
    positions: dict[JobKey, list[int]] = defaultdict(list)
    for i in keyed:
        positions[new[i].queue, new[i].unique_key].append(i)
    lasting = [key for key, its in positions.items() if any(new[i].unique_until == "pruned" for i in its)]
    several = (len(positions) > 1 or bool(lasting)) and not dialect_of(conn).in_a_file
    missed: list[JobKey] = []
    # Another producer's job can end between the insert that met it and the lookup. Then the key is free, and
    # we try again. With locks on higher keys that would be out of order, so the rollback releases them first.
    for _ in range(_ROUNDS):
        with conn.begin_nested() if several else nullcontext() as savepoint:
            done, missed = _insert_in_order(conn, new, positions, lasting)
            if not missed and several and lasting:
                # the key's job may have ended between the look for it and the insert, which waited for it
                new_keys = [key for key in lasting if any(done[i].created for i in positions[key])]
                # guard: what-has-just-ended-keeps-its-key
                missed = list(held(conn, new_keys))
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
    positions: Mapping[JobKey, list[int]],
    lasting: Sequence[JobKey],
) -> tuple[dict[int, Job], list[JobKey]]:
    """Insert one job of each key, or let it replace the waiting one, or find the live one. Return the jobs by
    their places, and the keys that had neither. For a permanent key it also finds a job that has ended."""
    dialect = dialect_of(conn)
    # of several jobs with one key the last that replaces a waiting one counts, else the first
    counting = {
        key: next((i for i in reversed(its) if new[i].on_conflict != "keep"), its[0])
        for key, its in positions.items()
    }
    holders = held(conn, lasting)  # guard: what-has-ended-keeps-its-key
    changing = [key for key, i in counting.items() if key not in holders and new[i].on_conflict != "keep"]
    live = held(conn, changing, live=True)
    # guard: what-runs-is-not-waited-for
    holders |= {key: job for key, job in live.items() if job.state is State.RUNNING}
    # guard: keys-in-one-order
    ordered = sorted(positions.keys() - holders.keys(), key=lambda key: (key[0], key[1] or ""))
    for conflict, run in groupby(ordered, key=lambda key: _conflict_of(new[counting[key]])):
        batch = [new[counting[key]] for key in run]
        options = options_of_any(batch)
        statement = _statement(dialect, options, conflict)
        parts = portions(dialect.sql, [row_of(job, options) for job in batch], lambda row: row.values())
        rows = (row for part in parts for row in conn.execute(statement, part))
        for met, queue, key, id, task, state in rows:
            if met is None:
                met = CHANGED if (queue, key) in live else NEW
            job = Job(id, queue, task, State(state), created=met == NEW, replaced=met == CHANGED)
            holders[queue, key] = job
    holders |= held(conn, [key for key in ordered if key not in holders], live=True, met=True)
    done = {
        i: job if i == counting[key] else replace(job, created=False, replaced=False)
        for key, job in holders.items()
        for i in positions[key]
    }
    return done, [key for key in ordered if key not in holders]


Conflict = tuple[OnConflict, int | None]
"""How a new job changes the waiting one with its unique key, and the bound of a debounce in milliseconds,
counted from the first enqueue."""
_conflict_of: Callable[[NewJob], Conflict] = attrgetter("on_conflict", "max_wait_ms")


@cache
def _statement(dialect: Dialect, options: tuple[str, ...], conflict: Conflict) -> Any:
    # in the rows that an insert returns, SQLite 3.40 takes `NULL IS NOT NULL` for true
    state = case((jobs.c.reserved_at < far(), State.RUNNING.value), else_=NEW_OR_BLOCKED)
    returned = (jobs.c.queue, jobs.c.unique_key, jobs.c.id, jobs.c.task, state)
    return inserting(dialect, options, conflict, returned)


def inserting(
    dialect: Dialect,
    options: tuple[str, ...],
    conflict: Conflict,
    returning: Sequence[Expression],
) -> Any:
    """Return the insert of a job with a unique key. It leaves the live job with that key alone, or replaces
    it while it waits."""
    on_conflict, max_wait_ms = conflict
    if on_conflict == "keep":
        return dialect.sql.upsert(jobs, LIVE_KEY, computed(options), returning=returning)
    # a job that waits for a slot or for other steps stays; guard: only-the-waiting-are-replaced
    return dialect.sql.upsert(
        jobs,
        LIVE_KEY,
        computed(options),
        partial(_replacing, max_wait_ms=max_wait_ms),
        where=and_(IS_UNRESERVED, jobs.c.blocked_by.is_(None)),
        returning=returning,
    )


def _replacing(new: Any, max_wait_ms: int | None) -> dict[str, Any]:
    """Return the changed columns of a waiting job that a new one replaces: all but the due time, with its
    counters reset. With `max_wait_ms` the later due time of the two counts, but at most `max_wait_ms` after
    the first enqueue.

    The id, the token and the creation time stay: a worker that held the job matches no row.
    """
    values: dict[str, Any] = {name: new[name] for name in names_of("replaced")}
    for column in columns_of("forgotten"):
        values[column.name] = literal(0) if isinstance(column.type, Integer) else null()
    if max_wait_ms is not None:
        latest = time_after(jobs.c.created_at, literal(max_wait_ms, BigInteger))
        earlier = case((new.available_at < latest, new.available_at), else_=latest)
        # guard: debounced-to-a-limit
        values["available_at"] = case((earlier > jobs.c.available_at, earlier), else_=jobs.c.available_at)
    return values


LIVE_KEY = Key(("queue", "unique_key"), text(HOLDS_KEY))  # guard: unique-arbiter
"""The index of the keys that live jobs hold."""
REPLACED = (*names_of("replaced", "forgotten"), "available_at")
"""The columns that an enqueue writes into a job that it replaces or debounces."""


_ROUNDS = 20

JobKey = tuple[str, str | None]
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
    conn: Connection, keys: Sequence[JobKey], *, live: bool | None = False, met: bool = False
) -> dict[JobKey, Job]:
    """Return the ended jobs that hold these keys, the newest of each. With `live` return the live ones, and
    with None both, the live ones first. `met` are those that an insert has met."""
    dialect = dialect_of(conn)
    jobs: dict[JobKey, Job] = {}
    for part in slices(keys, _ROWS_AT_ONCE):
        rows = conn.execute(_holders_of(dialect, live, met), dialect.sql.batch_parameters(_KEYS, part))
        for queue, key, id, task, state in sorted(rows, key=lambda row: (row[4] not in OVER, row[2])):
            jobs[queue, key] = Job(id, queue, task, State(state), created=False)
    return jobs


def holder(conn: Connection, queue: str, key: str) -> int | None:
    """Return the job that holds a key in one snapshot: a live one, or the newest ended one."""
    job = held(conn, [(queue, key)], live=None).get((queue, key))
    return None if job is None else job.id


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
