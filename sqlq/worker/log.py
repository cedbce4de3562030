"""The first that is told of jobs: the log, one line an event.

Most lines say that a job has finished. Where no more becomes of them than a line of text, the handler that
writes it is told without a record for each, which would cost more than the job does.
"""

from __future__ import annotations

import logging
from typing import Final

from sqlq.clock import readable
from sqlq.events import JobEvent
from sqlq.job import ClaimedJob

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
    """A handler of the root logger that can be told of finished jobs without records."""

    its_filters: tuple[logging.Filter, ...] = ()
    """The filters that it was made with, which have nothing to say of such lines."""

    def finished(self, job: ClaimedJob, seconds: float) -> None:
        """Write the line that the record of a finished job would give, with the next `told`."""
        raise NotImplementedError

    def told(self) -> None:
        """Let the lines go: there are no more for the moment."""
        raise NotImplementedError


def wants(name: str) -> bool:
    """Say whether an event of this name would be a line."""
    level = LEVELS.get(name)
    return level is not None and log.isEnabledFor(level)


def alone() -> LinesOfJobs | None:
    """Return the handler to which alone a record of a finished job would come, if no code sees it before.

    A host may have added handlers and filters of its own, or put functions in the place of logging's, as
    error reporters do.
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
    """Return what a record passes on its way to the handler."""
    kind = type(log)
    return (kind.log, kind._log, kind.makeRecord, kind.handle, kind.callHandlers, LinesOfJobs.handle)  # noqa: SLF001


def _file_of(function: object) -> str | None:
    return getattr(getattr(function, "__code__", None), "co_filename", None)


def hear(event: JobEvent) -> None:
    """Write the line of an event: as an error, with the handler's exception for error reporters, when the job
    has failed for good."""
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
    # the traceback of what never began is sqlq's own; guard: what-never-began-has-one-line
    raised = event.exception if event.name == "failed" and event.reason not in NEVER_BEGAN else None
    try:
        log.log(LEVELS[event.name], "%s", _said(event), extra=fields, exc_info=raised)
    except Exception as error:  # guard: a-log-handler-may-raise
        # a handler of the host's that could not show the exception can show what it is called
        log.log(
            LEVELS[event.name],
            *("%s; a log handler raised %s at its traceback", _said(event), type(error).__name__),
            extra=fields,
        )


def milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 1)


def subject(task: str, queue: str) -> str:
    """Return what follows the id in the line of a job, up to the number of the attempt."""
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
            why = f"({event.reason}: {error.exception}: {_first_line(error.message)})"
            if event.name == "failed":
                return f"{about} failed for good after {took} {why}"
            return f"{about} failed after {took} {why}, next attempt in {wait}"
        case _:
            word = "snoozed" if event.name == "snoozed" else "given back"
            return f"{about} {word} after {took}{f', due again in {wait}' if event.delay_seconds else ''}"


def _first_line(text: str) -> str:
    return text.strip().split("\n", 1)[0][:300]
