"""sqlq: a job queue inside the SQL database you already have.

>>> import sqlq
>>> app = sqlq.App("sqlite:///shop.db")

Names are imported when they are first used: `sqlq --help` and the processes that only watch others need none
of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sqlq.app.app import App
    from sqlq.database.caller.session import own
    from sqlq.database.sqlite.dialect import configure_sqlite
    from sqlq.errors import (
        ArgumentsError,
        ConfigurationError,
        EnqueueError,
        ExecutionError,
        JobCancelledError,
        JobFailedError,
        JobNotFoundError,
        JobTimeoutError,
        LeaseLostError,
        NoResultError,
        ScheduleNotFoundError,
        SchemaVersionError,
        SealError,
        SqlqError,
        UnknownTaskError,
        UnsupportedDatabaseError,
        WaitTimeoutError,
        WorkerLostError,
    )
    from sqlq.events import JobEvent
    from sqlq.model.backoff import exponential, fibonacci, fixed, linear
    from sqlq.model.flow import Chain, EnqueuedFlow, Flow, Group, Step, chain, group
    from sqlq.model.flow_status import FlowDetails, FlowStatus, StepDetails
    from sqlq.model.history import HistoryLine
    from sqlq.model.job import Job, JobDetails, NewJob, Progress, State
    from sqlq.model.job_result import Ended
    from sqlq.model.limit import Limit, Serial
    from sqlq.model.retry import Cancel, Retry, Snooze
    from sqlq.model.schedule import Schedule
    from sqlq.model.task import Task
    from sqlq.worker.attempt.context import JobContext, current_job

__version__ = "0.1.0"

__all__ = [
    "App",
    "ArgumentsError",
    "Cancel",
    "Chain",
    "ConfigurationError",
    "Ended",
    "EnqueueError",
    "EnqueuedFlow",
    "ExecutionError",
    "Flow",
    "FlowDetails",
    "FlowStatus",
    "Group",
    "HistoryLine",
    "Job",
    "JobCancelledError",
    "JobContext",
    "JobDetails",
    "JobEvent",
    "JobFailedError",
    "JobNotFoundError",
    "JobTimeoutError",
    "LeaseLostError",
    "Limit",
    "NewJob",
    "NoResultError",
    "Progress",
    "Retry",
    "Schedule",
    "ScheduleNotFoundError",
    "SchemaVersionError",
    "SealError",
    "Serial",
    "Snooze",
    "SqlqError",
    "State",
    "Step",
    "StepDetails",
    "Task",
    "UnknownTaskError",
    "UnsupportedDatabaseError",
    "WaitTimeoutError",
    "WorkerLostError",
    "chain",
    "configure_sqlite",
    "current_job",
    "exponential",
    "fibonacci",
    "fixed",
    "group",
    "linear",
    "own",
]

_ROOMS = (
    *("app.app", "events", "errors", "worker.attempt.context"),
    *(f"model.{part}" for part in ("job", "task", "retry", "backoff", "schedule", "flow", "limit")),
    *("model.flow_status", "model.history", "model.job_result"),
    *("database.sqlite.dialect", "database.caller.session"),
)


_RENAMED = {"RunningJob": "JobContext"}


def __getattr__(name: str) -> Any:
    if name in __all__:
        for room in _ROOMS:
            module = import_module(f"sqlq.{room}")
            if getattr(getattr(module, name, None), "__module__", None) == module.__name__:
                globals()[name] = getattr(module, name)
                return globals()[name]
    if name in _RENAMED:
        raise AttributeError(f"sqlq.{name} is now sqlq.{_RENAMED[name]}")
    raise AttributeError(f"module 'sqlq' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
