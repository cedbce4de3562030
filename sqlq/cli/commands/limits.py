"""`sqlq limits`: look at limits."""

from __future__ import annotations

import click

from sqlq.cli.context import Context
from sqlq.cli.options import limit_option, listing, takes_json
from sqlq.cli.terminal.output import show_list


@listing
@click.option("--prefix", default="", help="Keys with this prefix.")
@limit_option(100, "Maximum number of keys.")
@takes_json
def limits(context: Context, prefix: str, limit: int, as_json: bool) -> None:
    """List the keys of limits; set a limit, and clear it.

    Running are the jobs that hold a slot: they run, or are claimed next. Waiting are those without a slot.
    """
    of = f" with the prefix {prefix!r}" if prefix else ""
    nothing = f"no limits{of} in {context.shown_url()}: a worker that sees a job of a key adds it"
    show_list(context.looking().limits.list(prefix or None, limit=limit), nothing=nothing, as_json=as_json)
