"""`sqlq status` and `sqlq queues`: the contents of each queue, and the workers that serve it."""

from __future__ import annotations

from typing import Any

import click

from sqlq.admin.doctor.doctor import by_verdict, examine_queue
from sqlq.admin.doctor.finding import Verdict
from sqlq.admin.queues import QueueStatuses
from sqlq.app.app import App
from sqlq.cli.context import Context
from sqlq.cli.options import exact_option, listing, takes_json
from sqlq.cli.terminal.output import plain, show_json, show_table
from sqlq.config.durations import span


@click.command()
@exact_option
@takes_json
def status(context: Context, exact: bool, as_json: bool) -> None:
    """Show what is wrong, what each queue holds, and who serves it.

    The worst comes first; sqlq doctor examines the database, too. Jobs are counted by state: available,
    scheduled, blocked, running and failed; beside them stands how long the oldest has waited. A count ends
    at 10,000, shown as 10,000+. Beyond 100,000 failed jobs it is an estimate. --exact counts on. A queue that
    no live worker serves is marked. A worker counts as live for 90 seconds after its last heartbeat.
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
    _show(context, app, queues=queues, workers=workers, pauses=pauses)
    if workers:
        click.echo()
        show_table(workers)
    if replica is not None:
        lag = "how far it is behind is not known" if behind is None else f"{span(behind)} behind"
        click.echo(f"\nread from {plain(context.shown_url())}, {lag}")


def _show(context: Context, app: App, **known: Any) -> None:
    """Print what is wrong, and then what each queue holds."""
    findings = by_verdict(examine_queue(app.database, **known))
    lines = [plain(f"{each.verdict}: {each.text}") for each in findings if each.verdict != Verdict.OK]
    click.echo("\n".join([*lines, ""]), nl=bool(lines))
    show_queues(context, known["queues"])


def show_queues(context: Context, queues: QueueStatuses) -> None:
    """Print what each queue holds."""
    if queues:
        show_table(queues)
        if queues.others:
            click.echo(f"and {queues.others:,} other queues")
    else:
        click.echo(f"no jobs wait, run or have failed in {context.shown_url()}")


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
        _show(context, app, queues=rows)
