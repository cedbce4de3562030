"""The hot path as far as a job is running: insert · claim · extend, in the order of the flow.

Every verb takes a batch, and every write of an owner is fenced by id and lease token. How attempts end is in
`store.endings`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum
from functools import cache, lru_cache
from itertools import groupby, zip_longest
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import (
    BigInteger,
    Connection,
    Update,
    bindparam,
    literal,
    select,
    update,
)

from sqlq.job import (
    ClaimedJob,
    Job,
    NewJob,
    State,
)
from sqlq.schema.moments import after
from sqlq.schema.qualify import qualified
from sqlq.schema.tables import TOKEN_SCHEMA, failed_jobs, finished_jobs, jobs
from sqlq.store import lasting, wakes
from sqlq.store.dialect import Batch, Dialect, Right, held, schema_of
from sqlq.store.keyed import Conflict, conflict_of, insert_keyed, inserting
from sqlq.store.postgresql import PostgreSQL
from sqlq.store.rows import (
    NEW_STATE,
    driver_row_of,
    insert_of,
    insert_of_many,
    is_delayed,
    is_due_at_once,
    parameters_of,
    said_by,
    slices,
)
from sqlq.store.sqlite import SQLite

DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in (PostgreSQL(), SQLite())}

T = TypeVar("T")


def takes_no_writes(error: BaseException) -> bool:
    """Whether a database, of whatever kind, answers but takes no writes for the moment."""
    return any(dialect.takes_no_writes(error) for dialect in DIALECTS.values())


def is_refused(error: BaseException) -> bool:
    """Whether a database, of whatever kind, answers and refuses this one statement."""
    return any(dialect.refuses(error) for dialect in DIALECTS.values())


def _dialect(conn: Connection) -> Dialect:
    return DIALECTS[conn.dialect.name]


# -- insert (T1) ---------------------------------------------------------------------------------------------


def insert(conn: Connection, new: Sequence[NewJob], schema: str | None) -> list[Job]:
    """Insert jobs on a caller's connection or one of sqlq's and return them in the order given.

    Runs on the caller's connection inside the caller's transaction, and says the schema with each statement.
    A job whose unique key is live is not inserted; the live one is returned with `created` False, and nothing
    is raised that would abort the transaction.
    """
    options = {"schema_translate_map": {TOKEN_SCHEMA: schema}}
    if any(job.limit_key is not None for job in new):
        lasting.require_read_committed(conn, _dialect(conn), new)
        wakes.write(conn, _dialect(conn), wakes.of(new), options)  # guard: a-limited-job-is-looked-at
    elif len(new) == 1 and new[0].unique_key is None:
        return [inserted(new[0], conn.exec_driver_sql(*insert_statement(new[0], conn.dialect, schema)).one())]
    keyed = [i for i, job in enumerate(new) if job.unique_key is not None]
    if keyed:
        lasting.require_read_committed(conn, _dialect(conn), (new[i] for i in keyed))
    plain = new if not keyed else [job for job in new if job.unique_key is None]
    done = [job for part in slices(plain, _ROWS_AT_ONCE) for job in _insert_plain(conn, part, options)]
    if not keyed:
        return done
    found = insert_keyed(conn, _dialect(conn), new, keyed, options)
    inserted_plainly = iter(done)
    return [found[i] if i in found else next(inserted_plainly) for i in range(len(new))]


def _insert_plain(conn: Connection, new: Sequence[NewJob], options: Mapping[str, Any]) -> list[Job]:
    """Insert jobs without unique keys, by one statement."""
    statement, parameters = insert_of_many(_dialect(conn), new)
    # ids rise in the order of the rows: the statement sorts them before it numbers them
    rows = sorted(conn.execute(statement, parameters, execution_options=options).all(), key=_id)
    if len(rows[0]) == 1:  # all are due at once
        return [_available(job, id) for job, (id,) in zip(new, rows, strict=True)]
    return [_job(job, id, state) for job, (id, state) in zip(new, rows, strict=True)]


def created(conn: Any, ids: Sequence[int]) -> dict[int, int]:
    """Return when jobs were created, as a driver's connection has it from SQLite."""
    options = {"schema_translate_map": {TOKEN_SCHEMA: None}}
    asked = ({"ids": list(part)} for part in slices(ids, _ROWS_AT_ONCE))
    return {id: at for each in asked for id, at in conn.execute(_CREATED, each, execution_options=options)}


_CREATED = select(jobs.c.id, jobs.c.created_at).where(jobs.c.id.in_(bindparam("ids", expanding=True)))


def insert_statement(job: NewJob, dialect: Any, schema: str | None) -> tuple[str, Any]:
    """Return the statement that inserts one job without a unique key, and its parameters, as the driver takes
    them. What it returns is for `inserted`."""
    said = said_by(job)
    compiled = _compiled(dialect, schema, said)
    return compiled.statement, compiled.parameters(driver_row_of(job, said, dialect))


def inserted(job: NewJob, row: Sequence[Any]) -> Job:
    """Return the job of which an `insert_statement` has returned a row."""
    return _job(job, row[0], State.AVAILABLE if is_due_at_once(job) else row[1])


def foreign_statement(job: NewJob, kind: str, style: str, schema: str | None) -> tuple[str, Any]:
    """Return a statement that inserts one job, and its parameters, for a driver of any kind whose parameters
    are in this style. It returns the job's id, or no row where a live job holds the unique key. Without a
    schema the table is found by the connection's search_path."""
    said = said_by(job)
    keyed = job.unique_key is not None
    dialect, compiled = _compiled_for_others(kind, style, schema, said, keyed, conflict_of(job))
    return compiled.statement, compiled.parameters(driver_row_of(job, said, dialect))


@lru_cache(maxsize=256)
def _compiled_for_others(
    kind: str, style: Any, schema: str | None, said: tuple[str, ...], keyed: bool, conflict: Conflict | None
) -> tuple[Any, Compiled]:
    found = DIALECTS[kind]
    dialect = found.for_parameters(style)
    statement = inserting(found, said, conflict) if keyed else insert_of(found, said)
    compiled = Compiled.of(
        statement.returning(jobs.c.id), dialect, schema or TOKEN_SCHEMA, parameters_of(said)
    )
    return dialect, compiled._replace(statement=compiled.statement.replace(f"{TOKEN_SCHEMA}.", ""))


class Compiled(NamedTuple):
    """A statement as a driver takes it, compiled once: to compile it anew, or to find it again, costs about
    what it costs the database to run it."""

    statement: str
    constants: dict[str, Any]
    order: Sequence[str] | None

    @classmethod
    def of(cls, statement: Any, dialect: Any, schema: str | None, keys: Sequence[str]) -> Compiled:
        """`keys` are the parameters that differ from job to job."""
        translate = {TOKEN_SCHEMA: schema}
        compiled = statement.compile(
            dialect=qualified(dialect),
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
def _compiled(dialect: Any, schema: str | None, said: tuple[str, ...]) -> Compiled:
    """Return the insert of one job that says these options."""
    found = DIALECTS[dialect.name]
    returned = (jobs.c.id, NEW_STATE) if is_delayed(said) else (jobs.c.id,)
    statement = insert_of(found, said).returning(*returned)
    return Compiled.of(statement, dialect, schema, parameters_of(said))


def _job(job: NewJob, id: int, state: str) -> Job:
    return Job(id, job.queue, job.task, _STATES[state], True)  # noqa: FBT003 - by name it takes half as long again


def _available(job: NewJob, id: int) -> Job:
    return Job(id, job.queue, job.task, State.AVAILABLE, True)  # noqa: FBT003


_ROWS_AT_ONCE = 1_000
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
    newest_first: bool = False,
) -> list[ClaimedJob]:
    """Claim at most `limit` due jobs of these queues for `owner`, and return them in the order they should
    start.

    Counts the attempt and raises the token. To be committed before any handler runs. `max_attempts` is for
    rows that do not say it, as JSON: what each task says; so are `follow_ups`, where a task has some.
    """

    def ask(statement: str, parameters: Any) -> list[Sequence[Any]]:
        return list(conn.exec_driver_sql(statement, parameters))

    given = (owner, lease_ms, max_attempts, follow_ups)
    rows = _dialect(conn).claim(ask, schema_of(conn), names, limit, *given, newest_first=newest_first)
    return claimed(rows, names, limit, newest_first=newest_first)


def claimed(
    rows: Iterable[Sequence[Any]],
    names: Sequence[str],
    limit: int,
    *,
    newest_first: bool = False,
    evenly: bool = False,
) -> list[ClaimedJob]:
    """Return the jobs that a claim returned, in the order they should start: queue by queue, or `evenly`, the
    first ones of all queues before the second ones."""
    claimed = [ClaimedJob._make(row) for row in rows]
    if len(claimed) > limit:  # guard: no-more-than-asked-for
        raise AssertionError(f"claimed {len(claimed)} jobs instead of at most {limit}")
    place = {name: i for i, name in enumerate(names)}
    if newest_first:
        claimed.sort(key=lambda job: (place[job.queue], -job.priority, -job.due_ms, -job.id))
    else:
        claimed.sort(key=lambda job: (place[job.queue], -job.priority, job.due_ms, job.id))
    if evenly and claimed and claimed[0].queue != claimed[-1].queue:
        queues = [list(group) for _, group in groupby(claimed, attrgetter("queue"))]
        claimed = [job for turn in zip_longest(*queues) for job in turn if job is not None]
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


def owned(conn: Connection, owner: str) -> list[Right]:
    """Return the rights that an owner has, by id. Reads every row that is reserved."""
    mine = (jobs.c.reserved_at.is_not(None), jobs.c.reserved_by == owner)
    return [(id, token) for id, token in conn.execute(select(*_RIGHT).where(*mine).order_by(jobs.c.id))]


# -- looking -------------------------------------------------------------------------------------------------


class Fate(Enum):
    """What became of a right to a job, where a settle or a heartbeat matched no row or its reply was lost."""

    HELD = "held"
    SETTLED = "settled"
    LOST = "lost"


def fates(
    conn: Connection,
    wanted: Iterable[Right],
    *,
    keep_finished: bool = True,
    dropped: Collection[Right] = (),
) -> dict[Right, Fate]:
    """Look singly at jobs: still held under the token (a row lock was in the way), settled under it, or lost
    to another owner.

    A row that is gone altogether was settled where finished jobs, or these, are not kept. A standby is not
    believed: it raises.
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
            kept = keep_finished and (id, token) not in dropped  # guard: the-dropped-are-settled
            return Fate.LOST if kept else Fate.SETTLED  # guard: gone-is-settled-without-retention
        actual, is_reserved = found[id]
        if actual != token:  # guard: fate-by-token
            return Fate.LOST
        return Fate.HELD if is_reserved else Fate.SETTLED

    return {(id, token): fate(id, token) for id, token in wanted}


def stricter_isolation(conn: Connection) -> str | None:
    """Return the name of the transaction's isolation level where it is stricter than READ COMMITTED and has
    one snapshot for all its statements; None where that does not matter."""
    return _dialect(conn).stricter_isolation(conn)
