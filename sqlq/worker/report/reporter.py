"""Reports the events of jobs to the log, one line an event, and then to listeners.

Most lines are of finished jobs. Where only a handler of sqlq writes them, it gets them without log records,
which would cost more than the jobs."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Final

from sqlq.config.durations import readable
from sqlq.errors import JobTimeoutError, WorkerLostError
from sqlq.events import Events, JobEvent
from sqlq.model.checks import NOT_IN_TIME
from sqlq.model.job import ClaimedJob
from sqlq.model.outcome import (
    Cancelled,
    Completed,
    ErrorText,
    Failed,
    Outcome,
    Released,
    Retried,
    SelfCompleted,
)
from sqlq.model.retry import remote_error
from sqlq.model.traceback_lines import users_line
from sqlq.store.jobs.expire import Expired
from sqlq.store.jobs.settle import Rescued
from sqlq.worker.attempt.attempt import Attempt
from sqlq.worker.report.meter import Meter

NEVER_BEGAN: Final = ("bad_payload", "bad_signature", "unknown_task")
log = logging.getLogger("sqlq.worker")
_above, _root = logging.getLogger("sqlq"), logging.getLogger()
_LOGGING = logging.LogRecord.__init__.__code__.co_filename

LEVELS: Final = {
    "finished": logging.INFO,
    "cancelled": logging.INFO,
    "snoozed": logging.INFO,
    "released": logging.INFO,
    "retried": logging.WARNING,
    "rescued": logging.WARNING,
    "failed": logging.ERROR,
}
"""The events that are lines of the log."""


class LinesOfJobs(logging.Handler):
    """A handler of the root logger that takes finished jobs without records."""

    its_filters: tuple[logging.Filter, ...] = ()
    """The filters that it was made with, which pass all such lines."""

    def finished(self, job: ClaimedJob, seconds: float) -> None:
        """Write the line that the record of a finished job would give, with the next `told`."""
        raise NotImplementedError

    def told(self) -> None:
        """Write the lines out: there are no more for now."""
        raise NotImplementedError


def wants(name: str) -> bool:
    """Return whether an event of this name would be a line."""
    level = LEVELS.get(name)
    return level is not None and log.isEnabledFor(level)


def alone() -> LinesOfJobs | None:
    """Return the handler to which alone a record of a finished job would come, if no code sees it before.

    A host may have added handlers and filters of its own. Error reporters also replace functions of
    `logging`.
    """
    handlers = _root.handlers
    if len(handlers) != 1 or not isinstance(handler := handlers[0], LinesOfJobs):
        return None
    return None if _is_seen_by_others(handler) else handler  # guard: others-see-records


def _is_seen_by_others(handler: LinesOfJobs) -> bool:
    return (
        bool(log.handlers or log.filters or _above.handlers)
        or not (log.propagate and _above.propagate)
        or handler.level > logging.INFO
        or tuple(handler.filters) != handler.its_filters
        or logging.getLogRecordFactory() is not logging.LogRecord
        or any(_file_of(part) != _LOGGING for part in _parts_of_logging())
    )


def _parts_of_logging() -> tuple[object, ...]:
    """Return the functions that a record passes on its way to the handler."""
    kind = type(log)
    # the private one, too: who watches logging may have replaced it
    return (kind.log, kind._log, kind.makeRecord, kind.handle, kind.callHandlers, LinesOfJobs.handle)  # noqa: SLF001


def _file_of(function: object) -> str | None:
    return getattr(getattr(function, "__code__", None), "co_filename", None)


def hear(event: JobEvent) -> None:
    """Write the line of an event. A job that has failed for good is an error, with the handler's exception
    for error reporters."""
    fields: dict[str, object] = {
        "job_id": event.id,
        "task": event.task,
        "queue": event.queue,
        "attempt": event.attempt,
        "event": event.name,
    }
    if event.label is not None:
        fields["label"] = event.label
    if event.trace_id is not None:
        fields |= {"trace_id": event.trace_id, "span_id": event.span_id}
    if event.seconds is not None:
        fields["duration_ms"] = milliseconds(event.seconds)
    shown = event.name == "failed" or (event.name == "retried" and log.isEnabledFor(logging.DEBUG))
    # an attempt that never began has sqlq's traceback; guard: what-never-began-has-one-line
    raised = event.exception if shown and event.reason not in NEVER_BEGAN else None
    try:
        log.log(LEVELS[event.name], "%s", _said(event), extra=fields, exc_info=raised)
    except Exception as error:  # guard: a-log-handler-may-raise
        # a log handler of the host that could not show the exception can show its name
        log.log(
            LEVELS[event.name],
            *("%s; a log handler raised %s at its traceback", _said(event), type(error).__name__),
            extra=fields,
        )


def milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 1)


def subject(task: str, queue: str) -> str:
    """Return the part of a job's line from after the id up to the number of the attempt."""
    return f"{task} (queue {queue}, attempt "


def _said(event: JobEvent) -> str:
    most = "" if event.max_attempts is None else f" of {event.max_attempts}"
    about = f"job {event.id} {subject(event.task, event.queue)}{event.attempt}{most})"
    if event.label is not None:
        about += f" “{_first_line(event.label)}”"
    took = readable((event.seconds or 0.0) * 1000)
    wait = readable((event.delay_seconds or 0.0) * 1000)
    error = event.error
    match event.name:
        case "finished":
            return f"{about} finished in {took}"
        case "cancelled":
            why = f": {_first_line(event.reason)}" if event.reason else ""
            return f"{about} cancelled after {took}{why}" if event.attempt else f"{about} cancelled{why}"
        case "failed" if event.worker is not None and error is not None:
            return f"{about}: {error.message}; failed, its attempts are spent"
        case "rescued":
            return f"{about}: worker {event.worker} {event.reason}; it runs again"
        case "failed" | "retried" if error is not None:
            line = None if event.reason in NEVER_BEGAN else users_line(error.traceback)
            at = "" if line is None else f", at {line.file}:{line.number}"
            why = f"({event.reason}: {error.exception}: {_first_line(error.message)}{at})"
            if event.name == "failed":
                return f"{about} failed for good after {took} {why}"
            return f"{about} failed after {took} {why}, next attempt in {wait}"
        case _:
            word = "snoozed" if event.name == "snoozed" else "given back"
            return f"{about} {word} after {took}{f', due again in {wait}' if event.delay_seconds else ''}"


def _first_line(text: str) -> str:
    return text.strip().split("\n", 1)[0][:300]


NAMES: Final[dict[type[Any], str]] = {
    Completed: "finished",
    Cancelled: "cancelled",
    Retried: "retried",
    Failed: "failed",
    Released: "released",
    SelfCompleted: "finished",  # never settled as such
}


class Reporter:
    """Reports events to the log, the listeners and the meter."""

    def __init__(self, events: Events | None = None, meter: Meter | None = None) -> None:
        self._events = events or Events()
        self._meter = meter
        self._lines: LinesOfJobs | None = None
        self._looked = False
        """Whether it is known, for this batch, whether lines of finished jobs need no records."""

    def tell(self, event: JobEvent) -> None:
        """Report an event to the log, and then to the listeners."""
        if wants(event.name):
            hear(event)
        self._events.tell(event)

    def started(self, job: Attempt) -> None:
        """Report to listeners that the handler of a job is about to run."""
        self._events.tell(_event("started", job))

    def lost(self, job: Attempt, why: str) -> None:
        """Report to listeners once that a job has another owner by now, so that this attempt counts for
        nothing."""
        if not job.told_lost:
            job.told_lost = True
            if self._meter is not None:
                self._meter.ended("lost", job, None, job.seconds())
            if self._events.wants("lost"):
                self._events.tell(_event("lost", job, seconds=job.seconds(), reason=why))

    def ended(self, job: Attempt, outcome: Outcome, seconds: float) -> None:
        """Report how an attempt ended, once that is written."""
        name = NAMES[type(outcome)]
        if isinstance(outcome, Released) and outcome.snoozed:
            name = "snoozed"
        if self._meter is not None:
            self._meter.ended(name, job, outcome, seconds)
        is_line, is_heard = wants(name), self._events.wants(name)
        if not (is_line or is_heard):  # guard: events-are-free
            return
        logged = is_line and name == "finished" and self._logs_finished(job, seconds)
        if logged and not is_heard:
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
        """Write out the lines of a batch: `ended` was called for each of its attempts."""
        if self._lines is not None:
            self._lines.told()
        self._lines, self._looked = None, False
        if self._meter is not None:
            self._meter.flush()

    def _logs_finished(self, job: Attempt, seconds: float) -> bool:
        """Write the line of a finished job without a record; return False where it needs one."""
        if job.claimed.label is not None:
            return False
        if job.trace_id is not None:  # guard: traced-jobs-need-records
            return False
        if not self._looked:
            self._lines, self._looked = alone(), True
        if self._lines is None:
            return False
        self._lines.finished(job.claimed, seconds)
        return True

    def rescued(self, jobs: Iterable[Rescued], why: str) -> list[JobEvent]:
        """Report jobs that were taken from their worker, with the reason and their next state. Return the
        events."""
        events = [rescued_event(job, why) for job in jobs]
        for event in events:
            self.tell(event)
            if self._meter is not None:
                self._meter.event(event)
        return events

    def expired(self, jobs: Iterable[Expired]) -> list[JobEvent]:
        """Report jobs that were cancelled because they were not started in time. Return the events."""
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


def _event(name: str, job: Attempt, **more: Any) -> JobEvent:
    return JobEvent(
        name=name,
        id=job.id,
        task=job.task,
        queue=job.queue,
        attempt=job.claimed.attempts,
        max_attempts=job.claimed.max_attempts,
        label=job.label,
        trace_id=job.trace_id,
        span_id=job.span_id,
        **more,
    )
