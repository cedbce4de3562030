"""`sqlq jobs`, `show` and `why`: see any job, in whatever state it is, and what it waits for."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from sqlq.admin.verbs import of
from sqlq.cli.context import Context
from sqlq.cli.history import show_history
from sqlq.cli.looks import queue_name, show_block, show_field, show_heading, show_rows, show_wrapped
from sqlq.cli.options import limit_option, takes_json, those_of_one
from sqlq.cli.output import Cell, Column, ago, naming_options, plain, plain_lines, shortened, show_json
from sqlq.config.command_hint import command
from sqlq.config.constants import DEFAULT_QUEUE
from sqlq.config.durations import counted, readable, span, written
from sqlq.errors import ConfigurationError, JobNotFoundError

if TYPE_CHECKING:
    from sqlq.app.app import App
    from sqlq.model.job import JobDetails

STATES = ("blocked", "scheduled", "available", "running", "finished", "failed", "cancelled")
MORE_COLUMNS = ("progress", "label")
"""Shown where one of the jobs has it."""
LONGEST_CURSOR = 300
"""Characters of a cursor that are shown; --json shows all."""
STYLES = {"running": "green", "failed": "red", "cancelled": "dim"}


@click.command()
@click.option("--state", type=click.Choice(STATES), help="In one state only.")
@those_of_one
@limit_option(20, "At most so many, the newest.")
@click.option(
    "--exact", is_flag=True, help="Look through all jobs, and not only the newest 100,000 of each kind."
)
@takes_json
def jobs(
    context: Context, /, state: str | None, limit: int, exact: bool, as_json: bool, **chosen: Any
) -> None:
    """List jobs, the newest first, in whatever state they are.

    Finished jobs are listed as long as they are kept: 7 days, or the App's retention=.
    """
    how: dict[str, Any] = {"within": None} if exact else {}
    found, complete = context.looking().jobs.listing(
        state=state, limit=limit + 1, whole=False, **chosen, **how
    )
    more, found = len(found) > limit, found[:limit]
    if as_json:
        show_json([job.as_json(whole=False) for job in found])
    elif found:
        columns = [Column("id", right=True), Column("state"), Column("queue"), Column("task")]
        columns += [Column("attempts", right=True), Column("time")]
        more_columns = [name for name in MORE_COLUMNS if any(getattr(job, name) is not None for job in found)]
        more_columns += ["error"] if state == "failed" else []
        columns += [Column(name, wide=name in ("label", "error")) for name in more_columns]
        show_rows(columns, [[*_row(job), *_more(job, more_columns)] for job in found])
    else:
        click.echo(f"no {state + ' ' if state else ''}jobs{of(chosen)}")
    if (group := chosen["group"]) is not None and not as_json:
        from sqlq.model.job import State

        numbers = context.looking().jobs.counts(group=group)
        said = ", ".join(f"{numbers[state]:,} {state}" for state in State if state in numbers)
        click.echo(f"\ngroup {plain(group)}: {said or 'no jobs'}")
    if more and not as_json:
        click.echo(
            f"\nthese are the newest {limit:,}; --limit N shows more, {command('show ID')} all about one"
        )
    if not complete:
        click.echo("\nonly the newest 100,000 jobs of each kind were looked at; --exact goes on", err=as_json)


def _row(job: JobDetails) -> list[Cell]:
    state: Cell = (job.state.value, STYLES.get(job.state, ""))
    return [str(job.id), state, queue_name(job.queue), job.task, attempts(job, "/"), _time(job)]


def _more(job: JobDetails, columns: Iterable[str]) -> list[Cell]:
    # the note beside a job's progress is for `sqlq show`
    progress = job.progress and replace(job.progress, note=None)
    values = {"progress": progress, "label": job.label, "error": job.error}
    return ["" if values[name] is None else plain(str(values[name])) for name in columns]


def attempts(job: JobDetails, separator: str) -> str:
    """Return how many attempts were made, of how many; "?" where only an unknown task has the number."""
    return f"{job.attempts}{separator}{'?' if job.max_attempts is None else job.max_attempts}"


def _time(job: JobDetails) -> str:
    """Return since when a job is in its state, or when it is due."""
    if job.state == "blocked":
        return f"by its {job.blocked_by}, since {ago(job.created_at)}"
    if job.state == "scheduled" and job.available_at is not None:
        return f"due in {span((job.available_at - datetime.now(UTC)).total_seconds())}"
    if job.state == "available" and job.available_at is not None:
        return f"due {ago(job.available_at)}"
    return str(ago(job.reserved_at if job.state == "running" else job.ended_at))


@click.command()
@click.argument("id", type=int)
@click.option(
    "--result", "only_result", is_flag=True, help="Print what it returned, as JSON, and nothing else."
)
@click.option(
    "--wait",
    metavar="DURATION",
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
    for name, value in _fields(job):
        show_field(name, value)
    if job.state == "failed":
        _show_error(job.exception, job.message, job.reason)
    show_history(context, job)
    if job.traceback:
        click.echo()
        show_heading("traceback")
        show_block(plain_lines(job.traceback))
    click.echo()
    show_heading("next")
    _show_reasons(_reasons(app, job))


@click.command()
@click.argument("id", type=int)
@takes_json
def why(context: Context, id: int, as_json: bool) -> None:
    """Explain why a job does not run now, and when it will.

    For a running job it names the worker, for an ended one the outcome. Beside each reason stands the command
    that changes it. The findings of sqlq doctor about those who should run it come last.
    """
    from sqlq.admin.doctor.doctor import findings

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
        click.echo()
        show_heading("doctor")
    for each in found:
        show_wrapped("", plain(each.said + (f" → {each.remedy}" if each.remedy else "")), before="  ")


def _reasons(app: App, job: JobDetails) -> list[tuple[str | None, str]]:
    """Return why a job is in its state, each reason after the command that changes it."""
    from sqlq.admin.why import why

    return [
        (each.words and command(each.words, needs_app=each.needs_app), each.said)
        for each in why(app.database, job)
    ]


def _show_reasons(reasons: list[tuple[str | None, str]]) -> None:
    width = max(len(line or "") for line, _ in reasons)
    for line, said in reasons:
        show_wrapped(f"{line:<{width}}  " if line else "", said, before="  ")


def _fields(job: JobDetails) -> Iterator[tuple[str, str]]:
    if job.label is not None:
        yield "label", plain(str(job.label))
    if job.group_key is not None:
        yield "group", plain(job.group_key)
    yield "task", job.task
    yield "queue", queue_name(job.queue)
    yield "arguments", _said(job.payload)
    if job.sealed is not None:
        yield "sealed", job.sealed
    if job.headers:
        yield "headers", json.dumps(job.headers, ensure_ascii=False)
    if job.progress is not None:
        yield "progress", plain(str(job.progress))
    if job.cursor is not None:
        yield "cursor", shortened(plain(json.dumps(job.cursor, ensure_ascii=False)), LONGEST_CURSOR)
    if job.result is not None:
        yield "result", _said(job.result)
    if job.state != "failed" and job.error:
        yield "reason", job.error
    back = f", released {counted(job.releases, 'time')}" if job.releases else ""
    yield "attempts", f"{attempts(job, ' of ')}{back}"
    yield "timeout", readable(job.timeout_ms) if job.timeout_ms else "none"
    if job.backoff is not None:
        yield "backoff", _backoff(job.backoff)
    if job.retention_ms is not None:
        yield "kept", _kept(job)
    if job.priority:
        yield "priority", str(job.priority)
    if job.unique_key is not None:
        until = {"start": "it starts", "pruned": "it is pruned"}.get(job.unique_until, "it has ended")
        yield "unique key", f"{plain(job.unique_key)} (until {until})"
    cancel = job.on_failure.get("on_cancel") if isinstance(job.on_failure, dict) else None
    followers = {"on success": job.on_success, "on failure": job.on_failure, "on cancel": cancel}
    for then, follower in followers.items():
        if follower is not None:
            yield then, _follower(follower)
    if job.schedule is not None and job.scheduled_for is not None:
        yield "schedule", f"{plain(str(job.schedule))}, for {_moment(job.scheduled_for, said=False)}"
    yield "created", _moment(job.created_at)
    if job.replay_of is not None:
        yield "replay of", f"job {job.replay_of}"
    if job.flow_id is not None:
        yield "flow", str(job.flow_id)
    if job.limit_key is not None:
        yield "limit", plain(job.limit_key)
    due = job.available_at or job.due_at
    if due is not None and job.state == "scheduled":
        yield "due", f"{_moment(due, said=False)} ({_time(job).removeprefix('due ')})"
    elif due is not None:
        yield "due", _moment(due, said=job.ended_at is None)
    if job.start_by is not None:
        yield "start by", _moment(job.start_by)
    if job.reserved_at is not None:
        yield "last claimed", _moment(job.reserved_at)
    if job.cancel_requested_at is not None:
        yield "to cancel", f"asked to stop {_moment(job.cancel_requested_at)}"
    if job.ended_at is not None:
        yield job.state, _moment(job.ended_at)


def _said(value: Any) -> str:
    """Return arguments or a result as JSON, or the reason why they cannot be decrypted."""
    from sqlq.payload.encryption import Unopened

    return f"({value.why})" if isinstance(value, Unopened) else json.dumps(value, ensure_ascii=False)


def _moment(moment: datetime, *, said: bool = True) -> str:
    return f"{written(moment)} ({ago(moment)})" if said else written(moment)


def _follower(named: Any) -> str:
    """Return the task of a callback. SQL may have written anything there."""
    if not isinstance(named, dict) or not isinstance(named.get("task"), str):
        return plain(json.dumps(named, ensure_ascii=False))
    return f"{plain(named['task'])} in queue {queue_name(str(named.get('queue', DEFAULT_QUEUE)))}"


def _backoff(text: str) -> str:
    from sqlq.model.backoff import read

    try:
        return str(read(text))
    except ConfigurationError:
        return plain(text)


def _kept(job: JobDetails) -> str:
    """Return how long a job with a retention of its own is kept after its end."""
    from sqlq.model.checks import FOR_EVER_MS

    ms = job.retention_ms or 0
    if ms >= FOR_EVER_MS:
        return "for ever"
    kept = f"{readable(ms)} after its end"
    return kept if job.expires_at is None else f"{kept}, until {_moment(job.expires_at, said=False)}"


def _show_error(exception: str | None, message: str | None, reason: str | None) -> None:
    click.echo()
    show_heading("error" if reason == "error" else f"error ({reason})")
    text = ": ".join(part for part in (exception, (message or "").strip()) if part)
    for line in plain_lines(text).splitlines() or ["-"]:
        show_wrapped("", line, before="  ")
