"""`sqlq jobs`, `show` and `why`: see any job, in whatever state it is, and what it waits for."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import click

from sqlq.admin.doctor.doctor import findings
from sqlq.admin.verbs import of
from sqlq.admin.why import why as reasons_of
from sqlq.app.app import App
from sqlq.cli.context import Context
from sqlq.cli.options import duration, flag, limit_option, takes_json, those_of_one
from sqlq.cli.output import (
    Cell,
    ago,
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
    show_rows,
    show_wrapped,
    styled,
)
from sqlq.config.command_hint import command, shortened
from sqlq.config.constants import DEFAULT_QUEUE
from sqlq.config.durations import counted, readable, span, until, written
from sqlq.errors import ConfigurationError, JobNotFoundError
from sqlq.model.backoff import read
from sqlq.model.checks import FOR_EVER_MS
from sqlq.model.history import AttemptRecord
from sqlq.model.job import JobDetails, State
from sqlq.payload.encryption import Unopened

MORE_COLUMNS = ("progress", "label")
"""Shown where one of the jobs has it."""
LONGEST_CURSOR = 300
"""Characters of a cursor that are shown; --json shows all."""


@click.command()
@click.option("--state", type=click.Choice([state.value for state in State]), help="In one state only.")
@those_of_one
@limit_option(20, "At most so many, the newest.")
@flag("--exact", help="Look through all jobs, and not only the newest 100,000 of each kind.")
@takes_json
def jobs(
    context: Context, /, state: str | None, limit: int, exact: bool, as_json: bool, **chosen: Any
) -> None:
    """List jobs, the newest first, in whatever state they are.

    Finished jobs are listed as long as they are kept: 7 days, or the App's retention=.
    """
    app = context.looking()
    how: dict[str, Any] = {"within": None} if exact else {}
    found, complete = app.jobs.listing(state=state, limit=limit + 1, whole=False, **chosen, **how)
    more, found = len(found) > limit, found[:limit]
    if as_json:
        show_json([job.as_json(whole=False) for job in found])
    elif found:
        more_names = [name for name in MORE_COLUMNS if any(getattr(job, name) is not None for job in found)]
        more_names += ["error"] if state == "failed" else []
        names = ("id", "state", "queue", "task", "attempts", "time", *more_names)
        show_rows(names, [[*_row(job), *_more(job, more_names)] for job in found])
    else:
        click.echo(plain(f"no {state + ' ' if state else ''}jobs{of(chosen)}"))
    if (group := chosen["group"]) is not None and not as_json:
        numbers = app.jobs.counts(group=group)
        said = ", ".join(f"{numbers[state]:,} {state}" for state in State if state in numbers)
        click.echo(f"\ngroup {plain(group)}: {said or 'no jobs'}")
    if more and not as_json:
        click.echo(
            f"\nthese are the newest {limit:,}; --limit N shows more, {command('show ID')} all about one"
        )
    if not complete:
        click.echo("\nonly the newest 100,000 jobs of each kind were looked at; --exact goes on", err=as_json)


def _row(job: JobDetails) -> list[Cell]:
    return [str(job.id), styled(job.state), queue_name(job.queue), job.task, attempts(job, "/"), _time(job)]


def _more(job: JobDetails, columns: Iterable[str]) -> list[Cell]:
    # the note beside a job's progress is for `sqlq show`
    progress = job.progress and replace(job.progress, note=None)
    values = {"progress": progress, "label": job.label, "error": job.error}
    return ["" if values[name] is None else str(values[name]) for name in columns]


def attempts(job: JobDetails, separator: str) -> str:
    """Return how many attempts were made, of how many; "?" where only an unknown task has the number."""
    return f"{job.attempts}{separator}{'?' if job.max_attempts is None else job.max_attempts}"


def _time(job: JobDetails) -> str:
    """Return since when a job is in its state, or when it is due."""
    if job.state == "blocked":
        return f"by its {job.blocked_by}, since {ago(job.created_at)}"
    if job.state in ("scheduled", "available") and job.available_at is not None:
        return f"due {until(job.available_at)}"
    return str(ago(job.reserved_at if job.state == "running" else job.ended_at))


@click.command()
@click.argument("id", type=int)
@flag("--result", "only_result", help="Print what it returned, as JSON, and nothing else.")
@duration(
    "--wait",
    help='With --result: wait so long for its end, as in "30s"; none waits without end.',
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
    _show_reasons(_reasons(app, job))


@click.command()
@click.argument("id", type=int)
@takes_json
def why(context: Context, id: int, as_json: bool) -> None:
    """Explain why a job does not run now, and when it will.

    For a running job it names the worker, for an ended one the outcome. Beside each reason stands the command
    that changes it. The findings of sqlq doctor about those who should run it come last.
    """

    context.kind = "reader"
    job = context.app().jobs.get(id)
    reasons, found = _reasons(context.app(), job), findings(context.app().database, job)
    if as_json:
        said = {
            "reasons": [{"said": words, "command": line} for line, words in reasons],
            "findings": [each.as_json() for each in found],
        }
        show_json({"id": job.id, "state": job.state, "queue": job.queue, "task": job.task, **said})
        return
    error = f": {plain(job.error)}" if job.error else ""
    show_wrapped(
        "", f"job {job.id}, {plain(job.task)} in queue {queue_name(job.queue)}, is {job.state}{error}"
    )
    _show_reasons(reasons)
    if found:
        show_part("doctor")
    for each in found:
        show_wrapped("", plain(str(each)), before="  ")


def _reasons(app: App, job: JobDetails) -> list[tuple[str | None, str]]:
    """Return why a job is in its state, each reason after the command that changes it."""

    return [
        (each.words and command(each.words, needs_app=each.needs_app), each.said)
        for each in reasons_of(app.database, job)
    ]


def _show_reasons(reasons: list[tuple[str | None, str]]) -> None:
    width = max(len(line or "") for line, _ in reasons)
    for line, said in reasons:
        show_wrapped(f"{line:<{width}}  " if line else "", said, before="  ")


def _fields(job: JobDetails) -> dict[str, object]:
    """Return what is shown of a job; what is None is left out."""
    until = {"start": "it starts", "pruned": "it is pruned"}.get(job.unique_until, "it has ended")
    cancel = job.on_failure.get("on_cancel") if isinstance(job.on_failure, dict) else None
    planned = job.scheduled_for and f"{job.schedule}, for {written(job.scheduled_for)}"
    back = f", released {counted(job.releases, 'time')}" if job.releases else ""
    cursor = _said(job.cursor)
    return {
        "label": job.label,
        "group": job.group_key,
        "task": job.task,
        "queue": queue_name(job.queue),
        "arguments": _said(job.payload),
        "sealed": job.sealed,
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
    return written(due) if job.ended_at else f"{written(due)} ({_time(job).removeprefix('due ')})"


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
