"""`sqlq workers`: who works, since when, and what each holds."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from sqlq.cli.context import Context
from sqlq.cli.output import Cell, Column, ago, counted, json_option, plain, show_json, show_table, span

if TYPE_CHECKING:
    from sqlq.admin import WorkerStatus
    from sqlq.store.cluster import Held

JOBS_SHOWN = 5


@click.command()
@click.option("--all", "silent", is_flag=True, help="Also workers that fell silent within the last day without signing off.")
@json_option
@click.pass_obj
def workers(context: Context, silent: bool, as_json: bool) -> None:
    """Show each worker: host, process, version, last heartbeat, queues, and the jobs it runs.

    A worker counts as alive for 90 seconds after its last heartbeat.
    """
    entered = context.app().admin.workers(silent=True)
    found = [worker for worker in entered if worker.alive or silent]
    if as_json:
        show_json([_object(worker) for worker in found])
        return
    if found:
        columns = [Column("host"), Column("pid", right=True), Column("version"), Column("heartbeat"), Column("started"), Column("queues")]
        show_table([*columns, Column("slots", right=True), Column("jobs", wide=True)], [_row(worker) for worker in found])
    else:
        click.echo("no worker is running: start one with sqlq --app module:attribute work")
    if hidden := len(entered) - len(found):
        click.echo(f"\n{counted(hidden, 'worker')} fell silent within the last day without signing off: sqlq workers --all shows them")


def _row(worker: WorkerStatus) -> list[Cell]:
    heartbeat: Cell = f"{span(worker.silent_seconds)} ago"
    if not worker.alive:
        heartbeat = (f"silent for {span(worker.silent_seconds)}", "bold red")
    queues = "all" if worker.queues is None else ", ".join(worker.queues)
    # a process id is a name: no separators
    return [worker.host, str(worker.pid), worker.version, heartbeat, ago(worker.started_at), queues, worker.concurrency, _jobs(worker.jobs)]


def _jobs(held: list[Held]) -> str | None:
    """The jobs held longest."""
    if not held:
        return None
    shown = [f"{job.id} {plain(job.task)}" for job in held[:JOBS_SHOWN]]
    more = [f"and {counted(len(held) - JOBS_SHOWN, 'more', 'more')}"] if len(held) > JOBS_SHOWN else []
    return ", ".join(shown + more)


def _object(worker: WorkerStatus) -> dict[str, object]:
    jobs = [{"id": job.id, "task": job.task, "queue": job.queue, "reserved_at": job.since} for job in worker.jobs]
    return {**asdict(worker), "jobs": jobs}
