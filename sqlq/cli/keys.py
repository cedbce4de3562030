"""`sqlq keys`: make keys, count the rows of each, and encrypt rows anew."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from sqlq.cli.context import Context
from sqlq.cli.looks import show_list
from sqlq.cli.options import listing, takes_json
from sqlq.cli.output import Cell, Column, answer, plain
from sqlq.config.durations import counted

if TYPE_CHECKING:
    from sqlq.admin.keys import KeyUse, Rotated, Rotation

TOLD_SECONDS = 2.0
STYLES = {"unknown": "bold red", "first": "green", "plain": "dim"}
STATES = {"first": "here, and seals", "known": "here", "unknown": "not here", "plain": "not sealed"}


@listing
@takes_json
def keys(context: Context, as_json: bool) -> None:
    """Count the rows of each key; make keys, and seal rows anew.

    The keys are those of the App (-a), or of SQLQ_KEYS. The count reads all rows, and needs no key.
    """
    columns = [Column("in"), Column("rows", right=True), Column("sealed"), Column("key"), Column("state")]
    nothing = f"there are no rows in {context.shown_url()}"
    show_list(columns, _rotation(context).uses(), _row, nothing=nothing, as_json=as_json)


def _row(use: KeyUse) -> list[Cell]:
    state = (STATES[use.state], STYLES.get(use.state, ""))
    return [use.where, use.number, use.how or "-", use.key or "-", state]


@keys.command()
def new() -> None:
    """Print a new key.

    Keep it where you keep passwords, and not in the database. The key itself goes to standard output; its
    name, which anybody may see, to standard error.
    """
    from sqlq.payload.encryption import Key, new_key

    text = new_key()
    click.echo(text)
    click.echo(f"this is key {Key(text, 'the key').id}: see SQLQ_KEYS, and sqlq keys rotate --help", err=True)


@keys.command()
@click.option("--finished", is_flag=True, help="Finished jobs and their results, too.")
@click.option(
    "--plain",
    is_flag=True,
    help="Seal plain rows as well: you trust what is there now. For the day on which you begin to seal.",
)
@click.option(
    "--check", is_flag=True, help="Open every sealed row, say which do not open, and change nothing."
)
@takes_json
def rotate(context: Context, finished: bool, plain: bool, check: bool, as_json: bool) -> None:
    """Seal rows anew with the first key, so that the others can be taken away.

    Waiting, running and failed jobs, and schedules, in small transactions and past rows that others have
    locked. It may be broken off at any time, and started again. Deploy the keys first: the new one first in
    the list, the old one behind it, everywhere. Exits with 1 if it could not seal some rows. With
    --check it exits with 1 if a row does not open: its key is not here, or it was altered.
    """
    if check and plain:
        raise click.UsageError("--check changes nothing: leave out --plain")
    rotation = _rotation(context)
    if check:
        done = rotation.check(finished=finished)
        opened = counted(sum(done.sealed.values()), "sealed text")
        lines = [f"{opened} opened, {done.bad:,} did not"]
    else:
        done = rotation.rotate(finished=finished, plain=plain, told=_quiet if as_json else _progress())
        parts = [f"{number:,} in {where}" for where, number in done.sealed.items() if number]
        nothing = "nothing" if done.bad or done.left else "nothing, all is sealed with the first key"
        lines = [f"sealed anew: {', '.join(parts) or nothing}"]
    value = {"opened" if check else "sealed": done.sealed, "bad": done.bad, "why": done.why}
    answer(value if check else {**value, "left": done.left}, *lines, as_json=as_json)
    if not as_json:
        _show_bad(done)
        if done.left:
            click.echo(f"{counted(done.left, 'text')} left, of rows that others had locked: run it again")
    if done.bad or done.left:
        raise SystemExit(1)


def _rotation(context: Context) -> Rotation:
    from sqlq.admin.keys import Rotation

    return Rotation(context.app(needs_code=True).database)


def _show_bad(done: Rotated) -> None:
    for why in done.why:
        click.echo(f"sqlq: {plain(why)}", err=True)
    if done.bad > len(done.why):
        click.echo(f"sqlq: and {done.bad - len(done.why):,} more", err=True)


def _quiet(where: str, number: int) -> None:
    pass


def _progress() -> Callable[[str, int], None]:
    """Return a callback that prints the progress every 2 seconds."""
    total, told_at = 0, time.monotonic()

    def told(where: str, number: int) -> None:
        nonlocal total, told_at
        total += number
        if time.monotonic() >= told_at + TOLD_SECONDS:
            told_at = time.monotonic()
            click.echo(f"{total:,} sealed anew, now in {where}", err=True)

    return told
