"""The outcomes of an attempt, and how they are written.

The ways out of `running` are: finished, tried again, released, failed for good.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from sqlq.model.history import AttemptTimes
from sqlq.model.job import FailureReason, NewJob
from sqlq.payload.encryption import Encryption


@dataclass(frozen=True, slots=True)
class ErrorText:
    """An exception as text that every database can store; see `retry.describe`."""

    exception: str
    message: str
    traceback: str | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The handler returned; `result` is JSON text, None for no result. `note` is the remark in the row
    about a result that could not be stored."""

    result: str | None = None
    note: str | None = None

    def protected_by(self, encryption: Encryption, task: str, queue: str) -> Finished:
        """Return this with its result signed or encrypted, if it has one."""
        if self.result is None:
            return self
        return Finished(encryption.protect("result", task, queue, self.result), self.note)


NO_RESULT = Finished()
"""The outcome of most jobs, made once: a frozen object takes longer than most calls."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The handler raised `sqlq.Cancel`: the job ends, is no failure, and is not retried."""

    reason: str | None = None


ON_REQUEST = "cancelled on request"
"""The reason of a job that somebody cancelled. One that came with the request takes its place."""


@dataclass(frozen=True, slots=True)
class Retried:
    """The attempt counted, another follows after `delay_ms`, in another queue or with another priority
    where one is given."""

    delay_ms: int
    error: ErrorText
    reason: FailureReason = "error"
    priority: int | None = None
    queue: str | None = None
    at: datetime | None = None
    """The time at which the next one is due, in place of `delay_ms`."""


@dataclass(frozen=True, slots=True)
class Released:
    """The attempt is released. The job is due again after `delay_ms`, or with None at once, in its old
    place in the queue. `snoozed`: the handler requested that."""

    delay_ms: int | None = None
    unknown_task: bool = False
    snoozed: bool = False
    in_time: bool = False
    """True if the job was started before its deadline, which no longer applies."""
    reason: str | None = None
    """Why no worker could run it here, where that is why."""
    at: datetime | None = None
    """The time at which it is due again, in place of `delay_ms`."""


@dataclass(frozen=True, slots=True)
class Failed:
    """No attempt follows; the job moves to failed_jobs."""

    reason: FailureReason
    error: ErrorText


@dataclass(frozen=True, slots=True)
class SelfCompleted:
    """The handler called `complete()`: only the database shows whether its transaction committed. If it did
    not, `otherwise` is how the attempt ended."""

    otherwise: Outcome


Outcome = Finished | Cancelled | Retried | Released | Failed | SelfCompleted
GOES_ON = (Retried, Released)
"""The outcomes after which the job is not over."""


class Settlement(NamedTuple):
    """How an attempt ended, with the right to write it."""

    id: int
    lease_token: int
    attempts: int
    outcome: Outcome
    follow_up: NewJob | None = None
    """The follow-up of the job that ends so, to be enqueued with it."""
    limit_key: str | None = None
    """The limit whose slot it frees, and in whose line it waits where it returns to the queue."""
    course: AttemptTimes | None = None
    """The times in its line of the job's history; None for a first attempt that finished, which has none."""

    @property
    def is_one(self) -> bool:
        """Whether it is written by several statements, which belong into one transaction."""
        waits = self.limit_key is not None and isinstance(self.outcome, GOES_ON)
        return waits or self.follow_up is not None
