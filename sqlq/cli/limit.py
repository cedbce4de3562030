"""`sqlq limit`: look at limits, and change what they allow until that is cleared."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from sqlq.cli.context import Context
from sqlq.cli.looks import show_rows
from sqlq.cli.output import Cell, Column, ago, json_option, limit_option, naming_options, plain, show_json

if TYPE_CHECKING:
    from sqlq.model.limit import LimitStatus


@click.group()
def limit() -> None:
    """List limits, set one, and clear what was set."""


@limit.command("list")
@click.argument("prefix", default="")
@limit_option(100, "At most so many keys.")
@json_option
@click.pass_obj
def list_limits(context: Context, prefix: str, limit: int, as_json: bool) -> None:
    """List the keys of limits, of those only that begin with PREFIX.

    Running are the jobs that hold a slot: they run, or were admitted and are claimed next. Waiting are those
    in line.
    """
    found = context.app().limits.list(prefix, limit=limit)
    if as_json:
        show_json([_object(each) for each in found])
    elif found:
        columns = [Column("key", wide=True), Column("limit"), Column("running", right=True)]
        columns += [Column("waiting", right=True), Column("oldest due"), Column("next start"), Column("set")]
        show_rows(columns, [_row(each) for each in found])
    else:
        of = f" with the prefix {plain(prefix)!r}" if prefix else ""
        click.echo(f"no limits{of} in {context.shown_url()}: a worker that sees a job of a key adds it")


@limit.command("set")
@click.argument("key")
@click.option("--running", type=int, help="At most so many at a time.")
@click.option("--rate", help="At most so many starts in a period, as in 100/1m.")
@json_option
@click.pass_obj
def set_limit(context: Context, key: str, running: int | None, rate: str | None, as_json: bool) -> None:
    """Set what KEY allows, whatever its tasks say, until it is cleared.

    What is not given is no limit any more. What runs already runs on.
    """
    if running is None and rate is None:
        raise click.UsageError("say what is allowed: --running, --rate or both")
    app = context.app(needs_code=True)
    known = app.limits.is_known(key)
    with naming_options("running", "rate"):
        found = app.limits.set(key, running=running, rate=rate)
    if as_json:
        show_json(_object(found))
    else:
        unknown = (
            "" if known else "; nothing else is known of this key: no job and no limit of the App has it"
        )
        click.echo(f"{plain(key)}: {found.says}, until it is cleared{unknown}")


@limit.command("clear")
@click.argument("key")
@json_option
@click.pass_obj
def clear(context: Context, key: str, as_json: bool) -> None:
    """Let the tasks of KEY say again what it allows.

    That is what the App declares for this key. Of a key that is made from arguments the next job that is
    enqueued says it; until then what was set counts.
    """
    found = context.app(needs_code=True).limits.clear(key)
    if as_json:
        show_json(_object(found))
    else:
        click.echo(f"{plain(key)}: {found.says}, until a job is enqueued that says something else")


def _object(found: LimitStatus) -> dict[str, Any]:
    return {**asdict(found), "says": found.says}


def _row(found: LimitStatus) -> list[Cell]:
    return [
        found.key,
        found.says,
        found.running,
        (f"{found.waiting:,}{'+' if found.is_capped else ''}", "yellow" if found.waiting else ""),
        ago(found.oldest_due_at),
        "-" if found.next_start_seconds is None else f"in {found.next_start_seconds:.3g} s",
        "-" if found.set_at is None else f"by an operator {ago(found.set_at)}",
    ]
