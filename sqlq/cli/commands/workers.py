"""`sqlq workers`: list the workers and their jobs."""

from __future__ import annotations

import click

from sqlq.admin.verbs import who
from sqlq.admin.workers import WorkerStatus, since_it_said
from sqlq.cli.context import Context
from sqlq.cli.options import flag, listing, takes_json
from sqlq.cli.terminal.output import INDENT, ago, queue_name, show_heading, show_json, show_wrapped
from sqlq.config.command_hint import command
from sqlq.config.durations import age, counted, span

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
    found = [worker for worker in entered if worker.alive or silent]
    if as_json:
        show_json([worker.as_json() for worker in found])
        return
    for worker in found:
        _show(worker)
    if not found:
        click.echo(f"no worker is running: start one with {command('work', needs_app=True)}")
    if hidden := len(entered) - len(found):
        click.echo(
            f"\n{counted(hidden, 'worker')} fell silent within the last day without signing off: "
            f"{command('workers --all')} shows them"
        )


def _show(worker: WorkerStatus) -> None:
    """Print a worker, and under it a line for each job it holds, the longest held first."""

    heartbeat = f"{span(worker.silent_seconds)} ago"
    if not worker.alive:
        heartbeat = f"silent for {span(worker.silent_seconds)}"
    queues = "all" if worker.queues is None else ", ".join(map(queue_name, worker.queues))
    told = worker.state in ("paused", "stopping", "stuck")
    since = f" for {span(since_it_said(worker))}" if told else ""
    said = [
        f"version {worker.version}",
        f"heartbeat {heartbeat}",
        f"started {ago(worker.started_at)}",
        f"queues {queues}",
        f"slots {worker.concurrency}",
    ]
    show_heading(f"{who(worker)}: {worker.state}{since}" if worker.alive else who(worker))
    show_wrapped("", ", ".join(said), before=INDENT)
    shown = worker.jobs[:JOBS_SHOWN]
    ids = max((len(str(job.id)) for job in shown), default=0)
    spans = [age(job.since) for job in shown]
    for job, held in zip(shown, spans, strict=True):
        task = f"{job.task} (queue {queue_name(job.queue)})"
        show_wrapped(f"job {job.id:<{ids}}  {held:>{max(map(len, spans))}}  ", task, before=INDENT)
    if len(worker.jobs) > JOBS_SHOWN:
        show_wrapped("", f"… and {counted(len(worker.jobs) - JOBS_SHOWN, 'more', 'more')}", before=INDENT)
