"""`sqlq grants`: which rights a role of PostgreSQL needs for what it does, printed or given."""

from __future__ import annotations

import click

from sqlq.admin.grants import KINDS, grant
from sqlq.cli.context import Context
from sqlq.cli.options import flag
from sqlq.cli.terminal.output import plain


@click.command()
@click.argument("role")
@click.option("--as", "kind", type=click.Choice(KINDS), required=True, help="Kind of role.")
@flag("--only", help="Revoke all other privileges of the role on these tables first.")
@flag("--apply", "applies", help="Run the statements, as the owner of the tables.")
@click.pass_obj
def grants(context: Context, role: str, kind: str, only: bool, applies: bool) -> None:
    """Print the GRANTs that ROLE needs, or run them.

    A producer enqueues, a worker works, an operator does what these commands do, and a reader looks. An
    untrusted-producer enqueues plain jobs alone: no unique keys, limits, flows, follow-ups or schedules. A
    replacing-producer may also replace and debounce jobs, whosoever they are.

    \b
    sqlq grants shop_web --as producer --apply
    """
    statements = grant(context.app().database, kind, role, only=only, applies=applies)
    if applies:
        click.echo(f"{plain(role)} has the rights of the kind {kind} in {context.shown_url()}")
    else:
        click.echo(";\n".join(statements) + ";")
