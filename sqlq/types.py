"""The types of answers, for annotations: `def show(queues: list[QueueStatus])`.

The methods of an App's parts return them, as `app.queues.list()` does. Nobody needs to make one.
"""

from sqlq.admin.batches import Cancellation
from sqlq.admin.failures import Failures
from sqlq.admin.jobs import JobList, Pruned, RetriedJobs
from sqlq.admin.queues import QueueStatuses
from sqlq.admin.schedules import LastJob, ScheduleDetails
from sqlq.admin.workers import WorkerRequest, WorkerStatus
from sqlq.model.flow import FlowStatus
from sqlq.model.limit import LimitStatus
from sqlq.results.results import AsCompleted, Waited
from sqlq.store.audit import Action
from sqlq.store.health import Pace, QueueStatus
from sqlq.store.jobs.operate import JobChange
from sqlq.store.workers.workers import Pause, Pauses

__all__ = [
    "Action",
    "AsCompleted",
    "Cancellation",
    "Failures",
    "FlowStatus",
    "JobChange",
    "JobList",
    "LastJob",
    "LimitStatus",
    "Pace",
    "Pause",
    "Pauses",
    "Pruned",
    "QueueStatus",
    "QueueStatuses",
    "RetriedJobs",
    "ScheduleDetails",
    "Waited",
    "WorkerRequest",
    "WorkerStatus",
]
