"""sqlq: a job queue inside the SQL database you already have.

>>> import sqlq
>>> app = sqlq.App("sqlite:///shop.db")

Names are imported when they are first used: `sqlq --help` and the processes that only watch others need none
of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from sqlq import errors as errors
    from sqlq.app.app import App as App
    from sqlq.database.caller.session import own as own
    from sqlq.database.sqlite.dialect import configure_sqlite as configure_sqlite
    from sqlq.errors import (
        EnqueueError as EnqueueError,
    )
    from sqlq.errors import (
        JobCancelledError as JobCancelledError,
    )
    from sqlq.errors import (
        JobFailedError as JobFailedError,
    )
    from sqlq.errors import (
        JobNotFoundError as JobNotFoundError,
    )
    from sqlq.errors import (
        JobTimeoutError as JobTimeoutError,
    )
    from sqlq.errors import (
        LeaseLostError as LeaseLostError,
    )
    from sqlq.errors import (
        NoResultError as NoResultError,
    )
    from sqlq.errors import (
        SqlqError as SqlqError,
    )
    from sqlq.errors import (
        WaitTimeoutError as WaitTimeoutError,
    )
    from sqlq.events import JobEvent as JobEvent
    from sqlq.model.backoff import (
        exponential as exponential,
    )
    from sqlq.model.backoff import (
        fibonacci as fibonacci,
    )
    from sqlq.model.backoff import (
        fixed as fixed,
    )
    from sqlq.model.backoff import (
        linear as linear,
    )
    from sqlq.model.flow import (
        EnqueuedFlow as EnqueuedFlow,
    )
    from sqlq.model.flow import (
        Flow as Flow,
    )
    from sqlq.model.flow import (
        Step as Step,
    )
    from sqlq.model.flow import (
        chain as chain,
    )
    from sqlq.model.flow import (
        group as group,
    )
    from sqlq.model.flow_status import (
        FlowDetails as FlowDetails,
    )
    from sqlq.model.flow_status import (
        StepDetails as StepDetails,
    )
    from sqlq.model.history import AttemptRecord as AttemptRecord
    from sqlq.model.job import (
        Job as Job,
    )
    from sqlq.model.job import (
        JobDetails as JobDetails,
    )
    from sqlq.model.job import (
        NewJob as NewJob,
    )
    from sqlq.model.job import (
        Progress as Progress,
    )
    from sqlq.model.job import (
        State as State,
    )
    from sqlq.model.job_result import JobResult as JobResult
    from sqlq.model.limit import (
        Limit as Limit,
    )
    from sqlq.model.limit import (
        Serial as Serial,
    )
    from sqlq.model.retry import (
        Cancel as Cancel,
    )
    from sqlq.model.retry import (
        Retry as Retry,
    )
    from sqlq.model.retry import (
        Snooze as Snooze,
    )
    from sqlq.model.schedule import Schedule as Schedule
    from sqlq.model.task import Task as Task
    from sqlq.worker.attempt.context import (
        JobContext as JobContext,
    )
    from sqlq.worker.attempt.context import (
        current_job as current_job,
    )

__version__ = "0.1.0"

_EXPORTS: Final = {
    "App": "app.app",
    "AttemptRecord": "model.history",
    "Cancel": "model.retry",
    "EnqueueError": "errors",
    "EnqueuedFlow": "model.flow",
    "Flow": "model.flow",
    "FlowDetails": "model.flow_status",
    "Job": "model.job",
    "JobCancelledError": "errors",
    "JobContext": "worker.attempt.context",
    "JobDetails": "model.job",
    "JobEvent": "events",
    "JobFailedError": "errors",
    "JobNotFoundError": "errors",
    "JobResult": "model.job_result",
    "JobTimeoutError": "errors",
    "LeaseLostError": "errors",
    "Limit": "model.limit",
    "NewJob": "model.job",
    "NoResultError": "errors",
    "Progress": "model.job",
    "Retry": "model.retry",
    "Schedule": "model.schedule",
    "Serial": "model.limit",
    "Snooze": "model.retry",
    "SqlqError": "errors",
    "State": "model.job",
    "Step": "model.flow",
    "StepDetails": "model.flow_status",
    "Task": "model.task",
    "WaitTimeoutError": "errors",
    "chain": "model.flow",
    "configure_sqlite": "database.sqlite.dialect",
    "current_job": "worker.attempt.context",
    "exponential": "model.backoff",
    "fibonacci": "model.backoff",
    "fixed": "model.backoff",
    "group": "model.flow",
    "linear": "model.backoff",
    "own": "database.caller.session",
}
"""Each public name, and the module of sqlq that defines it."""

__all__ = sorted(_EXPORTS)  # noqa: PLE0605 - the names stand in one place

_MOVED: Final = {
    "Chain": "sqlq.model.flow.Chain",
    "Group": "sqlq.model.flow.Group",
    "Ended": "sqlq.JobResult",
    "FlowStatus": "sqlq.model.flow_status.FlowStatus",
    "HistoryLine": "sqlq.AttemptRecord",
    "RunningJob": "sqlq.JobContext",
    **{
        name: f"sqlq.errors.{name}"
        for name in (
            *("ArgumentsError", "ConfigurationError", "ExecutionError", "ScheduleNotFoundError"),
            *("SchemaVersionError", "SealError", "UnknownTaskError", "UnsupportedDatabaseError"),
            "WorkerLostError",
        )
    },
}
"""Names of before, and what stands for them now."""


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        globals()[name] = getattr(import_module(f"sqlq.{_EXPORTS[name]}"), name)
        return globals()[name]
    if name == "errors":
        return import_module("sqlq.errors")
    if name in _MOVED:
        raise AttributeError(f"sqlq.{name} is now {_MOVED[name]}", name=name)
    raise AttributeError(f"module 'sqlq' has no attribute {name!r}", name=name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS, "errors"})
