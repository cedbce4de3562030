"""Reports the events of jobs to the log, one line an event, and then to listeners."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from sqlq.config.durations import readable
from sqlq.errors import JobTimeoutError, WorkerLostError
from sqlq.events import Events, JobEvent
from sqlq.model.outcome import (
    Cancelled,
    ErrorText,
    Failed,
    Finished,
    Outcome,
    Released,
    Retried,
    SelfCompleted,
    users_line,
)
from sqlq.model.retry import describe, remote_error
from sqlq.store.jobs.settle import Rescued
from sqlq.worker.attempt.attempt import Attempt
from sqlq.worker.report.meter import Meter

FIELDS = ("task", "queue", "attempt", "label", "trace_id", "span_id")
"""The attributes of an event that are fields of its line by the same names."""
NEVER_BEGAN = ("bad_payload", "bad_signature", "unknown_task")
log = logging.getLogger("sqlq.worker")

LEVELS = {
    "finished": logging.INFO,
    "cancelled": logging.INFO,
    "snoozed": logging.INFO,
    "released": logging.INFO,
    "retried": logging.WARNING,
    "rescued": logging.WARNING,
    "failed": logging.ERROR,
}
"""The events that are lines of the log."""


def wants(name: str) -> bool:
    """Return whether an event of this name would be a line."""
    level = LEVELS.get(name)
    return level is not None and log.isEnabledFor(level)


def lines_of_finished() -> Callable[[Sequence[Attempt]], None] | None:
    """Return the function of sqlq's own handler that writes the lines of finished jobs without records, which
    would cost more than the jobs. Return None where others would see these records: a handler, a filter, or
    an error reporter that has replaced functions of `logging`."""
    root, above, kind = logging.getLogger(), logging.getLogger("sqlq"), logging.Logger
    # the private one, too: who watches logging may have replaced it
    functions = (kind.log, kind._log, kind.makeRecord, kind.handle, kind.callHandlers)  # noqa: SLF001
    others = (
        *(*log.handlers, *log.filters, *above.handlers, *root.handlers[1:]),
        *(each for handler in root.handlers for each in (*handler.filters[1:], handler.level) if each),
        *(function for function in functions if function.__code__.co_filename != logging.__file__),
    )
    is_plain = log.propagate and above.propagate and logging.getLogRecordFactory() is logging.LogRecord
    if others or not is_plain or not root.handlers:  # guard: others-see-records
        return None
    return getattr(root.handlers[0], "finished", None)


def write_line(event: JobEvent) -> None:
    """Write the line of an event. A job that has failed for good is an error, with the handler's exception
    for error reporters."""
    fields = {"job_id": event.id, "event": event.name}
    fields |= {name: field for name in FIELDS if (field := getattr(event, name)) is not None}
    if event.seconds is not None:
        fields["duration_ms"] = round(event.seconds * 1000, 1)
    shown = event.name == "failed" or (event.name == "retried" and log.isEnabledFor(logging.DEBUG))
    # an attempt that never began has sqlq's traceback; guard: what-never-began-has-one-line
    raised = event.exception if shown and event.reason not in NEVER_BEGAN else None
    log.log(LEVELS[event.name], "%s", _message(event), extra=fields, exc_info=raised)


def _bear_handlers(logger: logging.Logger) -> None:
    """Let no handler or filter of the host that raises end a thread of sqlq. One that could not show an
    exception can show its name."""
    handle = logger.handle

    def bear(record: logging.LogRecord) -> None:
        try:
            handle(record)
        except Exception as error:  # guard: a-log-handler-may-raise
            record.msg = f"{record.getMessage()}; a log handler raised {type(error).__name__}"
            record.args = record.exc_info = record.exc_text = None
            with suppress(Exception):
                handle(record)

    logger.handle = bear  # type: ignore[method-assign]


_bear_handlers(log)
_bear_handlers(logging.getLogger("sqlq"))


def _message(event: JobEvent) -> str:
    maximum = "" if event.max_attempts is None else f" of {event.max_attempts}"
    about = f"job {event.id} {event.task} (queue {event.queue}, attempt {event.attempt}{maximum})"
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


NAMES: dict[type[Any], str] = {
    Finished: "finished",
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
        self._finished: list[Attempt] = []
        """The attempts of a batch whose lines `flush` writes."""

    def publish(self, event: JobEvent) -> None:
        """Report an event to the log, and then to the listeners."""
        if wants(event.name):
            write_line(event)
        self._events.publish(event)

    def started(self, job: Attempt) -> None:
        """Report to listeners that the handler of a job is about to run."""
        if "started" in self._events.subscribed:
            self._events.publish(_event("started", job))

    def lost(self, job: Attempt, why: str) -> None:
        """Report once that a job has another owner by now, so that this attempt counts for nothing."""
        if not job.lost_reported:
            job.lost_reported = True
            job.log_error("lost", "lease lost, %s; the outcome of this attempt does not count", why)
            if self._meter is not None:
                self._meter.ended("lost", job, None)
            self._events.publish(_event("lost", job, seconds=job.seconds(), reason=why))

    def ended(self, job: Attempt, outcome: Outcome) -> None:
        """Report how an attempt ended, once that is written."""
        name = NAMES[type(outcome)]
        if isinstance(outcome, Released) and outcome.snoozed:
            name = "snoozed"
        if self._meter is not None:
            self._meter.ended(name, job, outcome)
        # `put_off` has logged it; guard: what-is-put-back-has-one-line
        is_line = wants(name) and not (isinstance(outcome, Released) and outcome.unknown_task)
        # guard: traced-jobs-need-records
        if is_line and name == "finished" and job.trace_id is None and job.claimed.label is None:
            self._finished.append(job)
            is_line = False
        if not (is_line or name in self._events.subscribed):  # guard: events-are-free
            return
        error: ErrorText | None = getattr(outcome, "error", None)
        delay_ms: int | None = getattr(outcome, "delay_ms", None)
        (self.publish if is_line else self._events.publish)(
            _event(
                name,
                job,
                seconds=job.seconds(),
                delay_seconds=None if delay_ms is None else delay_ms / 1000,
                reason=getattr(outcome, "reason", None),
                error=error,
                exception=None if error is None else job.error or remote_error(error),
            )
        )

    def flush(self) -> None:
        """Write the lines of the finished jobs of a batch, and send its numbers: `ended` was called for each
        of its attempts."""
        if self._finished:
            finished, self._finished = self._finished, []
            if write := lines_of_finished():
                write(finished)
            else:
                for attempt in finished:
                    write_line(_event("finished", attempt, seconds=attempt.seconds()))
        if self._meter is not None:
            self._meter.flush()

    def rescued(self, jobs: Iterable[Rescued], why: str) -> list[JobEvent]:
        """Report jobs that were taken from their worker, with the reason and their next state. Return the
        events."""
        events = []
        for job in jobs:
            kind = JobTimeoutError if job.reason == "timeout" else WorkerLostError
            error = kind(f"worker {job.owner} {why}") if job.failed else None
            event = JobEvent(
                name="failed" if job.failed else "rescued",
                id=job.id,
                task=job.task,
                queue=job.queue,
                attempt=job.attempts,
                reason=job.reason if job.failed else why,
                error=None if error is None else describe(error),
                exception=error,
                worker=job.owner,
            )
            events.append(event)
            self.publish(event)
            if self._meter is not None:
                self._meter.event(event)
        return events


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
