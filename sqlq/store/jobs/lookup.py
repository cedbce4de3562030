"""Looks for jobs in the three tables that hold them."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

from sqlalchemy import (
    BigInteger,
    Connection,
    Integer,
    RowMapping,
    Select,
    Table,
    Text,
    and_,
    case,
    cast,
    false,
    func,
    literal,
    null,
    or_,
    select,
    true,
    type_coerce,
    union_all,
)
from sqlalchemy.sql.selectable import FromClause

from sqlq.config.constants import LAST_ID
from sqlq.config.durations import FAR, Duration, aware, milliseconds
from sqlq.database.batch import Batch, Condition, Expression
from sqlq.database.dialect import Dialect
from sqlq.database.dialects import dialect_of
from sqlq.model import history
from sqlq.model.history import AttemptRecord
from sqlq.model.job import LARGE, Job, JobDetails, NewJob, Progress, State
from sqlq.payload.codec import decoded
from sqlq.payload.encryption import Encryption, Unopened, readable
from sqlq.schema.tables import IS_RESERVED, IS_UNRESERVED, failed_jobs, finished_jobs, jobs
from sqlq.schema.types import Moment, ago, now, stands_in
from sqlq.store.jobs.rows import COLUMNS, ENDED_AT, FIELDS, OVER, TABLES, in_all_tables, slices

BATCH = 1_000


def possible(ids: Iterable[int]) -> list[int]:
    """Return those of these numbers that can be ids; no job has one of the others."""
    return [id for id in ids if 0 < id <= LAST_ID]


@dataclass(frozen=True, slots=True)
class Selection:
    """A selection of jobs; without any part of it, all. `before` bounds the ids, `since` and `until` the
    times at which the jobs ended; those that have not ended count from when they were created. Both are
    times or ages, as in "2h". `header` is a name, or a name and value as in "tenant=7". `text` stands in the
    arguments, the message of the error or the reason. `error` is the fingerprint of failed jobs. `visible`
    leaves jobs out, for who may not see all of them. A `state` is for the tables alone."""

    ids: tuple[int, ...] = ()
    task: str | None = None
    queue: str | None = None
    flow_id: int | None = None
    label: str | None = None
    batch: str | None = None
    key: str | None = None
    limit_key: str | None = None
    header: str | None = None
    text: str | None = None
    error: str | None = None
    since: datetime | Duration | None = None
    until: datetime | Duration | None = None
    before: int | None = None
    state: str | None = None
    visible: Callable[[JobDetails], bool] | None = None

    def where(self, source: FromClause) -> Condition:
        columns = source.c
        parts: list[Condition] = [columns.id.in_(possible(self.ids))] if self.ids else []
        for name, column in _EQUAL.items():
            if (value := getattr(self, name)) is not None:
                parts.append(columns[column] == value)
        if self.header is not None:
            name, _, value = self.header.partition("=")
            parts.append(stands_in(literal(json.dumps(name, ensure_ascii=False)), columns.headers))
            parts.append(stands_in(literal(value), columns.headers))
        if self.text is not None:
            texts = [columns[name] for name in ("payload", "message", "reason") if name in columns]
            parts.append(or_(*(stands_in(literal(self.text), text) for text in texts)))
        if self.error is not None:
            parts.append(columns.fingerprint == self.error if "fingerprint" in columns else false())
        time = next(columns[name] for name in ("failed_at", "finished_at", "created_at") if name in columns)
        if self.since is not None:
            parts.append(time >= _time(self.since))
        if self.until is not None:
            parts.append(time < _time(self.until))
        if self.state is not None:
            table, belongs = _SOURCES[State(self.state)]
            parts.append(belongs if source is table else false())
        return and_(true(), *parts, *self.bound(source))

    def bound(self, source: FromClause) -> list[Condition]:
        """Return the conditions that a row is where the search goes on, by its id."""
        return [] if self.before is None else [source.c.id < self.before]

    @property
    def is_rare(self) -> bool:
        """Whether few jobs may be in it, so that a search must end somewhere."""
        others: dict[str, Any] = dict.fromkeys(("flow_id", "batch", "before", "visible"))
        if None not in (self.queue, self.task, self.error):
            others |= dict.fromkeys(("queue", "task", "error"))
        return replace(self, ids=(), **others) != EVERY


EVERY = Selection()
_EQUAL = {name: name for name in ("task", "queue", "flow_id", "label", "limit_key")}
_EQUAL |= {"batch": "batch_key", "key": "unique_key"}
"""The fields that equal a column, with its name."""


def _time(value: datetime | Duration) -> Expression:
    """Return a time, or the time an age ago by the database's clock."""
    if isinstance(value, datetime):
        return literal(aware(value, "time"), Moment)
    return ago(milliseconds(value, "age"))


# -- looking -------------------------------------------------------------------------------------------------

_SHOWN = {*(field.name for field in fields(JobDetails)), "progress_of", "progress_note", "start_ms"}
_COLUMNS = dict.fromkeys(c.name for table, _ in TABLES for c in table.c if c.name in _SHOWN)
_DETAILS: dict[Table, Select[Any]] = {
    table: select(
        *(table.c.get(name, null().label(name)) for name in _COLUMNS),
        state.label("state"),
        ENDED_AT.get(table, null()).label("ended_at"),
    )
    for table, state in TABLES
}
"""For each table a query of the columns that `JobDetails` has, of which each table has some."""
_is_due = jobs.c.available_at <= now()
_SOURCES: dict[State, tuple[Table, Condition]] = {
    State.BLOCKED: (jobs, jobs.c.blocked_by.is_not(None)),
    State.SCHEDULED: (jobs, IS_UNRESERVED & jobs.c.blocked_by.is_(None) & ~_is_due),
    State.AVAILABLE: (jobs, IS_UNRESERVED & _is_due),
    State.RUNNING: (jobs, IS_RESERVED),
    State.FAILED: (failed_jobs, true()),
    State.FINISHED: (finished_jobs, finished_jobs.c.outcome == "finished"),
    State.CANCELLED: (finished_jobs, finished_jobs.c.outcome == "cancelled"),
}


def details(conn: Connection, id: int, encryption: Encryption | None = None) -> JobDetails | None:
    """Return everything about a job, in whichever table it is; `encryption` opens signed or encrypted
    texts."""
    for source, query in _DETAILS.items() if possible([id]) else ():
        row = conn.execute(query.where(source.c.id == id)).mappings().one_or_none()
        if row is not None:
            return _job(row, encryption)
    return None


def listing(
    conn: Connection,
    *,
    state: State | None = None,
    selection: Selection = EVERY,
    limit: int = 100,
    within: int | None = None,
    whole: bool = True,
    encryption: Encryption | None = None,
) -> tuple[list[JobDetails], bool]:
    """Return at most `limit` jobs, the newest first, and whether no other job can belong to them. With
    `within`, search only that many of the newest in each table, since matches may be rare. Unless `whole`,
    large fields are not read. `encryption` opens signed or encrypted texts."""
    is_rare = selection.is_rare or state not in (None, State.RUNNING, State.FAILED)
    if not is_rare or selection.batch is not None or selection.ids:
        within = None  # all match, or an index finds those that do
    left_out = set() if whole else {*LARGE}
    if selection.visible is not None:
        left_out.discard("payload")
    jobs: list[JobDetails] = []
    floors: list[int] = []
    for source, belongs in [_SOURCES[state]] if state else [(source, true()) for source in _DETAILS]:
        floor = None if within is None else position_of(conn, source, within, selection)
        query = _selected(source, belongs, selection, None if floor is None else within, limit)
        # guard: lists-read-no-large-field
        columns = (null().label(c.name) if c.name in left_out else c for c in query.selected_columns)
        query = query.with_only_columns(*columns).order_by(source.c.id.desc())
        # a list that is shorter than the limit would reveal that there are others; all may be too large for
        # memory
        query = query.limit(limit) if selection.visible is None else query.execution_options(yield_per=100)
        with conn.execute(query) as rows:
            visible = filter(selection.visible, (_job(row, encryption) for row in rows.mappings()))
            some = [*islice(visible, limit)]
        jobs += some
        if floor is not None and len(some) < limit:
            floors.append(floor)
    jobs = sorted(jobs, key=lambda job: -job.id)[:limit]
    last = jobs[-1].id if len(jobs) == limit else 0
    return jobs, all(floor < last for floor in floors)


def of_ids(conn: Connection, ids: Iterable[int]) -> list[JobDetails]:
    """Return those of these jobs that are kept, without their large fields."""
    rows: list[JobDetails] = []
    for part in slices(possible(ids), BATCH):
        rows += listing(conn, selection=Selection(tuple(part)), limit=BATCH, whole=False)[0]
    return rows


def position_of(conn: Connection, source: Table, position: int, selection: Selection) -> int | None:
    """Return the id of the job at a position, counted from the newest as 0; None if there are fewer jobs."""
    ids = select(source.c.id).where(*selection.bound(source))
    id: int | None = conn.scalar(ids.order_by(source.c.id.desc()).offset(position).limit(1))
    return id


def _selected(
    source: Table, belongs: Condition, selection: Selection, within: int | None, limit: int
) -> Select[Any]:
    """Return a query of the selected jobs, at least the newest `limit`; with `within`, among that number of
    the newest."""
    query = _DETAILS[source]
    if within is None:
        return query.where(belongs, selection.where(source))
    # a subquery finds the newest first, so that no plan reads more of the table
    searched = (c for c in source.c if c.name not in ("result", "traceback", "errors"))
    newest = select(*searched, belongs.label("belongs")).where(*selection.bound(source))
    newest_rows = newest.order_by(source.c.id.desc()).limit(within).subquery()
    ids = select(newest_rows.c.id).where(newest_rows.c.belongs, selection.where(newest_rows))
    ids = ids.order_by(newest_rows.c.id.desc()).limit(limit if selection.visible is None else within)
    return query.where(source.c.id.in_(select(ids.subquery().c.id)))  # MariaDB takes no LIMIT within IN


def _job(row: RowMapping, encryption: Encryption | None = None) -> JobDetails:
    values: dict[str, Any] = {str(name): value for name, value in row.items()}
    payload, how = readable(encryption, "payload", row.task, row.queue, row.payload)
    started_at = history.started_at(row.reserved_at, values.pop("start_ms"))
    lines = records(row.errors)
    progress, of, note = (values.pop(name) for name in ("progress", "progress_of", "progress_note"))
    values |= {
        "state": State(row.state),
        "payload": _shown(payload),
        "encryption": how,
        "result": None if row.result is None else result_shown(encryption, row.task, row.queue, row.result),
        "errors": [line for line in lines if history.is_error(line)],
        "history": (*map(history.read, lines), *_last_line(row, started_at)),
        "headers": "{}" if row.headers is None else row.headers,
        "progress": None,
        "available_at": None if row.available_at == FAR else row.available_at,
        "due_at": row.blocked_by and row.due_at,
    }
    # on SQLite columns may hold anything
    if isinstance(progress, int | float):
        of = of if isinstance(of, int | float) else None
        values["progress"] = Progress(progress, of, note and str(note))
    for name in ("headers", "on_success", "on_failure", "cursor"):
        values[name] = values[name] and decoded(values[name])
    for name in ("label", "batch_key"):
        values[name] = None if values[name] is None else str(values[name])
    return JobDetails(**values)


def result_shown(encryption: Encryption | None, task: str, queue: str, text: Any) -> Any:
    """Return a result as it may be shown: decoded, or `Unopened`."""
    return _shown(readable(encryption, "result", task, queue, text)[0])


def _shown(text: Any) -> Any:
    return text if isinstance(text, Unopened) else decoded(text)


def _last_line(row: RowMapping, started_at: datetime | None) -> Iterator[AttemptRecord]:
    """Yield the history line of the current or last attempt, which no record holds yet."""
    attempt = row.reserved_at and row.attempts
    times = (attempt, row.reserved_at, started_at, row.ended_at, row.reserved_by)
    if row.state == State.FAILED:
        error = (row.reason, row.exception, row.message)
        yield AttemptRecord("lost" if row.reason == "worker_lost" else "failed", *times, None, *error)
    elif row.state == State.RUNNING or row.state in OVER:
        yield AttemptRecord(row.state, *times, message=row.reason)


def records(text: str | None) -> list[Any]:
    """Return the lines of a job's history as its row has them."""
    value = decoded(text) if text else []
    lines = value if isinstance(value, list) else [value]
    return [line if isinstance(line, dict) else {"message": line} for line in lines]


class Waiting(NamedTuple):
    """The number of due, unclaimed jobs; `exact` is False where the count reached its limit."""

    number: int
    exact: bool


def waiting(conn: Connection, queues: Collection[str] | None, limit: int) -> Waiting:
    """Count the due jobs of these queues, or of all. Reads at most `limit` of the jobs that no worker
    holds."""
    query = select(_is_due.label("due")).where(IS_UNRESERVED)
    if queues is not None:
        query = query.where(jobs.c.queue.in_(queues))
    due = conn.scalars(query.limit(limit)).all()
    return Waiting(sum(map(bool, due)), len(due) < limit)


def counts(
    conn: Connection,
    selection: Selection,
    states: Collection[str] = tuple(State),
    limit: int | None = None,
) -> dict[State, int]:
    """Return the number of the selected jobs in some states, of each table at most the limit."""
    queries = []
    for table in dict.fromkeys(_SOURCES[State(state)][0] for state in states):
        state = dict(TABLES)[table].label("state")
        first = select(state).select_from(table).where(selection.where(table)).limit(limit).subquery()
        queries.append(select(first.c.state, func.count()).group_by(first.c.state))
    rows = conn.execute(union_all(*queries))
    return {State(state): number for state, number in rows if state in states}


def handles(conn: Connection, selection: Selection) -> list[Job]:
    """Return the selected jobs in the order of their ids."""
    query = in_all_tables(
        lambda table, state: select(table.c.id, table.c.queue, table.c.task, state).where(
            selection.where(table)
        )
    )
    rows = conn.execute(query.order_by("id"))
    return [Job(id, queue, task, State(state), created=False) for id, queue, task, state in rows]


def enqueued(conn: Connection, task: str) -> Iterator[tuple[int, NewJob]]:
    """Yield a task's jobs with their ids, the oldest first, on a caller's connection. Each has its times as
    times and as durations, too."""
    names = (*COLUMNS, "start_by", "limit_key")
    rows = in_all_tables(
        lambda table, _: select(
            table.c.id,
            table.c.created_at,
            func.coalesce(table.c.get("due_at", null()), table.c.available_at),
            *(table.c[name] for name in names),
        ).where(table.c.task == task)
    ).order_by("id")
    for id, created_at, due, *values in conn.execute(rows):
        options = dict(zip((FIELDS.get(name, name) for name in names), values, strict=True))
        start_by = options["start_by"]
        options["start_within_ms"] = start_by and round((start_by - due) / _MILLISECOND)
        options["delay_ms"] = round((due - created_at) / _MILLISECOND)
        yield id, NewJob(**options, available_at=due)


_MILLISECOND = timedelta(milliseconds=1)


# -- results, for the processes that wait for them -----------------------------------------------------------

AT_ONCE = 10_000
"""The most jobs that one statement reads."""


class Seen(NamedTuple):
    """The state of a job as one look found it. `result` is JSON text. A job that has not ended has only its
    state."""

    id: int
    state: State
    queue: str
    task: str
    attempts: int
    result: str | None = None
    reason: str | None = None
    exception: str | None = None
    message: str | None = None
    traceback: str | None = None
    created: int | None = None
    """When it was created, as SQLite has it, which may give its id to another job."""

    @property
    def is_over(self) -> bool:
        """Whether it has ended, with any outcome."""
        return self.state in OVER


def look(conn: Connection, requests: Mapping[int, bool]) -> dict[int, Seen]:
    """Return the states of jobs, by their ids. All come from one snapshot, in which each job is in one table
    and never between two. Unknown jobs are missing. True in `requests` requests more than the state."""
    dialect = dialect_of(conn)
    jobs_seen: dict[int, Seen] = {}
    for some in slices(possible(requests), AT_ONCE):
        rows = [(id, int(requests[id])) for id in some]
        for id, state, *values in conn.execute(_look(dialect), dialect.sql.batch_parameters(_REQUESTS, rows)):
            jobs_seen[id] = Seen(id, State(state), *values)
    return jobs_seen


_REQUESTS = Batch(id=BigInteger, whole=Integer)


@cache
def _look(dialect: Dialect) -> Any:
    rows = dialect.sql.batch_table(_REQUESTS)

    def query_of(table: Table, state: Expression) -> Select[Any]:
        ends = (
            case((rows.c.whole == 1, table.c[name])) if name in table.c else cast(null(), Text)
            for name in ("result", "reason", "exception", "message", "traceback")
        )
        columns = (table.c.id, cast(state, Text), table.c.queue, table.c.task, table.c.attempts, *ends)
        query = select(*columns).join_from(rows, table, table.c.id == rows.c.id)
        return query.add_columns(type_coerce(table.c.created_at, BigInteger)) if dialect.in_a_file else query

    return in_all_tables(query_of)
