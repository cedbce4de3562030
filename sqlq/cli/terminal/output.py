"""The output of commands: tables and fields for people, JSON for programs.

On a terminal rich fits a table to its width, in colours. Into a pipe goes one line per row, uncut and without
colours or ruled lines, so that grep and awk work. COLUMNS limits that, too.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from sqlq.config.command_hint import STEERS, escaped
from sqlq.config.durations import about, ago, in_units, until, written
from sqlq.config.json_text import AsJson, document
from sqlq.errors import SqlqError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

UNLIMITED = 100_000

Cell = str | int | tuple[str, str] | None
"""Text, a number, nothing, or text with a style."""


def console(*, err: bool = False) -> Console:
    from rich.console import Console

    output = Console(stderr=err, highlight=False, markup=False, emoji=False)
    if not output.is_terminal and not os.environ.get("COLUMNS"):
        output.width = UNLIMITED
    return output


def on_terminal() -> bool:
    """Return whether stderr is a terminal on which a line can be erased."""
    err = console(err=True)
    return err.is_terminal and not err.is_dumb_terminal and sys.stderr.isatty()


def show_json(value: Any) -> None:
    """Print one JSON document."""
    click.echo(document(value), nl=False)


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


def dated(time: datetime | None) -> str | None:
    """Return a time, and how long ago it was."""
    return None if time is None else f"{written(time)} ({ago(time)})"


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
            words = max(option.opts, key=len)
            names |= dict.fromkeys((str(option.name), words[2:].replace("-", "_")), words)
        if subject not in names:
            raise
        raise click.UsageError(f"{names[subject]} {rest}") from None


# -- tables and fields -------------------------------------------------------------------------------------

LABEL, LEAST = 13, 20
INDENT = "  "


def queue_name(name: str) -> str:
    """Return a queue's name such that it can be seen, also where it is blank."""
    return plain(name) or repr(name)


STYLES = {
    **dict.fromkeys(("ok", "running", "finished"), "green"),
    **dict.fromkeys(("check", "blocked", "paused"), "yellow"),
    **dict.fromkeys(("failed", "failing"), "red"),
    **dict.fromkeys(("cancelled", "retired", "ended"), "dim"),
    **dict.fromkeys(("to do", "no worker"), "bold red"),
}


RIGHT = (
    *("id", "step", "attempts", "number", "newest", "ticks", "skipped", "rows", "dead", "size", "indexes"),
    *("available", "scheduled", "blocked", "running", "failed", "waiting", "oldest wait"),
)
"""The names of columns that are aligned on the right."""
OPTIONAL = frozenset({"progress", "label", "opens"})
"""Those that are left out where no row has a value."""


def show_rows(names: Sequence[str], rows: Iterable[Sequence[Cell]]) -> None:
    """Print a table with columns of these names."""
    from rich import box
    from rich.table import Table

    lined = console().is_terminal
    table = Table(
        box=box.SIMPLE_HEAD if lined else None,  # which puts a space between columns by itself
        show_edge=False,
        pad_edge=False,
        padding=(0, 2 - lined, 0, 0),
        header_style="bold",
    )
    for name in names:
        table.add_column(name, justify="right" if name in RIGHT else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(_text, row))
    _print(table)


def _text(cell: Cell) -> Text:
    from rich.text import Text

    if isinstance(cell, tuple):
        return Text(plain(cell[0]), style=cell[1])
    return Text("-" if cell is None else f"{cell:,}" if isinstance(cell, int) else plain(cell))


def show_list(things: Sequence[AsJson], *, nothing: str, as_json: bool = False) -> None:
    """Print a list of things: as JSON, as a table, or the sentence that there is `nothing`."""
    if as_json:
        show_json([each.as_json() for each in things])
    elif things:
        show_table(things)
    else:
        click.echo(plain(nothing))


def show_table(things: Sequence[Any], *left_out: str) -> None:
    """Print the columns of things of one class, but for those left out."""
    columns: dict[str, list[Any]] = {}
    for column in things[0].COLUMNS:
        name, _, attribute = column.partition("=")
        values = [getattr(thing, attribute or name) for thing in things]
        if name not in left_out and (name not in OPTIONAL or any(value is not None for value in values)):
            columns[name] = [_cell(thing, name, value) for thing, value in zip(things, values, strict=True)]
    show_rows([*columns], zip(*columns.values(), strict=True))


def _cell(thing: Any, name: str, value: Any) -> Cell:
    if isinstance(value, datetime):
        return written(value) if name in ("next", "for") else until(value) if name == "time" else ago(value)
    if name in ("state", "served", "verdict"):
        return str(value), STYLES.get(value, "")
    if name in ("size", "indexes"):
        return None if value is None else in_units(value)
    if name == "after":
        return ", ".join(str(id) if when == "success" else f"{id} ({when})" for id, when in value.items())
    if isinstance(value, dict):
        return ", ".join(f"{index} {in_units(size)}" for index, size in value.items())
    if name == "attempts":
        return f"{value}/{thing.max_attempts or '?'}"
    if name == "queue":
        return queue_name(value)
    if name in getattr(thing, "estimated", ()):
        return about(value), "red"
    if name in ("failed", "waiting") or name in getattr(thing, "capped", ()):
        style = {"failed": "red", "waiting": "yellow"}.get(name, "") if value else ""
        return f"{value:,}{'+' if name in thing.capped else ''}", style
    return value if value is None or (isinstance(value, int) and name not in ("id", "newest")) else str(value)


def show_fields(values: Mapping[str, object]) -> None:
    """Print labels and their values, but for those that are None. A value goes on below itself where it is
    too long for the line."""
    for name, value in values.items():
        if value is not None:
            show_wrapped(f"{name:<{LABEL}} ", plain(str(value)), before=INDENT)


def show_heading(text: str) -> None:
    """Print a line that stands over others, bold on a terminal."""
    show_wrapped(plain(text), "")


def show_part(text: str) -> None:
    """Print a heading after an empty line."""
    click.echo()
    show_heading(text)


def show_block(text: str) -> None:
    """Print lines, each indented once more, without characters by which one could steer a terminal."""
    for line in text.expandtabs().splitlines() or ["-"]:
        spaces = len(line) - len(line.lstrip(" "))
        show_wrapped("", plain(line), before=INDENT + " " * spaces)


def show_wrapped(label: str, text: str, *, before: str = "") -> None:
    """Print text after a label that is bold on a terminal. Further lines begin below the first character of
    the text. A label that leaves no room is not cut: it may be a command to copy."""
    from rich.text import Text

    label, text = escaped(label), escaped(text)  # guard: looks-steer-no-terminal
    out = console()
    start = Text(before) + Text(label, style="bold")
    for line in Text(text).wrap(out, max(out.width - start.cell_len, LEAST)) or [Text()]:
        _print(start + line, soft_wrap=True)
        start = Text(" " * start.cell_len)


def _print(renderable: Table | Text, *, soft_wrap: bool = False) -> None:
    """Print without the spaces at the ends of lines."""
    out = console()
    with out.capture() as captured:
        out.print(renderable, soft_wrap=soft_wrap)
    lines = (line.rstrip() for line in captured.get().splitlines())
    click.echo("\n".join(lines), color=out.is_terminal)
