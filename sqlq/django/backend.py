"""SqlqBackend: sqlq as what runs the tasks of `django.tasks`, from Django 6 on.

A task of Django's becomes a task of sqlq's under its module path, as soon as it is defined. Its jobs are rows
like all others: `manage.py sqlq work` runs them, and the same commands and views show them.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from functools import cache
from typing import Any

from asgiref.sync import sync_to_async
from django.conf import settings
from django.core import checks
from django.db import close_old_connections
from django.utils import timezone

try:
    from django.tasks import TaskContext, TaskResult, TaskResultStatus
    from django.tasks.backends.base import BaseTaskBackend
    from django.tasks.base import TaskError
    from django.tasks.exceptions import InvalidTask, TaskResultDoesNotExist
    from django.tasks.signals import task_enqueued, task_finished, task_started
    from django.utils.json import normalize_json
except ImportError:
    import django

    raise ImportError(
        f"sqlq.django.SqlqBackend needs django.tasks, which came with Django 6.0, and this is Django "
        f"{django.__version__}: upgrade Django, or define tasks with @app.task of sqlq.django"
    ) from None

from sqlq.app.app import App
from sqlq.django.application import project_app
from sqlq.errors import ConfigurationError, EnqueueError, JobNotFoundError, SqlqError
from sqlq.events import JobEvent
from sqlq.model.job import JobDetails, State
from sqlq.model.task import Task, make_task
from sqlq.payload.signatures import signature_of
from sqlq.worker.attempt.context import current_job

_STATUS = {
    State.BLOCKED: TaskResultStatus.READY,
    State.SCHEDULED: TaskResultStatus.READY,
    State.AVAILABLE: TaskResultStatus.READY,
    State.RUNNING: TaskResultStatus.RUNNING,
    State.FINISHED: TaskResultStatus.SUCCESSFUL,
    State.FAILED: TaskResultStatus.FAILED,
    State.CANCELLED: TaskResultStatus.FAILED,
}
_OF_JOBS = ("backoff", "max_attempts", "timeout")
_OPTIONS = (*_OF_JOBS, "isolate")
"""The options of TASKS: those of a job, and those of its task alone."""


class UnsupportedResultError(TypeError):
    """A task has returned what is not JSON. Its work is done, and is not done again."""


class SqlqBackend(BaseTaskBackend):
    """A backend for TASKS: `TASKS = {"default": {"BACKEND": "sqlq.django.SqlqBackend"}}`.

    `enqueue` writes the job in Django's current transaction, so that it exists exactly if what is written
    there does. OPTIONS may have `max_attempts`, `backoff`, `timeout` and `isolate`, as `@app.task` takes
    them. A task that raises is tried again, up to `max_attempts` (5); meanwhile its status is READY.
    """

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def validate_task(self, task: Any) -> None:
        """Check a task of Django's, and let the workers know it. Raises `InvalidTask`."""
        super().validate_task(task)
        self.registered(task)

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        """Put a job of a task into the queue and return its result, which is READY.

        Raises `TypeError` for arguments that are not JSON or that the task does not take. Raises
        `InvalidTask` for a task that cannot be enqueued, before anything is written.
        """
        self.validate_task(task)
        args, kwargs = normalize_json(list(args)), normalize_json(dict(kwargs))
        registered = self.registered(task)
        if (reason := registered._interface.mismatch(args, kwargs)) is not None:
            raise TypeError(reason)
        run_after: datetime | None = task.run_after
        if run_after is not None and timezone.is_naive(run_after):
            run_after = timezone.make_aware(run_after)
        try:
            new = registered.new(*args, **kwargs).set(
                queue=task.queue_name,
                priority=int(task.priority),
                available_at=run_after,
                **{name: self.options[name] for name in _OF_JOBS if name in self.options},
            )
        except EnqueueError as error:
            raise InvalidTask(str(error)) from error
        app = project_app()
        # read back, for the database's clock sets the time of the enqueue
        result = self._result(app.jobs.get(app.enqueue(new).id))
        task_enqueued.send(type(self), task_result=result)
        return result

    def get_result(self, result_id: str) -> Any:
        """Return what has become of a job of one of Django's tasks, as the current transaction sees it.

        Only the last attempt has the id of its worker, and `started_at` is the end of the first attempt.
        Raises `TaskResultDoesNotExist`, also for a job that is no longer kept, and for a job of a task that
        is not one of Django's. Code on an event loop awaits `aget_result`.
        """
        try:
            return self._result(project_app().jobs.get(int(result_id)))
        except (ValueError, JobNotFoundError):
            raise TaskResultDoesNotExist(result_id) from None

    def check(self, **kwargs: Any) -> list[checks.CheckMessage]:
        """Return what is wrong with this backend's settings."""
        try:
            project_app()
            if unknown := sorted(set(self.options) - set(_OPTIONS)):
                raise ConfigurationError(f"OPTIONS may have {', '.join(_OPTIONS)}, not {', '.join(unknown)}")
            make_task(_storable, name="check", **self.options)
        except SqlqError as error:
            return [checks.Error(f"TASKS[{self.alias!r}] cannot be used: {error}", id="sqlq.E002")]
        return []

    # -- tasks of Django's as tasks of sqlq's ----------------------------------------------------------------

    def registered(self, task: Any) -> Task[..., Any]:
        """Return the task of sqlq's that stands for one of Django's, registered with the App."""
        app, name = project_app(), task.module_path
        known = app.tasks.get(name)
        if known is not None and _of_django(known):
            return known
        _listen(app)
        app.task(
            name=name,
            fail_on=UnsupportedResultError,
            queue=task.queue_name,
            priority=int(task.priority),
            **self.options,
        )(_handler(task))
        return app.tasks[name]

    def _result(self, details: JobDetails) -> Any:
        """Return the result of a job's row. Raises `TaskResultDoesNotExist`."""
        task = _of_django(project_app().tasks.get(details.task))
        if task is None:
            raise TaskResultDoesNotExist(details.id)
        ends = [_time(datetime.fromisoformat(record["at"])) for record in details.errors if "at" in record]
        last = _time(details.reserved_at) or (ends[-1] if ends else None)
        workers = ["unknown"] * details.attempts
        if workers and details.reserved_by is not None:
            workers[-1] = details.reserved_by
        result = TaskResult(
            task=_as_enqueued(task, details, self.alias),
            id=str(details.id),
            status=_STATUS[details.state],
            enqueued_at=_time(details.created_at),
            started_at=ends[0] if ends and details.attempts > 1 else last,
            finished_at=_time(details.ended_at),
            last_attempted_at=last,
            args=details.args or [],
            kwargs=details.kwargs or {},
            backend=self.alias,
            errors=_errors(details),
            worker_ids=workers,
        )
        object.__setattr__(result, "_return_value", details.result)
        return result


@cache
def _listen(app: App) -> None:
    app.on("finished", "failed", "cancelled")(publish_finished)


def _of_django(task: Task[..., Any] | None) -> Any:
    """Return the task of Django's that a task of sqlq's stands for, None where it stands for itself."""
    return task and getattr(task.handler, "django_task", None)


def _as_enqueued(task: Any, details: JobDetails, alias: str) -> Any:
    # a job in line for a limit has this time in `due_at`, not in `available_at`
    due_at = details.due_at or details.available_at or details.created_at
    is_deferred = details.attempts == 0 and due_at > details.created_at
    try:
        return replace(
            task,
            backend=alias,
            priority=details.priority,
            queue_name=details.queue,
            run_after=_time(due_at) if is_deferred else None,
        )
    except InvalidTask:  # the settings have other queues by now
        return task


def _time(time: datetime | None) -> datetime | None:
    """Return a time as Django has it: aware, or with USE_TZ = False in the project's time zone."""
    return time if time is None or settings.USE_TZ else timezone.make_naive(time)


def _errors(details: JobDetails) -> list[Any]:
    """Return the errors of all attempts, the oldest first; of the last one with its traceback."""
    errors = [_error(record.get("exception"), record.get("message")) for record in details.errors]
    if details.state is State.FAILED:
        errors.append(_error(details.exception, details.message, details.traceback))
    elif details.state is State.CANCELLED:
        errors.append(_error("sqlq.model.retry.Cancel", details.reason))
    return errors


def _error(exception: str | None, message: str | None, traceback: str | None = None) -> Any:
    path = exception or "sqlq.errors.SqlqError"
    if path == "sqlq.django.backend.UnsupportedResultError":  # other backends let Django's own error through
        path = "TypeError"
    return TaskError(
        exception_class_path=path if "." in path else f"builtins.{path}",
        traceback=traceback or f"{path}: {message or ''}\n",
    )


# -- in a worker ---------------------------------------------------------------------------------------------


def _handler(task: Any) -> Any:
    """Return the handler that runs a task of Django's in a worker, and sends the signal that it has
    started."""
    function = task.func

    def begin(args: Sequence[Any]) -> Sequence[Any]:
        backend = task.get_backend()
        result = backend.get_result(current_job().id)
        task_started.send_robust(type(backend), task_result=result)
        return (TaskContext(task_result=result), *args) if task.takes_context else args

    def handler(*args: Any, **kwargs: Any) -> Any:
        return _storable(function(*begin(args), **kwargs))

    async def ahandler(*args: Any, **kwargs: Any) -> Any:
        return _storable(await function(*await sync_to_async(begin)(args), **kwargs))

    wrapper: Any = ahandler if inspect.iscoroutinefunction(function) else handler
    for name in ("__module__", "__qualname__", "__name__"):
        setattr(wrapper, name, getattr(function, name))
    # without annotations: tasks of Django's get their arguments as JSON has them, whatever the backend
    parameters = list(signature_of(function).parameters.values())[int(task.takes_context) :]
    wrapper.__signature__ = inspect.Signature([each.replace(annotation=each.empty) for each in parameters])
    wrapper.django_task = task
    wrapper.stands_for = function  # whose annotations a command line checks
    return wrapper


def _storable(value: Any) -> Any:
    try:
        return normalize_json(value)
    except (TypeError, ValueError) as error:
        raise UnsupportedResultError(str(error)) from error


def publish_finished(events: list[JobEvent]) -> None:
    """Send `task_finished` for jobs of Django's tasks that have ended, once that is committed."""
    close_old_connections()
    try:
        for event in events:
            if (task := _of_django(project_app().tasks.get(event.task))) is not None:
                _publish_finished(task.get_backend(), event)
    finally:
        close_old_connections()


def _publish_finished(backend: Any, event: JobEvent) -> None:
    try:
        result = backend.get_result(event.id)
    except TaskResultDoesNotExist:  # an operator has deleted it at once: all are kept for some seconds
        return
    try:
        if event.exception is not None:
            raise event.exception
    except BaseException:  # receivers find it in sys.exc_info(), as Django's own for the log does
        task_finished.send_robust(type(backend), task_result=result)
    else:
        task_finished.send_robust(type(backend), task_result=result)
