"""The hot path as far as a job is running: insert · claim · extend, in the order of the flow.

Every verb takes a batch, and every write of an owner is fenced by id and lease token. How attempts end is in
`store.endings`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from enum import Enum
from functools import cache, lru_cache
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Integer,
    Select,
    String,
    Text,
    Update,
    bindparam,
    case,
    func,
    literal,
    select,
    text,
    tuple_,
    update,
)
from sqlalchemy import insert as insert_into
from sqlalchemy.types import TypeEngine

from sqlq.errors import EnqueueError
from sqlq.job import (
    ClaimedJob,
    Job,
    NewJob,
    State,
)
from sqlq.schema.tables import (
    HOLDS_KEY,
    TOKEN_SCHEMA,
    Moment,
    after,
    failed_jobs,
    finished_jobs,
    jobs,
    now,
)
from sqlq.store.dialect import CLAIMED, Batch, Dialect, Right, held
from sqlq.store.postgresql import PostgreSQL
from sqlq.store.sqlite import SQLite

DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in (PostgreSQL(), SQLite())}

T = TypeVar("T")


def takes_no_writes(error: BaseException) -> bool:
    """Whether a database, of whatever kind, answers but takes no writes for the moment."""
    return any(dialect.takes_no_writes(error) for dialect in DIALECTS.values())


def _dialect(conn: Connection) -> Dialect:
    return DIALECTS[conn.dialect.name]


# -- insert (T1) ---------------------------------------------------------------------------------------------

# A new row is not reserved, so that is not asked: SQLite 3.40 answers `reserved_at IS NOT NULL` with 1 for a
# NULL in RETURNING.
_NEW_STATE = case((jobs.c.available_at <= now(), State.AVAILABLE.value), else_=State.SCHEDULED.value)
LIVE_STATE = case((jobs.c.reserved_at.is_not(None), State.RUNNING.value), else_=_NEW_STATE)


def insert(conn: Connection, new: Sequence[NewJob], schema: str | None) -> list[Job]:
    """Insert jobs on a caller's connection or one of sqlq's and return them in the order given.

    Runs on the caller's connection inside the caller's transaction, and says the schema with each statement.
    A job whose unique key is live is not inserted; the live one is returned with `created` False, and nothing
    is raised that would abort the transaction.
    """
    options = {"schema_translate_map": {TOKEN_SCHEMA: schema}}
    if len(new) == 1 and new[0].unique_key is None:
        return [inserted(new[0], conn.exec_driver_sql(*insert_statement(new[0], conn.dialect, schema)).one())]
    keyed = [i for i, job in enumerate(new) if job.unique_key is not None]
    plain = new if not keyed else [job for job in new if job.unique_key is None]
    done = [job for part in _slices(plain, _ROWS_AT_ONCE) for job in _insert_plain(conn, part, options)]
    if not keyed:
        return done
    found = _insert_keyed(conn, new, keyed, options)
    inserted_plainly = iter(done)
    return [found[i] if i in found else next(inserted_plainly) for i in range(len(new))]


def _insert_plain(conn: Connection, new: Sequence[NewJob], options: Mapping[str, Any]) -> list[Job]:
    """Insert jobs without unique keys, by one statement."""
    statement, parameters = _many(_dialect(conn), new)
    # ids rise in the order of the rows: the statement sorts them before it numbers them
    rows = sorted(conn.execute(statement, parameters, execution_options=options).all(), key=_id)
    if len(rows[0]) == 1:  # all are due at once
        return [_available(job, id) for job, (id,) in zip(new, rows, strict=True)]
    return [_job(job, id, state) for job, (id, state) in zip(new, rows, strict=True)]


def insert_statement(job: NewJob, dialect: Any, schema: str | None) -> tuple[str, Any]:
    """Return the statement that inserts one job without a unique key, and its parameters, as the driver takes
    them. What it returns is for `inserted`."""
    said = _said(job)
    compiled, row = _compiled(dialect, schema, said), _row(job, said)
    if job.available_at is not None:
        row["moment"] = Moment().process_bind_param(job.available_at, dialect)
    return compiled.statement, compiled.parameters(row)


def inserted(job: NewJob, row: Sequence[Any]) -> Job:
    """Return the job of which an `insert_statement` has returned a row."""
    return _job(job, row[0], State.AVAILABLE if _is_due_at_once(job) else row[1])


def foreign_statement(job: NewJob, kind: str, style: str, schema: str | None) -> tuple[str, Any]:
    """Return a statement that inserts one job, and its parameters, for a driver of any kind whose parameters
    are in this style. It returns the job's id, or no row where a live job holds the unique key. Without a
    schema the table is found by the connection's search_path."""
    said = _said(job)
    dialect, compiled = _compiled_for_others(kind, style, schema, said, job.unique_key is not None)
    row = _row(job, said)
    if job.available_at is not None:
        row["moment"] = Moment().process_bind_param(job.available_at, dialect)
    return compiled.statement, compiled.parameters(row)


@lru_cache(maxsize=256)
def _compiled_for_others(
    kind: str, style: Any, schema: str | None, said: tuple[str, ...], keyed: bool
) -> tuple[Any, _Compiled]:
    found = DIALECTS[kind]
    dialect = found.for_parameters(style)
    statement = _insert(found, said)
    if keyed:
        statement = found.passing_over_live_keys(statement)
    compiled = _Compiled.of(
        statement.returning(jobs.c.id), dialect, schema or TOKEN_SCHEMA, _parameters(said)
    )
    return dialect, compiled._replace(statement=compiled.statement.replace(f"{TOKEN_SCHEMA}.", ""))


class _Compiled(NamedTuple):
    """A statement as a driver takes it, compiled once: to compile it anew, or to find it again, costs about
    what it costs the database to run it."""

    statement: str
    constants: dict[str, Any]
    order: Sequence[str] | None

    @classmethod
    def of(cls, statement: Any, dialect: Any, schema: str | None, keys: Sequence[str]) -> _Compiled:
        """`keys` are the parameters that differ from job to job."""
        translate = {TOKEN_SCHEMA: schema}
        compiled = statement.compile(
            dialect=dialect,
            column_keys=list(keys),
            schema_translate_map=translate,
            render_schema_translate=True,
        )
        constants = {name: value for name, value in compiled.params.items() if name not in keys}
        return cls(str(compiled), constants, compiled.positiontup)

    def parameters(self, row: dict[str, Any]) -> Any:
        """Return them by name or in order, whichever the driver takes."""
        every = {**self.constants, **row} if self.constants else row
        return every if self.order is None else tuple(every[name] for name in self.order)


@lru_cache(maxsize=256)
def _compiled(dialect: Any, schema: str | None, said: tuple[str, ...]) -> _Compiled:
    """Return the insert of one job that says these options."""
    found = DIALECTS[dialect.name]
    if _is_delayed(said):
        statement = _insert(found, said).returning(jobs.c.id, _NEW_STATE)
    else:
        statement = insert_into(jobs).returning(jobs.c.id)
    return _Compiled.of(statement, dialect, schema, _parameters(said))


def _insert_keyed(
    conn: Connection, new: Sequence[NewJob], keyed: Iterable[int], options: Mapping[str, Any]
) -> dict[int, Job]:
    """Insert jobs with unique keys; in the order of their keys, so that two producers cannot deadlock on each
    other."""
    places: dict[tuple[str, str | None], list[int]] = defaultdict(list)
    for i in keyed:
        places[new[i].queue, new[i].unique_key].append(i)
    several = len(places) > 1 and not _dialect(conn).one_writer
    missed: list[tuple[str, str | None]] = []
    # A rival's job can end between the insert that met it and the look at it: then the key is free, and we
    # try again. With higher keys in hand that would be out of order, so they are let go of before.
    for _ in range(_ROUNDS):
        with conn.begin_nested() if several else nullcontext() as savepoint:
            done, missed = _insert_in_order(conn, new, places, options)
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
    places: Mapping[tuple[str, str | None], list[int]],
    options: Mapping[str, Any],
) -> tuple[dict[int, Job], list[tuple[str, str | None]]]:
    """Insert the first job of each key, or find the live one; return the jobs by their places, and the keys
    of which there was neither."""
    dialect = _dialect(conn)
    waiting = dict(places)
    done: dict[int, Job] = {}
    ordered = sorted(waiting, key=lambda key: (key[0], key[1] or ""))
    firsts = [new[waiting[key][0]] for key in ordered]
    said = _all_said(firsts)
    statement = dialect.passing_over_live_keys(_insert(dialect, said)).returning(
        jobs.c.queue, jobs.c.unique_key, jobs.c.id, _NEW_STATE
    )
    inserted = conn.execute(statement, [_row(job, said) for job in firsts], execution_options=options).all()
    for queue, key, id, state in inserted:
        first, *others = waiting.pop((queue, key))
        done[first] = _job(new[first], id, state)
        done |= {i: replace(done[first], created=False) for i in others}
    for keys in _slices(list(waiting), _KEYS_AT_ONCE):
        for queue, key, id, task, state in conn.execute(
            _LIVE_KEYS, {"keys": keys}, execution_options=options
        ).all():
            for i in waiting.pop((queue, key), ()):
                done[i] = Job(id=id, queue=queue, task=task, state=State(state), created=False)
    return done, list(waiting)


def _slices(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


_ROUNDS = 20
_KEYS_AT_ONCE = 1_000
"""Drivers take 32,767 parameters in one statement, and each key is two."""
_LIVE_KEYS: Select[Any] = select(jobs.c.queue, jobs.c.unique_key, jobs.c.id, jobs.c.task, LIVE_STATE).where(
    text(HOLDS_KEY), tuple_(jobs.c.queue, jobs.c.unique_key).in_(bindparam("keys", expanding=True))
)


# A statement names the columns that all jobs have, and those of the options that one of its jobs says: every
# parameter costs time, and the rest is the table's default. Most jobs say none, and are due at once.

_ALWAYS = {"queue": Text, "task": Text, "payload": Text, "max_attempts": Integer}
_OPTIONS: dict[str, type[TypeEngine[Any]]] = {
    "priority": Integer,
    "timeout_ms": BigInteger,
    "unique_key": Text,
    "unique_until": Text,
    "on_success": Text,
    "on_failure": Text,
    "label": Text,
    "headers": Text,
    "backoff": Text,
    "retention_ms": BigInteger,
}
"""The columns of options."""
_DUE: dict[str, type[TypeEngine[Any]]] = {"moment": Moment, "delay_ms": BigInteger}
"""What `available_at` is computed from."""

_TYPES = {**_ALWAYS, **_OPTIONS, **_DUE}
_FIELDS = {name: {"headers": "headers_text", "moment": "available_at"}.get(name, name) for name in _TYPES}
"""Each by the name it has in `NewJob`."""
_COMMON = ("queue", "task", "max_attempts")
_SAYABLE = (*_OPTIONS, *_DUE)
_values = attrgetter(*(_FIELDS[name] for name in _SAYABLE))
_all_but_payload = attrgetter(*(_FIELDS[name] for name in (*_COMMON, *_SAYABLE)))
_UNSAID = _values(NewJob("", "", "", 1))
_ROWS_AT_ONCE = 1_000


def _said(job: NewJob) -> tuple[str, ...]:
    """Return which options a job says."""
    values = _values(job)
    if values == _UNSAID:
        return ()
    return tuple(
        name for name, value, unsaid in zip(_SAYABLE, values, _UNSAID, strict=True) if value != unsaid
    )


def _all_said(new: Sequence[NewJob]) -> tuple[str, ...]:
    """Return which options at least one of these jobs says."""
    said = {name for job in new for name in _said(job)}
    return tuple(name for name in _SAYABLE if name in said)


def _parameters(said: Sequence[str]) -> tuple[str, ...]:
    return (*_ALWAYS, *said)


def _row(job: NewJob, said: Sequence[str]) -> dict[str, Any]:
    row = {"queue": job.queue, "task": job.task, "payload": job.payload, "max_attempts": job.max_attempts}
    for name in said:
        row[name] = getattr(job, _FIELDS[name])
    return row


def _is_delayed(said: Sequence[str]) -> bool:
    return not _DUE.keys().isdisjoint(said)


def _is_due_at_once(job: NewJob) -> bool:
    return job.available_at is None and not job.delay_ms


def _due(said: Sequence[str], value: Callable[[str], ColumnElement[Any]]) -> ColumnElement[Any]:
    """Return when a job is due that says so; `value` finds what it says."""
    later = after(value("delay_ms")) if "delay_ms" in said else now()
    return func.coalesce(value("moment"), later) if "moment" in said else later


def _parameter(name: str) -> ColumnElement[Any]:
    return bindparam(name, type_=_TYPES[name])


@cache
def _insert(dialect: Dialect, said: tuple[str, ...]) -> Any:
    statement = dialect.insert(jobs)
    return statement.values(available_at=_due(said, _parameter)) if _is_delayed(said) else statement


def _many(dialect: Dialect, new: Sequence[NewJob]) -> tuple[Any, dict[str, Any]]:
    """Return the statement that inserts these jobs, and its parameters."""
    first = new[0]
    if (
        len(set(map(_all_but_payload, new))) == 1
        and (texts := dialect.joined([job.payload for job in new])) is not None
    ):
        said = _said(first)
        return _insert_alike(dialect, said), {**_row(first, said), "texts": texts}
    said = _all_said(new)
    values = attrgetter(*(_FIELDS[name] for name in _parameters(said)))
    rows = [(i, *values(job)) for i, job in enumerate(new)]
    return _insert_many(dialect, said), dialect.parameters(_batch(said), rows)


@cache
def _batch(said: tuple[str, ...]) -> Batch:
    return Batch(n=Integer, **{name: _TYPES[name] for name in _parameters(said)})


@cache
def _insert_alike(dialect: Dialect, said: tuple[str, ...]) -> Any:
    """For jobs that differ in their payloads only, as most batches: what they have in common is sent once,
    and the payloads as one text. A statement that takes each value of each row by itself costs several times
    as much."""
    texts = dialect.texts()
    common = {
        name: bindparam(name, type_=jobs.c[name].type) for name in (*_COMMON, *said) if name not in _DUE
    }
    columns: dict[str, Any] = {**common, "payload": texts.c.value}
    if _is_delayed(said):
        columns["available_at"] = _due(said, _parameter)
    return _insert_from(dialect, columns, texts.c.place)


@cache
def _insert_many(dialect: Dialect, said: tuple[str, ...]) -> Any:
    rows = dialect.rows(_batch(said))
    columns: dict[str, Any] = {name: rows.c[name] for name in _parameters(said) if name not in _DUE}
    if _is_delayed(said):
        columns["available_at"] = _due(said, lambda name: rows.c[name])
    return _insert_from(dialect, columns, rows.c.n)


def _insert_from(dialect: Dialect, columns: dict[str, Any], place: ColumnElement[Any]) -> Any:
    """Return the statement that inserts these columns, and returns ids; states, too, where not all jobs are
    due at once."""
    source = select(*columns.values()).order_by(place)
    returned = (jobs.c.id, _NEW_STATE) if "available_at" in columns else (jobs.c.id,)
    return dialect.insert(jobs).from_select([*columns], source).returning(*returned)


def _job(job: NewJob, id: int, state: str) -> Job:
    return Job(id, job.queue, job.task, _STATES[state], True)  # noqa: FBT003 - by name it takes half as long again


def _available(job: NewJob, id: int) -> Job:
    return Job(id, job.queue, job.task, State.AVAILABLE, True)  # noqa: FBT003


_STATES = {str(state): state for state in State}
_id = itemgetter(0)


# -- claim (T2) ----------------------------------------------------------------------------------------------


def claim(
    conn: Connection,
    names: Sequence[str],
    *,
    limit: int,
    owner: str,
    lease_ms: int,
    max_attempts: str = "{}",
    follow_ups: str | None = None,
) -> list[ClaimedJob]:
    """Claim at most `limit` due jobs of these queues for `owner`, and return them in the order they should
    start.

    Counts the attempt and raises the token. To be committed before any handler runs. `max_attempts` is for
    rows that do not say it, as JSON: what each task says; so are `follow_ups`, where a task has some.
    """
    schema = conn.get_execution_options()["schema_translate_map"][TOKEN_SCHEMA]

    def ask(statement: str, parameters: Any) -> list[Sequence[Any]]:
        return list(conn.exec_driver_sql(statement, parameters))

    rows = _dialect(conn).claim(ask, schema, names, limit, owner, lease_ms, max_attempts, follow_ups)
    return claimed(rows, names, limit)


def claimed(rows: Iterable[Sequence[Any]], names: Sequence[str], limit: int) -> list[ClaimedJob]:
    """Return the jobs that a claim returned, in the order they should start."""
    claimed = [ClaimedJob._make(row) for row in rows]
    if len(claimed) > limit:  # guard: no-more-than-asked-for
        raise AssertionError(f"claimed {len(claimed)} jobs instead of at most {limit}")
    place = {name: i for i, name in enumerate(names)}
    claimed.sort(key=lambda job: (place[job.queue], -job.priority, job.due_ms, job.id))
    return claimed


_RIGHT = (jobs.c.id, jobs.c.lease_token)
HOLD = Batch(id=BigInteger, token=BigInteger)
"""Rights, and nothing else."""


# -- extend (T3) ---------------------------------------------------------------------------------------------


def extend(conn: Connection, wanted: Iterable[Right], *, lease_ms: int) -> dict[Right, bool]:
    """Renew leases, counted from now, and return those renewed, with whether an operator has asked for the
    job's end (T11). What is missing is locked or lost; see `fates`."""
    dialect = _dialect(conn)
    return _renewed(
        conn.execute(_extend(dialect), {**dialect.parameters(HOLD, sorted(wanted)), "lease_ms": lease_ms})
    )


def _renewed(rows: Iterable[Any]) -> dict[Right, bool]:
    return {(id, token): cancel_requested_at is not None for id, token, cancel_requested_at in rows}


_RENEWED: dict[str, Any] = {"lease_expires_at": after(bindparam("lease_ms", type_=BigInteger))}


@cache
def _extend(dialect: Dialect) -> Update:
    mine = held(dialect, HOLD)
    # guard: renewal
    return (
        update(jobs)
        .values(_RENEWED)
        .where(jobs.c.id == mine.c.id)
        .returning(*_RIGHT, jobs.c.cancel_requested_at)
    )


_OWNED = (jobs.c.reserved_at.is_not(None), jobs.c.reserved_by == bindparam("owner", type_=String))


def owned(conn: Connection, owner: str) -> list[ClaimedJob]:
    """Return, and lock, what an owner holds but for rows that another transaction has locked."""
    return [ClaimedJob._make(row) for row in conn.execute(_owned_jobs, {"owner": owner})]


_owned_jobs = select(*CLAIMED).where(*_OWNED).order_by(jobs.c.id).with_for_update(skip_locked=True)


# -- looking -------------------------------------------------------------------------------------------------


class Fate(Enum):
    """What became of a right to a job, where a settle or a heartbeat matched no row or its reply was lost."""

    HELD = "held"
    SETTLED = "settled"
    LOST = "lost"


def fates(conn: Connection, wanted: Iterable[Right], *, keep_finished: bool = True) -> dict[Right, Fate]:
    """Look singly at jobs: still held under the token (a row lock was in the way), settled under it, or lost
    to another owner.

    A row that is gone altogether was settled where finished jobs are not kept. A standby is not believed: it
    raises.
    """
    _dialect(conn).refuse_standby(conn)  # guard: standby-is-not-believed
    wanted = list(wanted)
    ids = [id for id, _ in wanted]
    found: dict[int, tuple[int, bool]] = {}
    for table, reserved in (
        (jobs, jobs.c.reserved_at.is_not(None)),
        (finished_jobs, literal(0)),
        (failed_jobs, literal(0)),
    ):
        query = select(table.c.id, table.c.lease_token, reserved).where(table.c.id.in_(ids))
        found |= {id: (token, bool(is_reserved)) for id, token, is_reserved in conn.execute(query)}

    def fate(id: int, token: int) -> Fate:
        if id not in found:
            return Fate.LOST if keep_finished else Fate.SETTLED  # guard: gone-is-settled-without-retention
        actual, is_reserved = found[id]
        if actual != token:  # guard: fate-by-token
            return Fate.LOST
        return Fate.HELD if is_reserved else Fate.SETTLED

    return {(id, token): fate(id, token) for id, token in wanted}


def stricter_isolation(conn: Connection) -> str | None:
    """Return the name of the transaction's isolation level where it is stricter than READ COMMITTED and has
    one snapshot for all its statements; None where that does not matter."""
    return _dialect(conn).stricter_isolation(conn)
