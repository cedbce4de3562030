"""`sqlq failed`: count failed jobs by error."""

from __future__ import annotations

from typing import Any

import click

from sqlq.admin.verbs import of
from sqlq.cli.context import Context
from sqlq.cli.options import flag, limit_option, takes_json, those_of_one
from sqlq.cli.terminal.output import show_json, show_list
from sqlq.config.durations import counted


@click.command()
@those_of_one
@flag("--exact", help="Count all failed jobs, not only the newest 10,000.")
@limit_option(100, "Maximum number of errors.")
@takes_json
def failed(context: Context, /, exact: bool, limit: int, as_json: bool, **fields: Any) -> None:
    """Count failed jobs by task and error, the most frequent first.

    sqlq jobs --state failed lists them, and sqlq show has all about one.
    """
    errors, is_complete = context.looking().jobs.failures(**fields, exact=exact)
    if as_json:
        show_json({"errors": [each.as_json() for each in errors[:limit]], "capped": not is_complete})
        return
    show_list(errors[:limit], nothing=f"no failed jobs{of(fields)}")
    if len(errors) > limit:
        click.echo(f"\nand {counted(len(errors) - limit, 'other error')}; --limit N shows more")
    if not is_complete:
        click.echo("\nof the newest 10,000 failed jobs; --exact counts all of them")
