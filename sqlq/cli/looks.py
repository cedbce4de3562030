"""Names and counts as text, and rows that stay legible on a narrow terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, TypeVar

import click

from sqlq.cli.output import Cell, Column, console, plain, show_json, show_table
from sqlq.config.command_hint import escaped

if TYPE_CHECKING:
    from rich.text import Text

    from sqlq.admin.queues import QueueStatus
    from sqlq.admin.workers import Asked, WorkerStatus

T = TypeVar("T")
NARROW = 60
"""On fewer columns a row is a block of `name: value` lines."""
LABEL = 13
INDENT = "  "


def queue_name(name: str) -> str:
    """Return a queue's name such that it can be seen, also where it is blank."""
    return plain(name) or repr(name)


def who(worker: WorkerStatus | Asked) -> str:
    """Return the name of a worker, where it has one, with its host and process."""
    return f"{'' if worker.name is None else worker.name + ' on '}{worker.host} pid {worker.pid}"


def number(queue: QueueStatus, name: str) -> str:
    """Return one of a queue's counts, with "+" where there may be more."""
    return f"{getattr(queue, name):,}{'+' if name in queue.capped else ''}"


def is_narrow() -> bool:
    """Whether lines are to be short."""
    return console().width < NARROW


def show_rows(columns: Sequence[Column], rows: Iterable[Sequence[Cell]]) -> None:
    """Print a table of rows, or where the terminal is too narrow for one a block for each row."""
    if not is_narrow():
        show_table(columns, rows)
        return
    for place, row in enumerate(rows):
        if place:
            click.echo()
        for column, cell in zip(columns, row, strict=True):
            text = cell[0] if isinstance(cell, tuple) else cell
            if text is not None and text != "":
                show_wrapped(f"{column.name}: ", f"{text:,}" if isinstance(text, int) else plain(text))


def show_list(
    columns: Sequence[Column],
    things: Sequence[T],
    row: Callable[[T], Sequence[Cell]],
    *,
    nothing: str,
    as_object: Callable[[T], object] = asdict,  # type: ignore[assignment]  # for dataclasses alone
    as_json: bool = False,
) -> None:
    """Print a list of things: as JSON, as a table, or the sentence that there is `nothing`."""
    if as_json:
        show_json([as_object(each) for each in things])
    elif things:
        show_rows(columns, [row(each) for each in things])
    else:
        click.echo(nothing)


def show_field(name: str, value: str) -> None:
    """Print a label and its value, which goes on below itself where it is too long for the line."""
    show_wrapped(f"{name:<{LABEL}} ", plain(value), before=INDENT)


def show_heading(text: str) -> None:
    """Print a line that stands over others, bold on a terminal."""
    from rich.text import Text

    _print(Text(plain(text), style="bold"))


def show_block(lines: str) -> None:
    """Print lines, each indented once more."""
    for line in lines.splitlines():
        text = line.lstrip()
        show_wrapped("", text, before=INDENT + " " * (len(line) - len(text)))


def show_wrapped(label: str, text: str, *, before: str = "") -> None:
    """Print text after a label that is bold on a terminal. Further lines begin below the first character of
    the text, or with a small indent where the terminal is narrow."""
    from rich.text import Text

    label, text = escaped(label), escaped(text)  # guard: looks-steer-no-terminal
    out = console()
    hanging = len(before) + len(label)
    if out.width - hanging < NARROW // 3:
        hanging = len(before) + 2
    wrapped = Text(text).wrap(out, max(out.width - hanging, 10))
    lines = [line.plain.rstrip() for line in wrapped] or [""]
    first = Text(before) + Text(label, style="bold")
    if hanging < len(before) + len(label) and first.cell_len + Text(lines[0]).cell_len > out.width:
        _print(first)
    else:
        _print(first + Text(lines.pop(0)))
    for line in lines:
        _print(Text(" " * hanging + line))


def _print(text: Text) -> None:
    text.rstrip()
    console().print(text, soft_wrap=True)
