"""`sqlq jobs`: list jobs, in whatever state they are."""

from __future__ import annotations

from typing import Any

import click

from sqlq.admin.jobs import SEARCH_LIMIT
from sqlq.admin.verbs import of
from sqlq.cli.context import Context
from sqlq.cli.options import flag, limit_option, takes_json, those_of_one
from sqlq.cli.terminal.output import plain, show_json, show_table
from sqlq.config.command_hint import command
from sqlq.model.job import State


@click.command()
@click.option("--state", type=click.Choice([state.value for state in State]), help="Jobs in this state.")
@those_of_one
@limit_option(20, "Maximum number of rows, newest first.")
@flag("--exact", help="Search all jobs, not only the newest 100,000 of each kind.")
@takes_json
def jobs(
    context: Context, /, state: str | None, limit: int, exact: bool, as_json: bool, **fields: Any
) -> None:
    """List jobs, the newest first, in whatever state they are.

    Finished jobs are listed as long as they are kept: 7 days, or the App's retention=.
    """
    app = context.looking()
    jobs = app.jobs.list(
        state=state, limit=limit + 1, within=None if exact else SEARCH_LIMIT, whole=False, **fields
    )
    more, rows = len(jobs) > limit, jobs[:limit]
    if as_json:
        show_json([job.as_json(whole=False) for job in rows])
    elif rows:
        show_table(rows, *([] if state == "failed" else ["error"]))
    else:
        click.echo(plain(f"no {state + ' ' if state else ''}jobs{of(fields)}"))
    if (batch := fields["batch"]) is not None and not as_json:
        counts = app.jobs.counts(batch=batch)
        text = ", ".join(f"{counts[state]:,} {state}" for state in State if state in counts)
        click.echo(f"\nbatch {plain(batch)}: {text or 'no jobs'}")
    if more and not as_json:
        click.echo(
            f"\nthese are the newest {limit:,}; --limit N shows more, {command('show ID')} all about one"
        )
    if not jobs.complete:
        click.echo("\nonly the newest 100,000 jobs of each kind were looked at; --exact goes on", err=as_json)
