"""`sqlq jobs`: list jobs, in whatever state they are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import click

from sqlq.admin.jobs import LOOKED_AT
from sqlq.admin.verbs import of
from sqlq.cli.context import Context
from sqlq.cli.options import flag, limit_option, takes_json, those_of_one
from sqlq.cli.terminal.output import (
    Cell,
    ago,
    plain,
    queue_name,
    show_json,
    show_rows,
    styled,
)
from sqlq.config.command_hint import command
from sqlq.config.durations import until
from sqlq.model.job import JobDetails, State

MORE_COLUMNS = ("progress", "label")
"""Shown where one of the jobs has it."""


@click.command()
@click.option("--state", type=click.Choice([state.value for state in State]), help="Jobs in this state.")
@those_of_one
@limit_option(20, "Maximum number of rows, newest first.")
@flag("--exact", help="Search all jobs, not only the newest 100,000 of each kind.")
@takes_json
def jobs(
    context: Context, /, state: str | None, limit: int, exact: bool, as_json: bool, **chosen: Any
) -> None:
    """List jobs, the newest first, in whatever state they are.

    Finished jobs are listed as long as they are kept: 7 days, or the App's retention=.
    """
    app = context.looking()
    within = None if exact else LOOKED_AT
    jobs = app.jobs.list(state=state, limit=limit + 1, within=within, whole=False, **chosen)
    more, found = len(jobs) > limit, jobs[:limit]
    if as_json:
        show_json([job.as_json(whole=False) for job in found])
    elif found:
        more_names = [name for name in MORE_COLUMNS if any(getattr(job, name) is not None for job in found)]
        more_names += ["error"] if state == "failed" else []
        names = ("id", "state", "queue", "task", "attempts", "time", *more_names)
        show_rows(names, [[*_row(job), *_more(job, more_names)] for job in found])
    else:
        click.echo(plain(f"no {state + ' ' if state else ''}jobs{of(chosen)}"))
    if (batch := chosen["batch"]) is not None and not as_json:
        numbers = app.jobs.counts(batch=batch)
        said = ", ".join(f"{numbers[state]:,} {state}" for state in State if state in numbers)
        click.echo(f"\nbatch {plain(batch)}: {said or 'no jobs'}")
    if more and not as_json:
        click.echo(
            f"\nthese are the newest {limit:,}; --limit N shows more, {command('show ID')} all about one"
        )
    if not jobs.complete:
        click.echo("\nonly the newest 100,000 jobs of each kind were looked at; --exact goes on", err=as_json)


def _row(job: JobDetails) -> list[Cell]:
    return [str(job.id), styled(job.state), queue_name(job.queue), job.task, attempts(job, "/"), time_of(job)]


def _more(job: JobDetails, columns: Iterable[str]) -> list[Cell]:
    # the note beside a job's progress is for `sqlq show`
    progress = job.progress and replace(job.progress, note=None)
    values = {"progress": progress, "label": job.label, "error": job.error}
    return ["" if values[name] is None else str(values[name]) for name in columns]


def attempts(job: JobDetails, separator: str) -> str:
    """Return how many attempts were made, of how many; "?" where only an unknown task has the number."""
    return f"{job.attempts}{separator}{'?' if job.max_attempts is None else job.max_attempts}"


def time_of(job: JobDetails) -> str:
    """Return since when a job is in its state, or when it is due."""
    if job.state == "blocked":
        return f"by its {job.blocked_by}, since {ago(job.created_at)}"
    if job.state in ("scheduled", "available") and job.available_at is not None:
        return f"due {until(job.available_at)}"
    return str(ago(job.reserved_at if job.state == "running" else job.ended_at))
