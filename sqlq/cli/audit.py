"""`sqlq audit`: see what operators did."""

from __future__ import annotations

import click

from sqlq.cli.context import Context
from sqlq.cli.options import limit_option, takes_json
from sqlq.cli.output import ago, show_list


@click.command()
@click.option("--actor", help="Of one person only.")
@click.option("--action", help="Of one kind only, as in 'queues pause'.")
@click.option("--before", type=int, metavar="ID", help="Older than this one.")
@limit_option(100, "At most so many.")
@takes_json
def audit(
    context: Context, actor: str | None, action: str | None, before: int | None, limit: int, as_json: bool
) -> None:
    """Show what operators did, the newest first.

    Each command that changes something leaves a row: who, when, what, and on how many rows. One without a
    number has not ended, or was interrupted. sqlq prune --audit AGE deletes old rows.
    """
    rows = context.looking().audit.list(limit=limit, before=before, actor=actor, action=action)
    show_list(
        ("id", "when", "who", "database user", "number", "command"),
        rows,
        lambda row: [
            str(row.id),
            ago(row.at),
            row.actor,
            row.database_user,
            "?" if row.number is None else row.number,
            row.target,
        ],
        nothing="no actions recorded",
        as_json=as_json,
    )
