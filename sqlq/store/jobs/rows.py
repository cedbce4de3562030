"""The columns that an insert of jobs names: the common ones, and the options of at least one of the jobs.

Every parameter costs time, and other columns get the table's default. Most jobs have no option, and are due
at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

from sqlalchemy import (
    BigInteger,
    CompoundSelect,
    Integer,
    Select,
    SmallInteger,
    String,
    Table,
    Text,
    bindparam,
    case,
    func,
    literal,
    null,
    union_all,
)
from sqlalchemy.types import TypeEngine

from sqlq.database.batch import Batch, Condition, Expression, insert_returning
from sqlq.database.dialect import Dialect
from sqlq.model.job import NewJob, State
from sqlq.schema.tables import IS_RESERVED, failed_jobs, finished_jobs, jobs, names_of
from sqlq.schema.types import Moment, after, far, now, time_after

T = TypeVar("T")

# A new row is not reserved, so this does not test `reserved_at`. In the rows that an insert returns, SQLite
# 3.40 evaluates `reserved_at IS NOT NULL` of a NULL as 1.
NEW_STATE = case((jobs.c.available_at <= now(), State.AVAILABLE.value), else_=State.SCHEDULED.value)
NEW_OR_BLOCKED = case((jobs.c.available_at >= far(), State.BLOCKED.value), else_=NEW_STATE)
LIVE_STATE = case(
    (IS_RESERVED, State.RUNNING.value),
    (jobs.c.blocked_by.is_not(None), State.BLOCKED.value),
    else_=NEW_STATE,
)

TABLES: tuple[tuple[Table, Expression], ...] = (
    (jobs, LIVE_STATE),
    (finished_jobs, finished_jobs.c.outcome),
    (failed_jobs, literal(State.FAILED.value)),
)
"""The tables of jobs, each with the state of its rows."""


def in_all_tables(query_of: Callable[[Table, Expression], Select[Any]]) -> CompoundSelect[Any]:
    """Return the union of the queries of all tables of jobs. `query_of` makes each, given the state of its
    rows."""
    return union_all(*(query_of(table, state) for table, state in TABLES))


ENDED_AT = {finished_jobs: finished_jobs.c.finished_at, failed_jobs: failed_jobs.c.failed_at}
"""The tables of ended jobs, each with the time of the end."""
OVER = (State.FINISHED, State.CANCELLED, State.FAILED)
"""The states of jobs that have ended."""


def _parameter_type(kind: TypeEngine[Any]) -> type[TypeEngine[Any]]:
    """Return the type of a parameter for a column: its length, or that it is small, concerns the table
    alone."""
    if isinstance(kind, String):
        return Text
    return Integer if isinstance(kind, SmallInteger) else type(kind)


_ALWAYS = ("queue", "task", "payload", "max_attempts")
_OPTIONS = tuple(name for name in names_of("option") if name not in _ALWAYS)
DUE: dict[str, type[TypeEngine[Any]]] = {"moment": Moment, "delay_ms": BigInteger}
"""The inputs of `available_at`."""
_COMPUTED = {**DUE, "start_by": Moment, "start_within_ms": BigInteger, "limit": Text}
"""The inputs of computed columns: `start_by` also follows from the time when the job is due, and the key of a
limit blocks it."""

COLUMNS = {name: _parameter_type(jobs.c[name].type) for name in (*_ALWAYS, *_OPTIONS)}
"""The columns that a job can have beside its times, and the types of their parameters."""


_TYPES = {**COLUMNS, **_COMPUTED}
_ELSEWHERE = {"headers": "headers_text", "moment": "available_at", "limit": "limit_key"}
TIMES = {name for name, kind in _TYPES.items() if kind is Moment}
FIELDS = {name: _ELSEWHERE.get(name, name) for name in _TYPES}
"""The name of each in `NewJob`."""
_COMMON = ("queue", "task", "max_attempts")
_SETTABLE = (*_OPTIONS, *_COMPUTED)


def fields(names: Iterable[str]) -> Callable[[NewJob], Any]:
    """Return a getter of the values of these columns from a job."""
    return attrgetter(*(FIELDS[name] for name in names))


option_values = fields(_SETTABLE)
"""Returns the values of a job's options."""
texts_of = fields(("payload", *_SETTABLE))
"""Returns a job's texts, and other values."""
_all_but_payload = fields((*_COMMON, *_SETTABLE))
NO_OPTIONS = option_values(NewJob("", "", "", 1))
"""The values of a job without options."""


def slices(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def options_of(job: NewJob) -> tuple[str, ...]:
    """Return the options that a job has."""
    options = zip(_SETTABLE, option_values(job), NO_OPTIONS, strict=True)
    return tuple(name for name, value, default in options if value != default)


def options_of_any(new: Sequence[NewJob]) -> tuple[str, ...]:
    """Return the options that at least one of these jobs has."""
    options = {name for job in new for name in options_of(job)}
    return tuple(name for name in _SETTABLE if name in options)


def parameters_of(options: Sequence[str]) -> tuple[str, ...]:
    """Return the parameters of an insert of jobs that have these options."""
    return (*_ALWAYS, *options)


def row_of(job: NewJob, options: Sequence[str]) -> dict[str, Any]:
    """Return the parameters of one job."""
    return {name: getattr(job, FIELDS[name]) for name in parameters_of(options)}


Value = Callable[[str], Expression]
"""Returns the expression of an option."""


def due(options: Collection[str], value: Value) -> Expression:
    """Return the time when jobs are due."""
    at = after(value("delay_ms")) if "delay_ms" in options else now()
    return func.coalesce(value("moment"), at) if "moment" in options else at


def _parameter(name: str) -> Expression:
    return bindparam(name, type_=_TYPES[name])


def computed(options: Sequence[str], value: Value = _parameter) -> Mapping[str, Any]:
    """Return the computed columns of jobs that have these options. A job under a limit is blocked until it
    is admitted."""
    at = due(options, value)
    times: dict[str, Expression] = {} if DUE.keys().isdisjoint(options) else {"available_at": at}
    ends = [value("start_by")] if "start_by" in options else []
    if "start_within_ms" in options:
        ends.append(time_after(at, value("start_within_ms")))
    if ends:
        times["start_by"] = func.coalesce(*ends) if len(ends) > 1 else ends[0]
    if "limit" in options:
        times |= {"limit_key": value("limit"), **in_line(value("limit").is_not(None), at)}
    return times


def in_line(limited: Condition, due: Expression) -> dict[str, Expression]:
    """Return the columns of jobs; those that are `limited` wait for a slot of their limit."""
    return {
        "available_at": case((limited, far()), else_=due),
        "blocked_by": case((limited, "limit"), else_=null()),  # guard: a-limited-job-is-blocked
        "due_at": case((limited, due), else_=null()),
    }


def insert_of_many(dialect: Dialect, new: Sequence[NewJob]) -> tuple[Any, dict[str, Any]]:
    """Return the statement that inserts these jobs, and its parameters. It returns ids, and also states where
    not all jobs are due at once."""
    first = new[0]
    if (
        len(set(map(_all_but_payload, new))) == 1
        and (texts := dialect.sql.joined([job.payload for job in new])) is not None
    ):
        options = options_of(first)
        return _insert_alike(dialect, options), {**row_of(first, options), "texts": texts}
    options = options_of_any(new)
    values = fields(parameters_of(options))
    rows = [(i, *values(job)) for i, job in enumerate(new)]
    return _insert_many(dialect, options), dialect.sql.batch_parameters(_batch(options), rows)


@cache
def _batch(options: tuple[str, ...]) -> Batch:
    return Batch(n=Integer, **{name: _TYPES[name] for name in parameters_of(options)})


@cache
def _insert_alike(dialect: Dialect, options: tuple[str, ...]) -> Any:
    """Insert jobs that differ only in their payloads, as in most batches. It sends the common values once,
    and the payloads as one text. A statement with a parameter for each value of each row costs several times
    as much."""
    texts = dialect.sql.texts()
    columns: dict[str, Any] = {
        name: bindparam(name, type_=jobs.c[name].type)
        for name in (*_COMMON, *options)
        if name not in _COMPUTED
    }
    columns |= {"payload": texts.c.value, **computed(options)}
    return _insert_all(columns, texts.c.place, options)


@cache
def _insert_many(dialect: Dialect, options: tuple[str, ...]) -> Any:
    rows = dialect.sql.batch_table(_batch(options))
    columns: dict[str, Any] = {name: rows.c[name] for name in parameters_of(options) if name not in _COMPUTED}
    columns |= computed(options, lambda name: rows.c[name])
    return _insert_all(columns, rows.c.n, options)


def _insert_all(columns: dict[str, Any], position: Expression, options: Sequence[str]) -> Any:
    state = NEW_OR_BLOCKED if "limit" in options else NEW_STATE
    returned = (jobs.c.id, state) if "available_at" in columns else (jobs.c.id,)
    return insert_returning(jobs, columns, *returned, order_by=position)
