"""`sqlq queues`: see what each queue holds."""

from __future__ import annotations

from sqlq.cli.commands.status import show_queues
from sqlq.cli.context import Context
from sqlq.cli.options import exact_option, listing, takes_json
from sqlq.cli.terminal.output import show_json


@listing
@exact_option
@takes_json
def queues(context: Context, exact: bool, as_json: bool) -> None:
    """Show what each queue holds; pause and resume queues.

    Counts end at 10,000, shown as 10,000+; --exact counts on. sqlq status has the workers, too.
    """
    app = context.looking()
    rows = app.queues.list(exact=exact)
    if as_json:
        show_json([row.as_json() for row in rows])
    else:
        show_queues(context, rows, app.queues.pauses())
