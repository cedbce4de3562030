"""`sqlq keys`: make keys that sign or encrypt."""

from __future__ import annotations

import click


@click.group()
def keys() -> None:
    """Make keys that sign or encrypt arguments and results."""


@keys.command()
def new() -> None:
    """Print a new key.

    Keep it where you keep passwords, and not in the database. The key itself goes to standard output; its
    name, which anybody may see, to standard error.
    """
    from sqlq.payload.encryption import Key, new_key

    text = new_key()
    click.echo(text)
    click.echo(f"this is key {Key(text, 'the key').id}: give it to SQLQ_KEYS or App(keys=[…])", err=True)
