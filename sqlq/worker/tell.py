"""What becomes of jobs in a worker, as events: for the log first, at once, and then for those who listen to
the App."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from sqlq.errors import JobTimeoutError, WorkerLostError
from sqlq.events import Events, JobEvent
from sqlq.job import NOT_IN_TIME
from sqlq.outcome import Cancelled, Completed, ErrorText, Failed, Outcome, Released, Retried, SelfCompleted
from sqlq.retry import remote_error
from sqlq.store.endings import Rescued
from sqlq.store.expiry import Expired
from sqlq.worker import log
from sqlq.worker.meter import Meter
from sqlq.worker.running import RunningJob

NAMES: Final[dict[type[Any], str]] = {
    Completed: "finished",
    Cancelled: "cancelled",
    Retried: "retried",
    Failed: "failed",
    Released: "released",
    SelfCompleted: "finished",  # never settled as such
}


class Teller:
    """Tells of events, where anything wants to know of them."""

    def __init__(self, events: Events | None = None, meter: Meter | None = None) -> None:
        self._events = events or Events()
        self._meter = meter
        self._lines: log.LinesOfJobs | None = None
        self._looked = False
        """Whether it is known, for this batch, whether lines of finished jobs need no records."""

    def wants(self, name: str) -> bool:
        """Say whether the log, or a listener, wants to know of events of this name."""
        return log.wants(name) or self._events.wants(name)

    def tell(self, event: JobEvent) -> None:
        """Tell the log, and then the listeners."""
        if log.wants(event.name):
            log.hear(event)
        self._events.tell(event)

    def tells_of_starts(self) -> bool:
        """Say whether a listener wants to know of each start."""
        return self._events.wants("started")

    def started(self, job: RunningJob) -> None:
        """Tell that the handler of a job is about to run."""
        self._events.tell(_event("started", job))

    def lost(self, job: RunningJob, why: str) -> None:
        """Tell listeners once that a job has another owner by now, so that this attempt counts for
        nothing."""
        if not job.told_lost:
            job.told_lost = True
            if self._meter is not None:
                self._meter.ended("lost", job, None, job.seconds())
            if self._events.wants("lost"):
                self._events.tell(_event("lost", job, seconds=job.seconds(), reason=why))

    def ended(self, job: RunningJob, outcome: Outcome, seconds: float) -> None:
        """Tell how an attempt ended, now that it is written."""
        name = NAMES[type(outcome)]
        if isinstance(outcome, Released) and outcome.snoozed:
            name = "snoozed"
        if self._meter is not None:
            self._meter.ended(name, job, outcome, seconds)
        if not self.wants(name):  # guard: events-are-free
            return
        logged = name == "finished" and self._logs_finished(job, seconds)
        if logged and not self._events.wants(name):
            return
        error: ErrorText | None = getattr(outcome, "error", None)
        delay_ms: int | None = getattr(outcome, "delay_ms", None)
        (self._events.tell if logged else self.tell)(
            _event(
                name,
                job,
                seconds=seconds,
                delay_seconds=None if delay_ms is None else delay_ms / 1000,
                reason=getattr(outcome, "reason", None),
                error=error,
                exception=None if error is None else job.error or remote_error(error),
            )
        )

    def told(self) -> None:
        """Let the lines of a batch go: `ended` was told of all of it."""
        if self._lines is not None:
            self._lines.told()
        self._lines, self._looked = None, False
        if self._meter is not None:
            self._meter.flush()

    def _logs_finished(self, job: RunningJob, seconds: float) -> bool:
        """Write the line of a finished job without a record; return False where it needs one, or is none."""
        if not log.wants("finished") or job.claimed.label is not None:
            return False
        if job.trace_id is not None:  # guard: traced-jobs-need-records
            return False
        if not self._looked:
            self._lines, self._looked = log.alone(), True
        if self._lines is None:
            return False
        self._lines.finished(job.claimed, seconds)
        return True

    def rescued(self, jobs: Iterable[Rescued], why: str) -> list[JobEvent]:
        """Tell of jobs that were taken from their worker what it did, and what comes then; return the
        events."""
        events = [rescued_event(job, why) for job in jobs]
        for event in events:
            self.tell(event)
            if self._meter is not None:
                self._meter.event(event)
        return events

    def expired(self, jobs: Iterable[Expired]) -> list[JobEvent]:
        """Tell of jobs that were cancelled because they were not started in time; return the events."""
        events = [
            JobEvent(
                name="cancelled",
                id=job.id,
                task=job.task,
                queue=job.queue,
                attempt=0,
                reason=NOT_IN_TIME,
                label=None if job.label is None else str(job.label),
            )
            for job in jobs
        ]
        for event in events:
            self.tell(event)
        return events


def rescued_event(job: Rescued, why: str) -> JobEvent:
    """Return the event of a job that was taken from its worker: rescued, or failed where its attempts are
    spent."""
    kind = JobTimeoutError if job.reason == "timeout" else WorkerLostError
    error = kind(f"worker {job.owner} {why}")
    return JobEvent(
        name="failed" if job.failed else "rescued",
        id=job.id,
        task=job.task,
        queue=job.queue,
        attempt=job.attempts,
        reason=job.reason if job.failed else why,
        error=ErrorText(f"{kind.__module__}.{kind.__name__}", str(error)) if job.failed else None,
        exception=error if job.failed else None,
        worker=job.owner,
    )


def _event(name: str, job: RunningJob, **more: Any) -> JobEvent:
    return JobEvent(
        name=name,
        id=job.id,
        task=job.task,
        queue=job.queue,
        attempt=job.attempts,
        max_attempts=job.max_attempts,
        label=job.label,
        trace_id=job.trace_id,
        span_id=job.span_id,
        **more,
    )
