"""`sqlq workers`: list the workers and their jobs."""

from __future__ import annotations

import click

from sqlq.admin.verbs import worker_name
from sqlq.cli.context import Context
from sqlq.cli.options import flag, listing, takes_json
from sqlq.cli.terminal.output import ago, show_json, show_part, show_rows, show_table
from sqlq.config.command_hint import command
from sqlq.config.durations import counted

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
    if rows:
        show_table(rows)
    else:
        click.echo(f"no worker is running: start one with {command('work', needs_app=True)}")
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
