"""`sqlq show` and `sqlq why`: all about one job."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click

from sqlq.admin.doctor.doctor import findings
from sqlq.admin.why import why as reasons_of
from sqlq.cli.context import Context
from sqlq.cli.options import duration, flag, takes_json
from sqlq.cli.terminal.output import (
    dated,
    naming_options,
    plain,
    queue_name,
    show_block,
    show_fields,
    show_heading,
    show_json,
    show_part,
    show_wrapped,
)
from sqlq.config.command_hint import shortened
from sqlq.config.durations import counted, readable, span, until, written
from sqlq.errors import ConfigurationError, JobNotFoundError
from sqlq.model.backoff import read
from sqlq.model.checks import FOR_EVER_MS
from sqlq.model.history import AttemptRecord
from sqlq.model.job import JobDetails
from sqlq.payload.encryption import Unopened


@click.command()
@click.argument("id", type=int)
@takes_json
def why(context: Context, id: int, as_json: bool) -> None:
    """Explain why a job does not run now, and when it will.

    For a running job it names the worker, for an ended one the outcome. Beside each reason stands the command
    that changes it. The findings of sqlq doctor about those who should run it come last.
    """

    job = context.app().jobs.get(id)
    reasons = [*reasons_of(context.app().database, job)]
    problems = findings(context.app().database, job)
    if as_json:
        show_json(
            {
                **{name: getattr(job, name) for name in ("id", "state", "queue", "task")},
                "reasons": [{"said": each.text, "command": each.command} for each in reasons],
                "findings": [finding.as_json() for finding in problems],
            }
        )
        return
    error = f": {plain(job.error)}" if job.error else ""
    show_wrapped(
        "", f"job {job.id}, {plain(job.task)} in queue {queue_name(job.queue)}, is {job.state}{error}"
    )
    show_reasons(reasons)
    if problems:
        show_part("doctor")
    for finding in problems:
        show_wrapped("", plain(finding.text), before="  ")


def show_reasons(reasons: Sequence[Any]) -> None:
    """Print why a job is in its state, each reason after the command that changes it."""
    width = max(len(each.command or "") for each in reasons)
    for each in reasons:
        show_wrapped(f"{each.command:<{width}}  " if each.command else "", each.text, before="  ")


CURSOR_LENGTH = 300
"""Characters of a cursor that are shown; --json shows all."""


@click.command()
@click.argument("id", type=int)
@flag("--result", "only_result", help="Print only the result, as JSON.")
@duration(
    "--wait",
    help='With --result: maximum time to wait for the end of the job, as in "30s"; none for no limit.',
)
@takes_json
def show(context: Context, id: int, only_result: bool, wait: str | None, as_json: bool) -> None:
    """Show all about one job, in whatever state it is.

    Its arguments, result and times, the history of its attempts, and what may be done with it next. With
    --result it exits with 1, and one sentence, when the job has failed, was cancelled, or has not ended in
    time.
    """
    if only_result:
        with naming_options(timeout="--wait"):
            show_json(context.app().result(id, None if wait == "none" else wait or "0s", raw=True))
        return
    if wait is not None:
        raise click.UsageError("--wait is of use with --result only")
    app = context.looking()
    try:
        job = app.jobs.get(id)
    except JobNotFoundError:  # a replica may not have it yet
        app = context.app()
        job = app.jobs.get(id)
    if as_json:
        show_json(job.as_json())
        return
    show_heading(f"job {job.id}: {job.state}")
    show_fields(_fields(job))
    if job.state == "failed":
        show_part("error" if job.reason == "error" else f"error ({job.reason})")
        show_block(": ".join(filter(None, (job.exception, (job.message or "").strip()))))
    _show_history(job)
    if job.traceback:
        show_part("traceback")
        show_block(job.traceback)
    show_part("next")
    show_reasons([*reasons_of(app.database, job)])


def _fields(job: JobDetails) -> dict[str, object]:
    """Return what is shown of a job; what is None is left out."""
    due = job.available_at or job.due_at
    planned = job.scheduled_for and f"{job.schedule}, for {written(job.scheduled_for)}"
    back = f", released {counted(job.releases, 'time')}" if job.releases else ""
    cursor = _json(job.cursor)
    kept = None if job.retention_ms is None else f"{readable(job.retention_ms)} after its end"
    return {
        "label": job.label,
        "batch": job.batch_key,
        "task": job.task,
        "queue": queue_name(job.queue),
        "arguments": _json(job.payload),
        "encryption": job.encryption,
        "headers": _json(job.headers or None),
        "progress": job.progress,
        "cursor": cursor and shortened(cursor, CURSOR_LENGTH),
        "result": _json(job.result),
        "reason": None if job.state == "failed" else job.error,
        "attempts": f"{job.attempts} of {job.max_attempts or '?'}{back}",
        "timeout": readable(job.timeout_ms) if job.timeout_ms else "none",
        "backoff": job.backoff and _backoff(job.backoff),
        "kept": "for ever" if (job.retention_ms or 0) >= FOR_EVER_MS else kept,
        "priority": job.priority or None,
        "unique key": job.unique_key and f"{job.unique_key} (until {job.unique_until})",
        "on success": _json(job.on_success),
        "on failure": _json(job.on_failure),
        "schedule": job.schedule and planned,
        "created": dated(job.created_at),
        "replay of": job.replay_of and f"job {job.replay_of}",
        "flow": job.flow_id,
        "limit": job.limit_key,
        "due": due and f"{written(due)} ({until(due)})",
        "start by": dated(job.start_by),
        "last claimed": dated(job.reserved_at),
        "to cancel": job.cancel_requested_at and f"asked to stop {dated(job.cancel_requested_at)}",
        job.state: dated(job.ended_at),
    }


def _json(value: Any) -> str | None:
    """Return arguments or a result as JSON, or the reason why they cannot be decrypted."""

    if value is None:
        return None
    return f"({value.why})" if isinstance(value, Unopened) else json.dumps(value, ensure_ascii=False)


def _backoff(text: str) -> str:
    try:
        return str(read(text))
    except ConfigurationError:
        return text


def _show_history(job: JobDetails) -> None:
    """Print the history of a job that has more than the one attempt of the fields above."""
    if not job.history or (len(job.history) == 1 and job.state not in ("blocked", "scheduled", "available")):
        return
    show_part("history")
    for line in job.history:
        at = line.ended_at or line.claimed_at
        label = f"{line.attempt or '–':>3}  {'?' if at is None else written(at)}  "
        show_wrapped(label, plain(f"{_outcome(line)}{_details(line)}"), before="  ")


def _outcome(line: AttemptRecord) -> str:
    """Return the outcome of an attempt in one line; a worker may have written anything."""
    reason = line.reason if line.reason not in ("error", "worker_lost") else None
    first, _, _ = (line.message or "").strip().partition("\n")
    return ": ".join(filter(None, (line.outcome.replace("_", " "), reason, line.exception, first)))


def _details(line: AttemptRecord) -> str:
    """Return how long an attempt took, and where it ran."""
    parts = [] if line.seconds is None else [f"after {span(line.seconds)}"]
    if host := line.host or (line.worker and f"worker {line.worker}"):
        parts.append(f"on {host}")
    return f" ({', '.join(parts)})" if parts else ""
