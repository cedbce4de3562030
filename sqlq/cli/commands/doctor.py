"""`sqlq doctor`: is the database, and the queue in it, well, and what to do where it is not."""

from __future__ import annotations

import click
from sqlalchemy.exc import SQLAlchemyError

from sqlq.admin.doctor.doctor import examine
from sqlq.admin.doctor.finding import Verdict, to_do
from sqlq.admin.storage import storage
from sqlq.cli.context import Context
from sqlq.cli.options import flag, takes_json
from sqlq.cli.problems import explain
from sqlq.cli.terminal.output import show_json, show_table
from sqlq.config.durations import counted
from sqlq.errors import ConfigurationError


@click.command()
@flag("--sizes", help="Print sizes and the state of the database instead.")
@takes_json
def doctor(context: Context, sizes: bool, as_json: bool) -> None:
    """Examine the database and the queue in it.

    It prints what to do. It looks at settings, migrations, open transactions, dead rows, LISTEN, stuck
    leases, queues without a worker, and more; it changes nothing. Each line is ok, something to check (it
    works, but you should know), or something to do (it does not work, or not for long). Exits with 1 if there
    is anything to do.
    """

    if sizes:
        _show_sizes(context, as_json)
        return
    database = context.app().database
    try:
        rows = examine(database)
    except (SQLAlchemyError, ConfigurationError) as error:  # no connection is a finding, too
        rows = [to_do(explain(error, context) or str(error), check="connection")]
    worst = [finding for finding in rows if finding.verdict is Verdict.TO_DO]
    if as_json:
        show_json({"well": not worst, "findings": [finding.as_json() for finding in rows]})
    else:
        show_table(rows)
        checks = sum(finding.verdict is Verdict.CHECK for finding in rows)
        click.echo(f"\n{counted(len(worst), 'thing')} to do, {checks:,} to check")
    if worst:
        raise SystemExit(1)


def _show_sizes(context: Context, as_json: bool) -> None:
    rows = storage(context.app().database)
    if as_json:
        show_json(rows.as_json())
        return
    click.echo(rows.database)
    show_table(rows.readings)
    if rows.tables:
        click.echo()
        show_table(rows.tables)
