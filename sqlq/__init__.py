"""sqlq: a job queue inside the SQL database you already have.

>>> import sqlq
>>> app = sqlq.App("sqlite:///shop.db")

Names are imported when they are first used: `sqlq --help` and the processes that only watch others need none
of them.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sqlq import errors as errors
    from sqlq.app.app import App as App
    from sqlq.database.sqlite.driver import configure_sqlite as configure_sqlite
    from sqlq.errors import (
        EnqueueError as EnqueueError,
        JobCancelledError as JobCancelledError,
        JobFailedError as JobFailedError,
        JobNotFoundError as JobNotFoundError,
        JobTimeoutError as JobTimeoutError,
        LeaseLostError as LeaseLostError,
        NoResultError as NoResultError,
        SqlqError as SqlqError,
        WaitTimeoutError as WaitTimeoutError,
    )
    from sqlq.events import JobEvent as JobEvent
    from sqlq.model.backoff import (
        exponential as exponential,
        fibonacci as fibonacci,
        fixed as fixed,
        linear as linear,
    )
    from sqlq.model.flow import Flow as Flow, FlowDetails as FlowDetails, StepDetails as StepDetails
    from sqlq.model.flow_parts import (
        EnqueuedFlow as EnqueuedFlow,
        Step as Step,
        chain as chain,
        group as group,
    )
    from sqlq.model.history import AttemptRecord as AttemptRecord
    from sqlq.model.job import (
        Job as Job,
        JobDetails as JobDetails,
        NewJob as NewJob,
        Progress as Progress,
        State as State,
    )
    from sqlq.model.job_options import JobOutcome as JobOutcome
    from sqlq.model.limit import Limit as Limit, Serial as Serial
    from sqlq.model.retry import (
        Cancel as Cancel,
        Retry as Retry,
        SlowDown as SlowDown,
        Snooze as Snooze,
        WaitFor as WaitFor,
    )
    from sqlq.model.schedule import Schedule as Schedule
    from sqlq.model.task import Task as Task
    from sqlq.worker.attempt.context import JobContext as JobContext, current_job as current_job

__version__ = "0.1.0"

_MODULES = {
    "app.app": "App",
    "database.sqlite.driver": "configure_sqlite",
    "errors": (
        "EnqueueError JobCancelledError JobFailedError JobNotFoundError "
        "JobTimeoutError LeaseLostError NoResultError SqlqError WaitTimeoutError"
    ),
    "events": "JobEvent",
    "model.backoff": "exponential fibonacci fixed linear",
    "model.flow": "Flow FlowDetails StepDetails",
    "model.flow_parts": "EnqueuedFlow Step chain group",
    "model.history": "AttemptRecord",
    "model.job": "Job JobDetails NewJob Progress State",
    "model.job_options": "JobOutcome",
    "model.limit": "Limit Serial",
    "model.retry": "Cancel Retry SlowDown Snooze WaitFor",
    "model.schedule": "Schedule",
    "model.task": "Task",
    "worker.attempt.context": "JobContext current_job",
}
"""The public names, by the module of sqlq that defines them."""
_EXPORTS = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = sorted(_EXPORTS)  # noqa: PLE0605 - the names stand in one place

_OF_AN_APP = {
    "enqueue": "app.enqueue(task.new(…))",
    "shared_task": "@app.task",
    "task": "@app.task",
}
"""Functions of other queues, and the methods of an App that stand for them."""


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        globals()[name] = getattr(import_module(f"sqlq.{_EXPORTS[name]}"), name)
        return globals()[name]
    if name == "errors":
        return import_module("sqlq.errors")
    if name in _OF_AN_APP:
        message = (
            f"there is no sqlq.{name}: make an App, as in app = sqlq.App(), and write {_OF_AN_APP[name]}"
        )
        # an import drops the text of an AttributeError
        is_import = sys._getframe(1).f_code.co_name == "_handle_fromlist"  # noqa: SLF001 - CPython's own way
        raise ImportError(message, name="sqlq") if is_import else AttributeError(message, name=name)
    raise AttributeError(f"module 'sqlq' has no attribute {name!r}", name=name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS, "errors"})
