"""The output of commands: tables for people, JSON for programs.

On a terminal rich fits a table to its width, in colours. Into a pipe goes one line per row, uncut and without
colours or ruled lines, so that grep and awk work. COLUMNS limits that, too.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from sqlq.config.command_hint import STEERS
from sqlq.config.durations import span
from sqlq.config.json_text import in_json
from sqlq.errors import SqlqError

if TYPE_CHECKING:
    from rich.console import Console

UNLIMITED = 100_000

Cell: TypeAlias = str | int | tuple[str, str] | None
"""Text, a number, nothing, or text with a style."""


def console(*, err: bool = False) -> Console:
    from rich.console import Console

    found = Console(stderr=err, highlight=False, markup=False, emoji=False)
    if not found.is_terminal and not os.environ.get("COLUMNS"):
        found.width = UNLIMITED
    return found


def on_terminal() -> bool:
    """Return whether stderr is a terminal on which a line can be erased."""
    err = console(err=True)
    return err.is_terminal and not err.is_dumb_terminal and sys.stderr.isatty()


def show_json(value: Any) -> None:
    """Print one JSON document."""
    click.echo(in_json(value, indent=2))


def answer(value: Any, *lines: str, as_json: bool) -> None:
    """Print a value for programs, or lines for people."""
    if as_json:
        show_json(value)
    else:
        click.echo("\n".join(map(plain, lines)))


_CONTROL = re.compile(rf"[\x00-\x1f{STEERS}]+")


def plain(text: str) -> str:
    """Return text in one line, without characters by which a row could steer a terminal."""
    return _CONTROL.sub(" ", str(text)).strip()  # SQLite lets in bytes; guard: bytes-are-shown


def shortened(text: str, most: int) -> str:
    """Return text of at most so many characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def plain_lines(text: str) -> str:
    """The same, keeping line ends and indentation."""
    return "\n".join(_CONTROL.sub(" ", line).rstrip() for line in text.expandtabs().splitlines())


def ago(moment: datetime | None) -> str | None:
    """Return how long ago a time was, by this machine's clock."""
    return None if moment is None else f"{span((datetime.now(UTC) - moment).total_seconds())} ago"


@contextmanager
def naming_options(**others: str) -> Iterator[None]:
    """Rewrite an error of the library ("lease is …") so that it names this command's option ("--lease is …").
    `others` are the options of arguments that have another name in the library."""
    try:
        yield
    except SqlqError as error:
        subject, _, rest = str(error).partition(" ")
        names = dict(others)
        for option in click.get_current_context().command.params:
            longest = max(option.opts, key=len)
            names |= dict.fromkeys((str(option.name), longest[2:].replace("-", "_")), longest)
        if subject not in names:
            raise
        rest = rest.replace("give a timedelta or text such as", "give a duration such as")
        raise click.UsageError(f"{names[subject]} {rest}") from None
