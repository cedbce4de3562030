"""`sqlq doctor`: is the database, and the queue in it, well, and what to do where it is not."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from sqlq.cli.context import Context
from sqlq.cli.options import takes_json
from sqlq.cli.output import Cell, Column, counted, plain, show_json, show_table

if TYPE_CHECKING:
    from sqlq.admin.doctor.finding import Finding

STYLES = {"ok": "green", "check": "yellow", "to do": "bold red"}


@click.command()
@click.option("--deep", is_flag=True, help="On SQLite check the whole file, however large.")
@takes_json
def doctor(context: Context, deep: bool, as_json: bool) -> None:
    """Examine the database and the queue in it.

    It prints what to do. It looks at settings, migrations, open transactions, dead rows, LISTEN, stuck
    leases, queues without a worker, and more; it changes nothing. Each line is ok, something to check (it
    works, but you should know), or something to do (it does not work, or not for long). Exits with 1 if there
    is anything to do.
    """
    from sqlq.admin.doctor.finding import Verdict

    found = _examine(context, deep)
    worst = [finding for finding in found if finding.verdict is Verdict.TO_DO]
    if as_json:
        show_json({"well": not worst, "findings": [asdict(finding) for finding in found]})
    else:
        columns = [Column(""), Column("about"), Column("found")]
        show_table(columns, [_row(finding) for finding in found])
        checks = sum(finding.verdict is Verdict.CHECK for finding in found)
        click.echo(f"\n{counted(len(worst), 'thing')} to do, {checks:,} to check")
    if worst:
        raise SystemExit(1)


def _examine(context: Context, deep: bool) -> list[Finding]:
    """Examine; a database that cannot even be connected to is a finding, too. A URL that is none is bad
    input, as ever."""
    from sqlalchemy.exc import SQLAlchemyError

    from sqlq.admin.doctor.doctor import Doctor
    from sqlq.admin.doctor.finding import Finding, Verdict
    from sqlq.cli.problems import explain
    from sqlq.errors import ConfigurationError

    database = context.app().database
    try:
        return Doctor(database, deep=deep).examine()
    except (SQLAlchemyError, ConfigurationError) as error:
        return [Finding("connection", Verdict.TO_DO, explain(error, context) or str(error))]


def _row(finding: Finding) -> list[Cell]:
    said = plain(finding.said) + (f" → {plain(finding.remedy)}" if finding.remedy else "")
    return [(finding.verdict, STYLES[finding.verdict]), finding.check, said]
