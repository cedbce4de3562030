"""`sqlq keys`: make keys, see which of them rows are sealed with, and seal rows anew."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from sqlq.cli.context import Context
from sqlq.cli.looks import show_rows
from sqlq.cli.output import Cell, Column, counted, json_option, plain, show_json

if TYPE_CHECKING:
    from sqlq.admin.keys import KeyUse, Rotated, Rotation

TOLD_SECONDS = 2.0
STYLES = {"unknown": "bold red", "first": "green", "plain": "dim"}
STATES = {"first": "here, and seals", "known": "here", "unknown": "not here", "plain": "not sealed"}

_finished = click.option("--finished", is_flag=True, help="Finished jobs and their results, too.")


@click.group()
def keys() -> None:
    """Make keys, see what is sealed with them, and seal rows anew.

    The keys are those of the App (-a), or of SQLQ_KEYS.
    """


@keys.command()
def new() -> None:
    """Print a new key.

    Keep it where you keep passwords, and not in the database. The key itself goes to standard output; what
    names it, and may be shown to anybody, to standard error.
    """
    from sqlq.payload.encryption import Key, new_key

    text = new_key()
    click.echo(text)
    click.echo(f"this is key {Key(text, 'the key').id}: see SQLQ_KEYS, and sqlq keys rotate --help", err=True)


@keys.command("list")
@json_option
@click.pass_obj
def list_keys(context: Context, as_json: bool) -> None:
    """Count what is sealed with which key.

    Reads all rows, and needs no key for that.
    """
    found = _rotation(context).uses()
    if as_json:
        show_json([asdict(each) for each in found])
    elif found:
        columns = [Column("in"), Column("rows", right=True), Column("sealed"), Column("key"), Column("state")]
        show_rows(columns, [_row(each) for each in found])
    else:
        click.echo(f"there are no rows in {context.shown_url()}")


def _row(use: KeyUse) -> list[Cell]:
    return [
        use.where,
        use.number,
        use.how or "-",
        use.key or "-",
        (STATES[use.state], STYLES.get(use.state, "")),
    ]


@keys.command()
@_finished
@json_option
@click.pass_obj
def check(context: Context, finished: bool, as_json: bool) -> None:
    """Open every sealed row, and say which do not open.

    Of waiting, running and failed jobs, and of schedules; changes nothing. Exits with 1 if one does not open:
    its key is not here, or it was altered.
    """
    done = _rotation(context).check(finished=finished)
    if as_json:
        show_json(_object(done, "opened"))
    else:
        click.echo(f"{counted(sum(done.sealed.values()), 'sealed text')} opened, {done.bad:,} did not")
        _show_bad(done)
    if done.bad:
        raise SystemExit(1)


@keys.command()
@_finished
@click.option(
    "--plain",
    is_flag=True,
    help="Seal plain rows as well: you trust what is there now. For the day on which you begin to seal.",
)
@json_option
@click.pass_obj
def rotate(context: Context, finished: bool, plain: bool, as_json: bool) -> None:
    """Seal rows anew with the first key, so that the others can be taken away.

    Waiting, running and failed jobs, and schedules, in small transactions and past rows that others have
    locked. It may be broken off at any moment, and started again. Deploy the keys first: the new one first
    in the list, the old one behind it, everywhere. Exits with 1 if rows are left that could not be sealed.
    """
    done = _rotation(context).rotate(
        finished=finished, plain=plain, told=_progress() if not as_json else _quiet
    )
    if as_json:
        show_json({**_object(done, "sealed"), "left": done.left})
    else:
        parts = [f"{number:,} in {where}" for where, number in done.sealed.items() if number]
        nothing = "nothing, all is sealed with the first key" if not (done.bad or done.left) else "nothing"
        click.echo(f"sealed anew: {', '.join(parts) or nothing}")
        _show_bad(done)
        if done.left:
            click.echo(f"{counted(done.left, 'text')} left, of rows that others had locked: run it again")
    if done.bad or done.left:
        raise SystemExit(1)


def _rotation(context: Context) -> Rotation:
    from sqlq.admin.keys import Rotation

    return Rotation(context.app(needs_code=True).database)


def _object(done: Rotated, word: str) -> dict[str, object]:
    return {word: done.sealed, "bad": done.bad, "why": done.why}


def _show_bad(done: Rotated) -> None:
    for why in done.why:
        click.echo(f"sqlq: {plain(why)}", err=True)
    if done.bad > len(done.why):
        click.echo(f"sqlq: and {done.bad - len(done.why):,} more", err=True)


def _quiet(where: str, number: int) -> None:
    pass


def _progress() -> Callable[[str, int], None]:
    """Return what says now and then how far it is."""
    total, told_at = 0, time.monotonic()

    def told(where: str, number: int) -> None:
        nonlocal total, told_at
        total += number
        if time.monotonic() >= told_at + TOLD_SECONDS:
            told_at = time.monotonic()
            click.echo(f"{total:,} sealed anew, now in {where}", err=True)

    return told
