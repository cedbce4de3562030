"""`sqlq audit`: see what operators did."""

from __future__ import annotations

from typing import Any

import click

from sqlq.cli.context import Context
from sqlq.cli.options import limit_option, takes_json
from sqlq.cli.terminal.output import show_list


@click.command()
@click.option("--actor", help="Actions of this person.")
@click.option("--action", help="Actions of this kind, as in 'queues pause'.")
@click.option("--before", type=int, metavar="ID", help="Actions older than this id.")
@limit_option(100, "Maximum number of rows.")
@takes_json
def audit(context: Context, /, as_json: bool, **fields: Any) -> None:
    """Show what operators did, the newest first.

    Each command that changes something leaves a row: who, when, what, and on how many rows. One without a
    number has not ended, or was interrupted. sqlq prune --audit AGE deletes old rows.
    """
    show_list(context.looking().audit.list(**fields), nothing="no actions recorded", as_json=as_json)
