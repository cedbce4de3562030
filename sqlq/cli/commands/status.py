"""`sqlq status` and `sqlq queues`: the contents of each queue, and the workers that serve it."""

from __future__ import annotations

import click

from sqlq.admin.queues import Pauses, QueueStatuses
from sqlq.admin.verbs import listed
from sqlq.cli.context import Context
from sqlq.cli.options import exact_option, listing, takes_json
from sqlq.cli.terminal.output import plain, queue_name, show_json, show_list, show_table
from sqlq.config.command_hint import command, word
from sqlq.config.durations import ending, span


@click.command()
@exact_option
@takes_json
def status(context: Context, exact: bool, as_json: bool) -> None:
    """Show what each queue holds, and who serves it.

    Jobs are counted by state: available, scheduled, blocked, running and failed; beside them stands how
    long the oldest has waited. A count ends at 10,000, shown as 10,000+. Beyond 100,000 failed
    jobs it is an estimate. --exact counts on. A queue that no live worker serves is marked. A worker
    counts as live for 90 seconds after its last heartbeat.
    """
    app, replica, behind = context.looking(), None, None
    if app is not context.app():
        with app.database.read() as conn:
            behind = app.database.dialect.health.burden(conn).behind_seconds
        replica = {"url": context.shown_url(), "behind_seconds": behind}
    queues, workers, pauses = app.queues.list(exact=exact), app.workers.list(), app.queues.pauses()
    if as_json:
        show_json(
            {
                "queues": [queue.as_json() for queue in queues],
                "workers": [{**worker.as_json(), "jobs": len(worker.jobs)} for worker in workers],
                "all_paused": pauses.all and pauses.all._asdict(),
                "replica": replica,
            }
        )
        return
    show_queues(context, queues, pauses)
    click.echo()
    show_list(workers, nothing=f"no worker is running: start one with {command('work', needs_app=True)}")
    unserved = [queue.queue for queue in queues if not queue.served and queue.available + queue.scheduled]
    if workers and unserved:
        click.echo(
            f"no worker serves {listed([*map(queue_name, unserved)])}: start one with "
            f"{command(f'work -q {word(unserved[0])}', needs_app=True)}, or without -q for all"
        )
    if replica is not None:
        lag = "how far it is behind is not known" if behind is None else f"{span(behind)} behind"
        click.echo(f"\nread from {plain(context.shown_url())}, {lag}")


def show_queues(context: Context, queues: QueueStatuses, pauses: Pauses) -> None:
    """Print what each queue holds, and which are paused."""
    if queues:
        show_table(queues)
        if queues.others:
            click.echo(f"and {queues.others:,} other queues")
    else:
        click.echo(f"no jobs wait, run or have failed in {context.shown_url()}")
    if pauses.all is not None:
        click.echo(
            f"\nall queues are paused{ending(pauses.all.until)}; go on with {command('queues resume --all')}"
        )
    if pauses.named:
        paused = ", ".join(f"{queue_name(name)}{ending(pause.until)}" for name, pause in pauses.named.items())
        first = word(next(iter(pauses.named)))
        click.echo(f"\npaused: {paused}; go on with {command(f'queues resume {first}')}")


@listing
@exact_option
@takes_json
def queues(context: Context, exact: bool, as_json: bool) -> None:
    """Show what each queue holds; pause and resume queues.

    Counts end at 10,000, shown as 10,000+. Beyond 100,000 failed jobs they are estimates. --exact counts
    on. sqlq status has the workers, too.
    """
    app = context.looking()
    rows = app.queues.list(exact=exact)
    if as_json:
        show_json([row.as_json() for row in rows])
    else:
        show_queues(context, rows, app.queues.pauses())
