"""`sqlq status`: what each queue holds, and who serves it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from sqlq.cli.context import Context
from sqlq.cli.output import Cell, Column, ago, counted, json_option, show_json, show_table, span

if TYPE_CHECKING:
    from sqlq.admin import QueueStatus
    from sqlq.store.cluster import WorkerRow


@click.command()
@json_option
@click.pass_obj
def status(context: Context, as_json: bool) -> None:
    """Show per queue what is available, scheduled, running and failed, and how long the oldest job has waited.

    A queue that no live worker serves is marked. A worker counts as live for 90 seconds after its last heartbeat.
    """
    admin = context.app().admin
    queues, workers = admin.status(), admin.alive()
    if as_json:
        show_json({"queues": [asdict(queue) for queue in queues], "workers": [_worker_object(worker) for worker in workers]})
        return
    if queues:
        columns = [Column("queue")] + [Column(name, right=True) for name in ("available", "scheduled", "running", "failed", "oldest wait")]
        show_table([*columns, Column("served")], [_row(queue) for queue in queues])
    else:
        click.echo(f"no jobs wait, run or have failed in {context.place()}")
    if paused := [queue.queue for queue in queues if queue.paused]:
        click.echo(f"\npaused: {', '.join(paused)}; go on with sqlq resume {paused[0]}")
    click.echo()
    for worker in workers:
        named = "all queues" if worker.queues is None else ", ".join(json.loads(worker.queues))
        slots = counted(worker.concurrency, "slot")
        click.echo(f"worker {worker.host} pid {worker.pid}: {named}, {slots}, started {ago(worker.started_at)}, seen {ago(worker.seen_at)}")
    if not workers:
        click.echo("no worker is running: start one with sqlq --app module:attribute work")
    elif unserved := [queue.queue for queue in queues if not queue.served and queue.available + queue.scheduled]:
        click.echo(f"no worker serves {', '.join(unserved)}: start one with -q {unserved[0]}, or without -q for all")


def _row(queue: QueueStatus) -> list[Cell]:
    waiting = queue.available + queue.scheduled > 0
    served: Cell = "paused" if queue.paused else "yes" if queue.served else ("nobody", "bold red") if waiting else "nobody"
    failed: Cell = (f"{queue.failed:,}", "red") if queue.failed else 0
    wait = None if queue.oldest_wait_seconds is None else span(queue.oldest_wait_seconds)
    return [queue.queue, queue.available, queue.scheduled, queue.running, failed, wait, served]


def _worker_object(worker: WorkerRow) -> dict[str, object]:
    return {**asdict(worker), "queues": None if worker.queues is None else json.loads(worker.queues)}
