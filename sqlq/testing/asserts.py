"""Assertions on enqueued jobs: in the database, in a transaction that is not committed, or in an inline
block."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Protocol, TypeAlias, Unpack, cast

from sqlq.admin.jobs import enqueued
from sqlq.app.app import App
from sqlq.config.urls import schema_name
from sqlq.database.caller.session import SyncSession, connection_of
from sqlq.errors import ArgumentsError, ConfigurationError, PayloadKeyError
from sqlq.model.job import NewJob
from sqlq.model.job_options import JobOptions
from sqlq.model.task import AnyTask, NamedTask, Task
from sqlq.payload.codec import decode
from sqlq.schema import version
from sqlq.schema.types import milliseconds_since_epoch
from sqlq.testing.database import current_app
from sqlq.testing.inlining import InlineEnqueuer

TaskOrName: TypeAlias = "AnyTask | NamedTask | DjangosTask | str"
Known: TypeAlias = "AnyTask | str"
"""A task, or the name of one whose handler is not here."""
Call: TypeAlias = "tuple[Sequence[Any], Mapping[str, Any]]"
"""Arguments by position and by name."""


class DjangosTask(Protocol):
    """A task of `django.tasks`, whose backend is sqlq's."""

    def get_backend(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Enqueued:
    """A job that was enqueued; `args` and `kwargs` are None where the payload cannot be read.

    They are as the handler gets them, or as JSON has them where the task is known by its name alone. `new`
    has the options of the job.
    """

    id: int
    task: str
    queue: str
    args: list[Any] | None
    kwargs: dict[str, Any] | None
    priority: int
    unique_key: str | None
    new: NewJob = field(compare=False, repr=False)

    def __str__(self) -> str:
        if self.args is None or self.kwargs is None:
            return f"{self.task} with an unreadable payload (job {self.id}, queue {self.queue})"
        return f"{_text(self.task, self.args, self.kwargs)} (job {self.id}, queue {self.queue})"


def assert_enqueued(
    task: TaskOrName,
    *,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    count: int | None = None,
    session: SyncSession | None = None,
    app: App | None = None,
    **options: Unpack[JobOptions],
) -> Enqueued:
    """Fail the test unless a job of `task` was enqueued, or exactly `count` jobs; return the newest one.

    With `args` or `kwargs` it must be the same call as `task.new(*args, **kwargs)`, by position or by name.
    `unittest.mock.ANY` matches anything. It must have the `options`, as `task.new(…).set(**options)` takes
    them, and at least the headers given. Those of a unique key's conflict are in no row. The state of the job
    does not matter (where finished jobs are kept).

    With `session` (a Session, scoped_session or Connection) the look is through that transaction, so it sees
    jobs that are not committed. Without `session` it sees committed jobs of the `app`, else of the fixture
    `sqlq_app` or the innermost `on_database` block. In an `inline` block it sees its jobs, committed or not.

    >>> sqlq.testing.assert_enqueued(send_receipt, args=[order.id], session=session)  # doctest: +SKIP
    """
    __tracebackhide__ = True
    if count == 0:
        raise ConfigurationError("count is 0: write assert_not_enqueued in its place")
    call, jobs, matches = _search(task, args, kwargs, options, session, app)
    if matches and count in (None, len(matches)):
        return matches[-1]
    times = "not enqueued" if count is None else f"enqueued {len(matches)} times, and not {count}"
    lines = "\n  ".join(map(str, jobs[-20:])) or "nothing"
    raise AssertionError(f"{times}: {call}; of this task there is:\n  {lines}")


def assert_not_enqueued(
    task: TaskOrName,
    *,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    session: SyncSession | None = None,
    app: App | None = None,
    **options: Unpack[JobOptions],
) -> None:
    """Fail the test if a job was enqueued that `assert_enqueued` with these arguments would find."""
    __tracebackhide__ = True
    call, _, matches = _search(task, args, kwargs, options, session, app)
    if matches:
        raise AssertionError("\n  ".join([f"enqueued, but should not be: {call}", *map(str, matches[-20:])]))


def _search(
    task: TaskOrName,
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    options: JobOptions,
    session: SyncSession | None,
    app: App | None,
) -> tuple[str, list[Enqueued], list[Enqueued]]:
    """Return the text of the call that is searched for, all jobs of its task, and those that match it."""
    NewJob("", "{}", "", None).set(**options)  # refuses what is no option, also where no job is found
    task = _known(task)
    name = task if isinstance(task, str) else task.name
    jobs = [_enqueued(task, id, new) for id, new in _rows(name, session, app)]
    matches = [job for job in jobs if _has(options, job.new)]
    text = f"{name}(…)"
    if args is not None or kwargs is not None:
        call = (args or (), kwargs or {})
        bound = _bound(task, _arrived(task, call))
        matches = [job for job in matches if _is_call(job, task, bound)]
        text = _text(name, *call)
    if options:
        text += f" with {', '.join(f'{option}={value!r}' for option, value in options.items())}"
    return text, jobs, matches


def _known(task: Any) -> Known:
    """Return the task that is meant, or its name. Raises `ConfigurationError` for anything else: no job of it
    would be found, whatever was enqueued."""
    if isinstance(task, NamedTask):
        return task.name
    if isinstance(task, (Task, str)):
        return task
    backend: Any = task.get_backend() if hasattr(task, "get_backend") else None
    if not hasattr(backend, "registered"):
        raise ConfigurationError(
            f"the jobs of a task are looked for, and this is of type {type(task).__name__}: give the "
            "task itself, or its name"
        )
    return cast("AnyTask", backend.registered(task))


def _rows(name: str, session: SyncSession | None, app: App | None) -> Iterable[tuple[int, NewJob]]:
    """Return the jobs of a task with their ids, the oldest first."""
    app = app or current_app()
    if app is not None and isinstance(app._stand_in, InlineEnqueuer):
        return [(job.id, job.new) for job in app._stand_in.jobs if job.new.task == name]
    database = None if app is None else app.database
    if session is not None:
        reading: Any = nullcontext(connection_of(session))
    elif database is not None:
        reading = database.read()
    else:
        raise ConfigurationError(
            "assert_enqueued does not know where to look: take the fixture sqlq_app, or say app=… or "
            "session=…"
        )
    with reading as conn:
        if database is None:
            return [*enqueued(conn, name, version.effective_schema(conn, schema_name()), None)]
        return [*enqueued(conn, name, database.schema_for(conn), database.encryption)]


def _enqueued(task: Known, id: int, new: NewJob) -> Enqueued:
    args: list[Any] | None = None
    kwargs: dict[str, Any] | None = None
    with suppress(ArgumentsError, PayloadKeyError):
        args, kwargs = decode(new.payload)
        if not isinstance(task, str):
            # plain SQL may have enqueued it for another version of the handler, which has the JSON then
            args, kwargs = task._interface.from_json(args, kwargs)
    return Enqueued(id, new.task, new.queue, args, kwargs, new.priority, new.unique_key, new)


def _has(options: JobOptions, job: NewJob) -> bool:
    """Whether a job stays as it is if it gets the options. Its times are compared in their form."""
    other: dict[str, Any] = {"available_at": None} if "delay" in options else {"delay_ms": 0}
    other["start_within_ms" if "start_by" in options else "start_by"] = None
    job = replace(job, **other)
    return _comparable(job.set(**options)) == _comparable(job)


def _comparable(job: NewJob) -> list[Any]:
    """The fields of a job that its row has, with times as SQLite stores them."""
    return [
        milliseconds_since_epoch(value) if isinstance(value, datetime) else value
        for name, value in vars(job).items()
        if name not in ("rule", "_options_set")
    ]


def _is_call(job: Enqueued, task: Known, bound: Any) -> bool:
    if job.args is None or job.kwargs is None:
        return False
    try:
        return bool(bound == _bound(task, (job.args, job.kwargs)))
    except ArgumentsError:  # enqueued by plain SQL, perhaps, for another version of the handler
        return False


def _arrived(task: Known, call: Call) -> Call:
    """The arguments as they arrive when they are enqueued; as they stand where one could not be, as
    `mock.ANY`."""
    args, kwargs = call
    try:
        return call if isinstance(task, str) else task._interface.arguments(task.new(*args, **kwargs).payload)
    except ArgumentsError:
        return call


def _bound(task: Known, call: Call) -> Any:
    """A call in one form, whichever way its arguments are passed; by the name of a task alone, as it
    stands."""
    args, kwargs = call
    if isinstance(task, str):
        return _listed([args, {**kwargs}])
    if (reason := task._interface.mismatch(args, kwargs)) is not None:
        raise ArgumentsError(reason)
    bound = task._interface.signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return _listed(dict(bound.arguments))


def _listed(value: Any) -> Any:
    """The value as JSON gives it back: tuples are lists. Other values stay, since one may be `mock.ANY`."""
    match value:
        case dict():
            return {key: _listed(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_listed(inner) for inner in value]
        case _:
            return value


def _text(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    texts = [f"{value!r:.80}" for value in args] + [f"{key}={kwargs[key]!r:.80}" for key in kwargs]
    return f"{name}({', '.join(texts)})"
