"""Commands that do the same for each App of a mapping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import click

from sqlq.cli.context import Context
from sqlq.cli.looks import show_heading
from sqlq.cli.output import plain, show_json
from sqlq.config import command_hint


def for_each_app(context: Context, do: Callable[[Context], Any], *, as_json: bool = False) -> NoReturn:
    """Do this for each App that is named, under its name, and exit. The code is 1 where it raised an error,
    or returned False, for one of them.
    With `as_json` print what it returned, by the names. A database that does not answer keeps no other from
    its turn."""
    from sqlq.cli.problems import explain

    results: dict[str, Any] = {}
    failed = False
    for name, member in context.members().items():
        if not as_json:
            click.echo("\n" if results else "", nl=False)
            show_heading(f"App {plain(name)}")
        command_hint.current = member  # its sentences name this App
        try:
            results[name] = do(member)
            failed = failed or results[name] is False
        except Exception as error:
            sentence = explain(error, member)
            if sentence is None:
                raise
            failed, results[name] = True, {"error": sentence}
            if not as_json:
                click.echo(sentence)
    if as_json:
        show_json({"apps": results})
    raise SystemExit(1 if failed else 0)
