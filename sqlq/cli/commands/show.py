"""`sqlq show`: all about one job."""

from __future__ import annotations

import json
from typing import Any

import click

from sqlq.cli.commands.jobs import attempts, time_of
from sqlq.cli.commands.why import reasons, show_reasons
from sqlq.cli.context import Context
from sqlq.cli.options import duration, flag, takes_json
from sqlq.cli.terminal.output import (
    dated,
    naming_options,
    plain,
    plain_lines,
    queue_name,
    show_block,
    show_fields,
    show_heading,
    show_json,
    show_part,
    show_wrapped,
)
from sqlq.config.command_hint import shortened
from sqlq.config.constants import DEFAULT_QUEUE
from sqlq.config.durations import counted, readable, span, written
from sqlq.errors import ConfigurationError, JobNotFoundError
from sqlq.model.backoff import read
from sqlq.model.checks import FOR_EVER_MS
from sqlq.model.history import AttemptRecord
from sqlq.model.job import JobDetails
from sqlq.payload.encryption import Unopened

LONGEST_CURSOR = 300
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
        context.kind = "reader"
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
        _show_error(job.exception, job.message, job.reason)
    _show_history(context, job)
    if job.traceback:
        show_part("traceback")
        show_block(plain_lines(job.traceback))
    show_part("next")
    show_reasons(reasons(app, job))


def _fields(job: JobDetails) -> dict[str, object]:
    """Return what is shown of a job; what is None is left out."""
    until = {"start": "it starts", "pruned": "it is pruned"}.get(job.unique_until, "it has ended")
    cancel = job.on_failure.get("on_cancel") if isinstance(job.on_failure, dict) else None
    planned = job.scheduled_for and f"{job.schedule}, for {written(job.scheduled_for)}"
    back = f", released {counted(job.releases, 'time')}" if job.releases else ""
    cursor = _said(job.cursor)
    return {
        "label": job.label,
        "batch": job.batch_key,
        "task": job.task,
        "queue": queue_name(job.queue),
        "arguments": _said(job.payload),
        "encryption": job.encryption,
        "headers": _said(job.headers or None),
        "progress": job.progress,
        "cursor": cursor and shortened(cursor, LONGEST_CURSOR),
        "result": _said(job.result),
        "reason": None if job.state == "failed" else job.error,
        "attempts": f"{attempts(job, ' of ')}{back}",
        "timeout": readable(job.timeout_ms) if job.timeout_ms else "none",
        "backoff": job.backoff and _backoff(job.backoff),
        "kept": None if job.retention_ms is None else _kept(job),
        "priority": job.priority or None,
        "unique key": job.unique_key and f"{job.unique_key} (until {until})",
        "on success": _follower(job.on_success),
        "on failure": _follower(job.on_failure),
        "on cancel": _follower(cancel),
        "schedule": job.schedule and planned,
        "created": dated(job.created_at),
        "replay of": job.replay_of and f"job {job.replay_of}",
        "flow": job.flow_id,
        "limit": job.limit_key,
        "due": _due(job),
        "start by": dated(job.start_by),
        "last claimed": dated(job.reserved_at),
        "to cancel": job.cancel_requested_at and f"asked to stop {dated(job.cancel_requested_at)}",
        job.state: dated(job.ended_at),
    }


def _said(value: Any) -> str | None:
    """Return arguments or a result as JSON, or the reason why they cannot be decrypted."""

    if value is None:
        return None
    return f"({value.why})" if isinstance(value, Unopened) else json.dumps(value, ensure_ascii=False)


def _due(job: JobDetails) -> str | None:
    due = job.available_at or job.due_at
    if due is None or (job.ended_at is None and job.state != "scheduled"):
        return dated(due)
    return written(due) if job.ended_at else f"{written(due)} ({time_of(job).removeprefix('due ')})"


def _follower(named: Any) -> str | None:
    """Return the task of a callback. SQL may have written anything there."""
    if not isinstance(named, dict) or not isinstance(named.get("task"), str):
        return _said(named)
    return f"{named['task']} in queue {queue_name(str(named.get('queue', DEFAULT_QUEUE)))}"


def _backoff(text: str) -> str:
    try:
        return str(read(text))
    except ConfigurationError:
        return text


def _kept(job: JobDetails) -> str:
    """Return how long a job with a retention of its own is kept after its end."""

    ms = job.retention_ms or 0
    if ms >= FOR_EVER_MS:
        return "for ever"
    kept = f"{readable(ms)} after its end"
    return kept if job.expires_at is None else f"{kept}, until {written(job.expires_at)}"


def _show_error(exception: str | None, message: str | None, reason: str | None) -> None:
    show_part("error" if reason == "error" else f"error ({reason})")
    text = ": ".join(part for part in (exception, (message or "").strip()) if part)
    for line in plain_lines(text).splitlines() or ["-"]:
        show_wrapped("", line, before="  ")


# -- the history of a job ------------------------------------------------------------------------------------

WORDS = {
    "put_back": "put back by an operator",
    "cancel_requested": "asked to stop",
    "released": "released, uncounted",
    "snoozed": "snoozed, uncounted",
}
"""Outcomes that are printed in other words."""


def _show_history(context: Context, job: JobDetails) -> None:
    """Print the history of a job that has more than the one attempt of the fields above."""
    lines = len(job.history)
    if lines == 0 or (lines == 1 and job.state not in ("blocked", "scheduled", "available")):
        return
    show_part("history")
    hosts = _hosts(context, job)
    for line in job.history:
        unnumbered = "–" if line.outcome in ("put_back", "cancel_requested", "cancelled") else "?"
        attempt = unnumbered if line.attempt is None else str(line.attempt)
        moment = line.claimed_at if line.outcome == "running" else line.ended_at
        at = "?" if moment is None else written(moment)
        show_wrapped(f"{attempt:>3}  {at}  ", _outcome(line), before="  ")
        if course := ", ".join(_course(line, hosts)):
            show_wrapped("     ", course, before="  ")
    told = sum(line.outcome in ("released", "snoozed") for line in job.history)
    if told and job.releases > told:
        more = counted(job.releases - told, "time")
        show_wrapped("     ", f"released {more} more, without a line of their own", before="  ")


def _outcome(line: AttemptRecord) -> str:
    """Return the outcome of an attempt in one line; a worker may have written anything."""
    word = WORDS.get(line.outcome, line.outcome)
    if line.outcome == "released" and line.started_at is None:
        word = "released before it started"
    reason = line.reason if line.reason not in (None, "error", "worker_lost") else None
    first = (line.message or "").strip().splitlines()[:1]
    said = [word, *(plain(part) for part in (reason, line.exception, *first) if part)]
    return ": ".join(said)


def _course(line: AttemptRecord, hosts: dict[str, str]) -> list[str]:
    said = []
    if line.claimed_at is not None and line.outcome != "running":
        said.append(f"claimed {written(line.claimed_at)}")
    if line.started_at is not None:
        if line.claimed_at is not None:
            said.append(f"started after {span((line.started_at - line.claimed_at).total_seconds())}")
        if line.ended_at is not None:
            said.append(f"ran {span((line.ended_at - line.started_at).total_seconds())}")
    elif line.claimed_at is not None and line.ended_at is not None:
        said.append(f"ended after {span((line.ended_at - line.claimed_at).total_seconds())}")
    host = line.host or hosts.get(line.worker or "")
    if host is not None:
        said.append(f"on {plain(host)}")
    elif line.worker is not None:
        said.append(f"by worker {plain(line.worker)}")
    return said


def _hosts(context: Context, job: JobDetails) -> dict[str, str]:
    """Return host and process of the workers, by their ids: as the lines have it, or those that are known."""
    found = {line.worker: line.host for line in job.history if line.worker and line.host}
    if all(line.worker is None or line.worker in found for line in job.history):
        return found
    workers = context.looking().workers.list(silent=True)
    return {worker.id: f"{worker.host} pid {worker.pid}" for worker in workers} | found
