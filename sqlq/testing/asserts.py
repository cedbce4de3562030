"""Assertions on enqueued jobs: in the database, in a transaction that is not committed, or in an inline
block."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

from sqlq.admin.jobs import enqueued
from sqlq.app.app import App
from sqlq.config.urls import schema_name
from sqlq.database.caller.session import SyncSession, connection_of
from sqlq.errors import ArgumentsError, ConfigurationError, SealError
from sqlq.model.task import NamedTask, Task
from sqlq.payload.codec import decode
from sqlq.schema import version
from sqlq.testing.database import current_app
from sqlq.testing.inlining import InlineEnqueuer

AnyTask: TypeAlias = "Task[..., Any] | NamedTask | DjangosTask | str"


class DjangosTask(Protocol):
    """A task of `django.tasks`, whose backend is sqlq's."""

    def get_backend(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Enqueued:
    """A job that was enqueued; `args` and `kwargs` are None where the payload cannot be read.

    They are as the handler gets them, or as JSON has them where the task is known by its name alone.
    """

    id: int
    task: str
    queue: str
    args: list[Any] | None
    kwargs: dict[str, Any] | None
    priority: int
    unique_key: str | None

    def __str__(self) -> str:
        if self.args is None or self.kwargs is None:
            return f"{self.task} with an unreadable payload (job {self.id}, queue {self.queue})"
        return f"{_call(self.task, self.args, self.kwargs)} (job {self.id}, queue {self.queue})"


def assert_enqueued(
    task: AnyTask,
    *,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    queue: str | None = None,
    session: SyncSession | None = None,
    app: App | None = None,
) -> Enqueued:
    """Fail the test unless a job of `task` was enqueued; return the newest one.

    With `args` or `kwargs` it must be the same call as `task.new(*args, **kwargs)`, by position or by name.
    `unittest.mock.ANY` matches anything. With `queue` it must be in that queue. The state of the job does not
    matter (where finished jobs are kept).

    With `session` (a Session, scoped_session or Connection) the look is through that transaction, so it sees
    jobs that are not committed. Without `session` it sees committed jobs of the `app`, else of the fixture
    `sqlq_app` or the innermost `on_database` block. In an `inline` block it sees its jobs, committed or not.

    >>> sqlq.testing.assert_enqueued(send_receipt, args=[order.id], session=session)  # doctest: +SKIP
    """
    __tracebackhide__ = True
    wanted = _Wanted(_known(task), args, kwargs, queue)
    found = _enqueued(wanted.task, session, app)
    for job in reversed(found):
        if wanted.is_met_by(job):
            return job
    there = "\n  ".join(str(job) for job in found[-20:]) or "nothing"
    raise AssertionError(f"not enqueued: {wanted}; of this task there is:\n  {there}")


def assert_not_enqueued(
    task: AnyTask,
    *,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    queue: str | None = None,
    session: SyncSession | None = None,
    app: App | None = None,
) -> None:
    """Fail the test if a job was enqueued that `assert_enqueued` with these arguments would find."""
    __tracebackhide__ = True
    wanted = _Wanted(_known(task), args, kwargs, queue)
    found = [str(job) for job in _enqueued(wanted.task, session, app) if wanted.is_met_by(job)]
    if found:
        there = "\n  ".join(found[-20:])
        raise AssertionError(f"enqueued, but should not be: {wanted}\n  {there}")


def _known(task: Any) -> Task[..., Any] | str:
    """Return the task that is meant, or its name. Raises `ConfigurationError` for what is none: of it no job
    would be found, whatever was enqueued."""
    if isinstance(task, NamedTask):
        task = task.name
    if not isinstance(task, (Task, str)):
        backend: Any = task.get_backend() if hasattr(task, "get_backend") else None
        if not hasattr(backend, "registered"):
            raise ConfigurationError(
                f"the jobs of a task are looked for, and this is of type {type(task).__name__}: give the "
                "task itself, or its name"
            )
        return cast("Task[..., Any]", backend.registered(task))
    return task


def _enqueued(task: Task[..., Any] | str, session: SyncSession | None, app: App | None) -> list[Enqueued]:
    """The jobs of a task, the oldest first."""
    name = task if isinstance(task, str) else task.name
    app = app or current_app()
    if app is not None and isinstance(app._stand_in, InlineEnqueuer):
        rows: list[Any] = [
            (job.id, j.task, j.queue, j.payload, j.priority, j.unique_key)
            for job in app._stand_in.ran.jobs
            if (j := job.new).task == name
        ]
        return [_job(task, *row) for row in rows]
    if session is not None:
        conn = connection_of(session)
        schema = (
            version.effective_schema(conn, schema_name()) if app is None else app.database.schema_for(conn)
        )
        rows = list(enqueued(conn, name, schema, None if app is None else app.database.seal))
    elif app is not None:
        with app.database.read() as conn:
            rows = list(enqueued(conn, name, app.database.schema, app.database.seal))
    else:
        raise ConfigurationError(
            "assert_enqueued does not know where to look: take the fixture sqlq_app, or say app=… or "
            "session=…"
        )
    return [_job(task, *row) for row in rows]


def _job(found: Task[..., Any] | str, id: int, task: str, queue: str, payload: str, *rest: Any) -> Enqueued:
    args: list[Any] | None
    kwargs: dict[str, Any] | None
    try:
        args, kwargs = decode(payload)
    except (ArgumentsError, SealError):
        args = kwargs = None
    else:
        if not isinstance(found, str):
            with suppress(
                ArgumentsError
            ):  # enqueued by plain SQL, perhaps, for another version of the handler
                args, kwargs = found.from_json(args, kwargs)
    return Enqueued(id, task, queue, args, kwargs, *rest)


class _Wanted(NamedTuple):
    """The job that is looked for."""

    task: Task[..., Any] | str
    args: Sequence[Any] | None
    kwargs: Mapping[str, Any] | None
    queue: str | None

    def is_met_by(self, job: Enqueued) -> bool:
        if self.queue is not None and job.queue != self.queue:
            return False
        if self.args is None and self.kwargs is None:
            return True
        if job.args is None or job.kwargs is None:
            return False
        wanted = _bound(self.task, *_as_handled(self.task, self.args or (), self.kwargs or {}))
        try:
            return bool(wanted == _bound(self.task, job.args, job.kwargs))
        except ArgumentsError:  # enqueued by plain SQL, perhaps, for another version of the handler
            return False

    def __str__(self) -> str:
        name = self.task if isinstance(self.task, str) else self.task.name
        is_any = self.args is None and self.kwargs is None
        call = f"{name}(…)" if is_any else _call(name, self.args or (), self.kwargs or {})
        return call if self.queue is None else f"{call} in queue {self.queue}"


def _as_handled(
    task: Task[..., Any] | str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The arguments as they arrive when they are enqueued; as they stand where one could not be, as
    `mock.ANY`."""
    if isinstance(task, str) or isinstance(args, (str, bytes)):
        return args, kwargs
    try:
        return task.arguments(task.new(*args, **kwargs).payload)
    except ArgumentsError:
        return args, kwargs


def _bound(task: Task[..., Any] | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A call in one form, whichever way its arguments are passed; by the name of a task alone, as it
    stands."""
    if isinstance(args, (str, bytes)):
        raise ArgumentsError(f"args is {args!r}: give a list, as in args=[{args!r}]")
    if isinstance(task, str):
        return _listed([*args]), _listed({**kwargs})
    try:
        bound = inspect.signature(task.handler).bind(*args, **kwargs)
    except TypeError as error:
        raise ArgumentsError(f"{task.name}: {error}") from None
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


def _call(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    named = [f"{key}={_shown(value)}" for key, value in kwargs.items()]
    return f"{name}({', '.join([*map(_shown, args), *named])})"


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
