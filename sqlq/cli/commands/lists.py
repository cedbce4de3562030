"""The commands that list: `sqlq jobs`, `failed`, `workers`, `flows`, `limits` and `audit`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import click

from sqlq.admin.jobs import SEARCH_LIMIT
from sqlq.admin.verb import of, worker_name
from sqlq.cli.context import Context
from sqlq.cli.options import flag, limit_option, listing, takes_json, those_of_one
from sqlq.cli.terminal.output import (
    plain,
    show_fields,
    show_json,
    show_list,
    show_part,
    show_rows,
    show_table,
)
from sqlq.config.command_hint import command
from sqlq.config.durations import ago, counted
from sqlq.model.flow import FlowDetails
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


@click.command()
@those_of_one
@limit_option(100, "Maximum number of errors.")
@takes_json
def failed(context: Context, /, limit: int, as_json: bool, **fields: Any) -> None:
    """Count failed jobs by task and error, the most frequent first.

    sqlq jobs --state failed lists them, and sqlq show has all about one.
    """
    errors, is_complete = context.looking().jobs.failures(**fields)
    if as_json:
        show_json({"errors": [each.as_json() for each in errors[:limit]], "capped": not is_complete})
        return
    show_list(errors[:limit], nothing=f"no failed jobs{of(fields)}")
    if len(errors) > limit:
        click.echo(f"\nand {counted(len(errors) - limit, 'other error')}; --limit N shows more")
    if not is_complete:
        click.echo("\nand more errors; --queue, --task or --batch shows those of one")


@listing
@click.option("--prefix", default="", help="Keys with this prefix.")
@limit_option(100, "Maximum number of keys.")
@takes_json
def limits(context: Context, prefix: str, limit: int, as_json: bool) -> None:
    """List the keys of limits; set a limit, and clear it.

    Running are the jobs that hold a slot: they run, or are claimed next. Waiting are those without a slot.
    """
    of = f" with the prefix {prefix!r}" if prefix else ""
    rows = context.looking().limits.list(prefix or None, limit=limit)
    nothing = f"no limits{of} in {context.shown_url()}: a worker that sees a job of a key adds it"
    show_list(rows, nothing=nothing, as_json=as_json)


@listing
@click.option("--actor", help="Actions of this person.")
@click.option("--action", help="Actions of this kind, as in 'queues pause'.")
@click.option("--before", type=int, metavar="ID", help="Actions older than this id.")
@limit_option(100, "Maximum number of rows.")
@takes_json
def audit(context: Context, /, as_json: bool, **fields: Any) -> None:
    """Show what operators did, the newest first; stop an action.

    Each command that changes something leaves a row: who, when, what, and on how many rows until now. An
    action on many jobs that is interrupted goes on by the same command. sqlq prune --audit AGE deletes old
    rows.
    """
    show_list(context.looking().audit.list(**fields), nothing="no actions recorded", as_json=as_json)


STEPS_SHOWN = 1_000
"""The most steps that are printed; --json has all."""


@listing
@limit_option(20, "Maximum number of rows, newest first.")
@takes_json
def flows(context: Context, limit: int, as_json: bool) -> None:
    """List flows, the newest first; show one, or skip a step.

    sqlq retry --flow ID runs failed steps again, sqlq cancel --flow ID ends a flow.
    """
    details = context.looking().flows.list(limit=limit)
    show_list(details, nothing=f"no flows in {context.shown_url()}", as_json=as_json)


@flows.command()
@click.argument("id", type=int)
@takes_json
def show(context: Context, id: int, as_json: bool) -> None:
    """Show a flow: its steps, what each waits for, and what to do next."""
    details = context.looking().flows.get(id)
    if as_json:
        show_json(details.as_json())
        return
    show_fields(
        {
            "flow": details.id,
            "name": details.name,
            "state": f"{details.state}, {details.steps_by_state}",
            "enqueued": ago(details.created_at),
        }
    )
    click.echo()
    show_table(details.steps[:STEPS_SHOWN])
    if len(details.steps) > STEPS_SHOWN:
        click.echo(f"\nand {counted(len(details.steps) - STEPS_SHOWN, 'more step')}; --json has all of them")
    if next_ := dict(_next(details)):
        click.echo()
        show_fields(next_)


def _next(details: FlowDetails) -> Iterator[tuple[str, str]]:
    """Yield the next commands for a flow, each after its effect."""
    states = Counter(step.state for step in details.steps)
    failed = [step for step in details.steps if step.state == "failed"]
    if failed:
        yield "what failed", command(f"show {failed[0].id}")
        yield "run it again", command(f"retry --flow {details.id}")
        yield "go on", command(f"flows skip {failed[0].id}")
    if states.keys() & {"blocked", "scheduled", "available", "running"}:
        yield "end it", command(f"cancel --flow {details.id}")


JOBS_SHOWN = 10
"""The most jobs of a worker that are printed; --json has all."""


@listing
@flag(
    "--all",
    "silent",
    help="Include workers that disappeared within the last day without signing off.",
)
@takes_json
def workers(context: Context, silent: bool, as_json: bool) -> None:
    """Show workers and what they run; pause, stop or restart them.

    Also state, host, process, version, last heartbeat and queues of each. A worker counts as alive for 90
    seconds after its last heartbeat.
    """
    entered = context.looking().workers.list(silent=True)
    rows = [worker for worker in entered if worker.alive or silent]
    if as_json:
        show_json([worker.as_json() for worker in rows])
        return
    show_list(rows, nothing=f"no worker is running: start one with {command('work', needs_app=True)}")
    for worker in rows:
        if worker.jobs:
            show_part(worker_name(worker))
            jobs = ((str(job.id), job.task, job.queue, ago(job.since)) for job in worker.jobs[:JOBS_SHOWN])
            show_rows(("id", "task", "queue", "claimed"), jobs)
    if hidden := len(entered) - len(rows):
        click.echo(
            f"\n{counted(hidden, 'worker')} fell silent within the last day without signing off: "
            f"{command('workers --all')} shows them"
        )
