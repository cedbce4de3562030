"""`sqlq workers`: who works, since when, and what each holds."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from sqlq.cli.context import Context
from sqlq.cli.looks import INDENT, is_narrow, queue_name, show_heading, show_wrapped
from sqlq.cli.output import ago, counted, json_option, show_json, span

if TYPE_CHECKING:
    from sqlq.admin import WorkerStatus

JOBS_SHOWN = 10
"""Of each worker; --json has all of them."""


@click.command()
@click.option(
    "--all",
    "silent",
    is_flag=True,
    help="Also workers that fell silent within the last day without signing off.",
)
@json_option
@click.pass_obj
def workers(context: Context, silent: bool, as_json: bool) -> None:
    """Show the workers, and the jobs that each runs.

    Also host, process, version, last heartbeat and queues of each. A worker counts as alive for 90
    seconds after its last heartbeat.
    """
    from sqlq.commandline import command

    entered = context.app().admin.workers(silent=True)
    found = [worker for worker in entered if worker.alive or silent]
    if as_json:
        show_json([_object(worker) for worker in found])
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
    said = [
        ("version", worker.version),
        ("heartbeat", heartbeat),
        ("started", str(ago(worker.started_at))),
        ("queues", queues),
        ("slots", str(worker.concurrency)),
    ]
    show_heading(f"{worker.host} pid {worker.pid}")
    if is_narrow():
        for name, value in said:
            show_wrapped(f"{name}: ", value, before=INDENT)
    else:
        show_wrapped("", ", ".join(f"{name} {value}" for name, value in said), before=INDENT)
    shown = worker.jobs[:JOBS_SHOWN]
    ids = max((len(str(job.id)) for job in shown), default=0)
    spans = [str(ago(job.since)).removesuffix(" ago") for job in shown]
    for job, held in zip(shown, spans, strict=True):
        task = f"{job.task} (queue {queue_name(job.queue)})"
        show_wrapped(f"job {job.id:<{ids}}  {held:>{max(map(len, spans))}}  ", task, before=INDENT)
    if len(worker.jobs) > JOBS_SHOWN:
        show_wrapped("", f"… and {counted(len(worker.jobs) - JOBS_SHOWN, 'more', 'more')}", before=INDENT)


def _object(worker: WorkerStatus) -> dict[str, object]:
    jobs = [
        {"id": job.id, "task": job.task, "queue": job.queue, "reserved_at": job.since} for job in worker.jobs
    ]
    return {**asdict(worker), "jobs": jobs}
