"""The output of commands: tables for people, JSON for programs.

On a terminal a table is fitted to its width, in colours. Into a pipe goes one line per row, uncut and without
colours or ruled lines, so that grep and awk work. COLUMNS limits that, too.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from sqlq.config.command_hint import STEERS
from sqlq.config.durations import counted, span
from sqlq.errors import SqlqError

if TYPE_CHECKING:
    from rich.console import Console

UNLIMITED = 100_000

Cell: TypeAlias = str | int | tuple[str, str] | None
"""Text, a number, nothing, or text with a style."""


@dataclass(frozen=True)
class Column:
    """A column of a table; the `wide` one gives way first when space is short."""

    name: str
    right: bool = False
    wide: bool = False


def console(*, err: bool = False) -> Console:
    from rich.console import Console

    class PipedConsole(Console):
        def on_broken_pipe(self) -> None:
            raise  # noqa: PLE0704 - rich calls this where it has caught the error, and would exit with 1

    found = PipedConsole(stderr=err, highlight=False, markup=False, emoji=False)
    if not found.is_terminal and not os.environ.get("COLUMNS"):
        found.width = UNLIMITED
    return found


def on_terminal() -> bool:
    """Return whether stderr is a terminal on which a line can be erased."""
    err = console(err=True)
    return err.is_terminal and not err.is_dumb_terminal and sys.stderr.isatty()


GAP = 2
LEAST_WIDE, LEAST = 30, 10
"""To how many characters the wide column, and then the others, are narrowed at most."""


def show_table(columns: Sequence[Column], rows: Iterable[Sequence[Cell]]) -> None:
    """Print a table of rows."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    out = console()
    cells = [
        [
            Text(plain(cell[0]), style=cell[1]) if isinstance(cell, tuple) else Text(_text(cell))
            for cell in row
        ]
        for row in rows
    ]
    natural = [
        max(len(column.name), *(row[i].cell_len for row in cells), 0) for i, column in enumerate(columns)
    ]
    # the box puts one space between columns by itself
    lined = out.is_terminal
    table = Table(
        box=box.SIMPLE_HEAD if lined else None,
        show_edge=False,
        pad_edge=False,
        padding=(0, GAP - lined, 0, 0),
        header_style="bold",
    )
    for column, width in zip(
        columns, _fitted(columns, natural, out.width - GAP * (len(columns) - 1)), strict=True
    ):
        table.add_column(
            column.name,
            width=width,
            justify="right" if column.right else "left",
            overflow="ellipsis" if column.wide else "fold",
            no_wrap=column.wide,
        )
    for row in cells:
        table.add_row(*row)
    if lined:
        out.print(table)
        return
    with out.capture() as captured:
        out.print(table)
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _fitted(columns: Sequence[Column], natural: Sequence[int], room: int) -> list[int]:
    """Return widths that fit into the room: the wide column gives way first, then whichever is the widest;
    its cells wrap.

    Left to itself rich narrows those that can wrap to nothing before it cuts the one that cannot.
    """
    widths = list(natural)
    for i, column in enumerate(columns):
        if column.wide:
            widths[i] = max(min(widths[i], LEAST_WIDE), widths[i] - max(0, sum(widths) - room))
    while sum(widths) > room and max(widths) > LEAST:
        widths[widths.index(max(widths))] -= 1
    return widths


DEEPEST = 10
"""Deeper levels of a value without a form as JSON are printed as text; so are circles."""


def show_json(value: Any) -> None:
    """Print one JSON document; times become ISO 8601 text with their offset."""
    click.echo(in_json(value, indent=2))


def answer(value: Any, *lines: str, as_json: bool) -> None:
    """Print a value for programs, or lines for people."""
    if as_json:
        show_json(value)
    else:
        click.echo("\n".join(lines))


def in_json(value: Any, *, indent: int | None = None) -> str:
    """Return any value as JSON. Values without a form in JSON become text. Characters without UTF-8, or that
    could steer a terminal, are escaped."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent, default=_encoded)
    except Exception:
        text = json.dumps(_with_a_form(value), ensure_ascii=False, indent=indent)  # guard: all-has-a-form
    return _STEERING.sub(lambda found: json.dumps(found[0])[1:-1], text)  # all are inside texts


def _with_a_form(value: Any, room: int = DEEPEST) -> Any:
    match value:
        case dict() if room:
            return {_words(key): _with_a_form(each, room - 1) for key, each in value.items()}
        case list() | tuple() if room:
            return [_with_a_form(each, room - 1) for each in value]
        case None | bool() | str():
            return value
        case int() | float() if math.isfinite(value):
            return value
    return _words(value)


def _words(value: Any) -> str:
    try:
        return str(_encoded(value))
    except Exception:  # its own `__str__`
        return f"<{type(value).__name__}>"


def _encoded(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else str(value)


def _text(cell: str | int | None) -> str:
    if cell is None:
        return "-"
    return f"{cell:,}" if isinstance(cell, int) else plain(cell)


_STEERING, _CONTROL = re.compile(f"[{STEERS}]+"), re.compile(rf"[\x00-\x1f{STEERS}]+")


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
def naming_options(*names: str, **others: str) -> Iterator[None]:
    """Rewrite an error of the library ("lease is …") so that it names the option ("--lease is …"); `others`
    are options of another name."""
    options = {**dict(zip(names, names, strict=True)), **others}
    try:
        yield
    except SqlqError as error:
        subject, _, rest = str(error).partition(" ")
        if subject not in options:
            raise
        rest = rest.replace("give a timedelta or text such as", "give a duration such as")
        raise click.UsageError(f"--{options[subject].replace('_', '-')} {rest}") from None


IDS_SHOWN = 20


def listed(ids: Sequence[int]) -> str:
    """Return ids for a sentence; of many only the first."""
    shown = ", ".join(map(str, ids[:IDS_SHOWN]))
    return shown if len(ids) <= IDS_SHOWN else f"{shown} and {counted(len(ids) - IDS_SHOWN, 'more', 'more')}"


def of(chosen: Mapping[str, Any], flow: int | None = None) -> str:
    """Return " of task … in queue … of group … of flow …" for the jobs that the options have chosen."""
    parts = {" of task ": chosen["task"], " in queue ": chosen["queue"], " of group ": chosen["group"]}
    parts[" of flow "] = flow
    return "".join(f"{words}{plain(str(value))}" for words, value in parts.items() if value)
