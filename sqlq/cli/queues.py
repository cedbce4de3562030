"""`sqlq queues`: see what each queue holds, and pause and resume queues."""

from __future__ import annotations

import click

from sqlq.cli.act import acts
from sqlq.cli.context import Context
from sqlq.cli.options import duration, exact_option, flag, listing, takes_json
from sqlq.cli.output import show_json
from sqlq.cli.status import show_queues


@listing
@exact_option
@takes_json
def queues(context: Context, exact: bool, as_json: bool) -> None:
    """Show what each queue holds; pause and resume queues.

    Counts end at 10,000, shown as 10,000+; --exact counts on. sqlq status has the workers, too.
    """
    app = context.looking()
    rows = app.queues.status(exact=exact)
    if as_json:
        show_json([row.as_json() for row in rows])
    else:
        show_queues(context, rows, app.queues.pauses())


_names = click.argument("subjects", metavar="[QUEUE...]", nargs=-1)


@queues.command()
@_names
@flag("--all", help="All queues, those made later included.")
@duration("--for", "lasting", help="Resume by itself after so long, as in 10m.")
@acts("queues pause")
def pause() -> None:
    """Let no worker claim from queues until they are resumed.

    Running jobs and enqueueing go on. Workers that serve a paused queue by name wait as if it were empty. A
    pause of a queue counts from the next claim on, that of all queues within 2 seconds. To pause workers, and
    not queues: sqlq workers pause.
    """


@queues.command()
@_names
@flag("--all", help="End a pause of all queues.")
@acts("queues resume")
def resume() -> None:
    """Let workers claim from these queues again.

    With --all the pause of all queues ends; those that were paused by name stay so.
    """
