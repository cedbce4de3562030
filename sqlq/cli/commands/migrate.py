"""`sqlq migrate`: create the tables, raise them to this version, look whether they are, or take them back."""

from __future__ import annotations

import time

import click
from sqlalchemy.exc import DBAPIError

from sqlq.cli.context import Context
from sqlq.cli.options import flag, worker_option
from sqlq.cli.terminal.output import naming_options
from sqlq.config.durations import readable
from sqlq.database import migrate as migrating
from sqlq.database import standing
from sqlq.database.database import Database
from sqlq.database.dialects import refusal
from sqlq.errors import SqlqError
from sqlq.schema import version
from sqlq.worker.options import setting

EVERY_SECONDS = 0.5


@click.command()
@flag(
    "--sql",
    "as_sql",
    help="Print the SQL that creates the tables in an empty database, without a connection.",
)
@flag(
    "--check",
    help="Change nothing; exit with 0 if this sqlq works with the tables, else with 1.",
)
@click.option(
    "--down",
    metavar="REVISION",
    help='Take the tables back to an older revision; "base" removes them. Refused while they hold jobs.',
)
@flag("--force", help="With --down: continue even if jobs are lost.")
@worker_option("wait")
@click.pass_obj
def migrate(
    context: Context,
    as_sql: bool,
    check: bool,
    down: str | None,
    force: bool,
    wait: str | None,
) -> None:
    """Create the tables, or bring them up to this version.

    Safe to run at every deploy, from several places at once, and while jobs are enqueued and worked on. The
    schema on PostgreSQL is the connection's default one, or SQLQ_SCHEMA.
    """
    if sum((as_sql, check, down is not None)) > 1:
        raise click.UsageError("--sql, --check and --down exclude each other: give one of them")
    if force and down is None:
        raise click.UsageError("--force is of use with --down only")
    with naming_options():
        wait_ms = setting("wait", wait) or 0
    app = context.app()
    engine, schema = app.database.engine, app.database.requested_schema
    if as_sql:
        click.echo(migrating.render_sql(engine.dialect.name, schema), nl=False)
        return
    if wait_ms:
        _wait(app.database, wait_ms)
    if check:
        state = standing.check(engine, schema)
        click.echo(state.message)
        if state.standing not in (standing.Standing.UP_TO_DATE, standing.Standing.AHEAD):
            raise SystemExit(1)
        return
    where = context.shown_url()
    if down is not None:
        before, after = migrating.downgrade(engine, schema, down, force=force)
        if after is None:
            click.echo(f"removed sqlq's tables from {where}")
        elif after == before:
            click.echo(f"sqlq's tables in {where} are at revision {after} already")
        else:
            click.echo(f"took sqlq's tables in {where} back from revision {before} to {after}")
        return
    if context.names_nothing():
        click.echo(f"no App and no database were named: using {where}", err=True)
    before = app.migrate()
    if before is None:
        click.echo(f"created sqlq's tables at revision {version.HEAD} in {where}")
    elif before < version.HEAD:
        click.echo(f"brought sqlq's tables in {where} from revision {before} to {version.HEAD}")
    else:
        click.echo(standing.check(engine, schema).message)


def _wait(database: Database, timeout_ms: int) -> None:
    """Wait until the database answers, or the time is over: then its error is that of the command."""
    until, text = time.monotonic() + timeout_ms / 1000, ""
    while time.monotonic() < until:
        try:
            with database.read():
                return
        except SqlqError:  # a file that is not there yet, which migrate makes
            return
        except DBAPIError as error:
            if not database.dialect.driver.problem(error).is_away:
                return
            if not text:
                text = (
                    f"the database is not up yet ({refusal(error)}): trying again for {readable(timeout_ms)}"
                )
                click.echo(text, err=True)
        time.sleep(EVERY_SECONDS)
