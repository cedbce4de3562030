"""The first that is told of jobs: the log, one line an event."""

from __future__ import annotations

import logging
from typing import Final

from sqlq.clock import readable
from sqlq.events import JobEvent

log = logging.getLogger("sqlq.worker")

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


def wants(name: str) -> bool:
    """Say whether an event of this name would be a line."""
    level = LEVELS.get(name)
    return level is not None and log.isEnabledFor(level)


def hear(event: JobEvent) -> None:
    """Write the line of an event: as an error, with its exception for error reporters, when the job has
    failed for good."""
    fields = {
        "job_id": event.id,
        "task": event.task,
        "queue": event.queue,
        "attempt": event.attempt,
        "event": event.name,
    }
    if event.seconds is not None:
        fields["duration_ms"] = round(event.seconds * 1000, 1)
    raised = event.exception if event.name == "failed" else None
    log.log(LEVELS[event.name], "%s", _said(event), extra=fields, exc_info=raised)


def _said(event: JobEvent) -> str:
    most = "" if event.max_attempts is None else f" of {event.max_attempts}"
    subject = f"job {event.id} {event.task} (queue {event.queue}, attempt {event.attempt}{most})"
    took = readable((event.seconds or 0.0) * 1000)
    wait = readable((event.delay_seconds or 0.0) * 1000)
    error = event.error
    match event.name:
        case "finished":
            return f"{subject} finished in {took}"
        case "cancelled":
            return (
                f"{subject} cancelled after {took}{': ' + _first_line(event.reason) if event.reason else ''}"
            )
        case "failed" if event.worker is not None and error is not None:
            return f"{subject}: {error.message}; failed, its attempts are spent"
        case "rescued":
            return f"{subject}: worker {event.worker} {event.reason}; it runs again"
        case "failed" | "retried" if error is not None:
            why = f"({event.reason}: {error.exception}: {_first_line(error.message)})"
            if event.name == "failed":
                return f"{subject} failed for good after {took} {why}"
            return f"{subject} failed after {took} {why}, next attempt in {wait}"
        case _:
            word = "snoozed" if event.name == "snoozed" else "given back"
            return f"{subject} {word} after {took}{f', due again in {wait}' if event.delay_seconds else ''}"


def _first_line(text: str) -> str:
    return text.strip().split("\n", 1)[0][:300]
