"""sqlq: a job queue inside the SQL database you already have.

>>> import sqlq
>>> app = sqlq.App("sqlite:///shop.db")

Names are imported when they are first used: `sqlq --help` and the processes that only watch others need none
of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sqlq.app import App
    from sqlq.backoff import exponential, fibonacci, fixed, linear
    from sqlq.ended import Ended
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
    from sqlq.flow import Chain, EnqueuedFlow, Flow, Group, Step, chain, group
    from sqlq.flowstatus import FlowDetails, FlowStatus, StepDetails
    from sqlq.history import HistoryLine
    from sqlq.job import Job, JobDetails, NewJob, Progress, State
    from sqlq.limit import Limit, Serial
    from sqlq.retry import Cancel, Retry, Snooze
    from sqlq.schedule import Schedule
    from sqlq.session import own
    from sqlq.store.sqlite import configure_sqlite
    from sqlq.task import Task
    from sqlq.worker.running import RunningJob, current_job

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
    "RunningJob",
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
    *("app", "job", "events", "retry", "backoff", "errors", "task", "schedule", "flow", "limit"),
    *("flowstatus", "history", "ended"),
    *("store.sqlite", "session", "worker.running"),
)


def __getattr__(name: str) -> Any:
    if name in __all__:
        for room in _ROOMS:
            module = import_module(f"sqlq.{room}")
            if getattr(getattr(module, name, None), "__module__", None) == module.__name__:
                globals()[name] = getattr(module, name)
                return globals()[name]
    raise AttributeError(f"module 'sqlq' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
