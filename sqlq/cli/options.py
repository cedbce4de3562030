"""The options that several commands have, and what commands share beside them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial, wraps
from pathlib import Path
from typing import Any, NoReturn

import click

from sqlq.admin.verb import Option as OfVerb
from sqlq.admin.verbs import ONES, OTHER_QUEUE, PRIORITY
from sqlq.errors import ConfigurationError

Option = Callable[[Any], Any]
"""A decorator that gives a command an option or an argument."""
flag = partial(click.option, is_flag=True)
duration = partial(click.option, metavar="DURATION")
number = partial(click.option, type=int, metavar="N")
port_option = partial(click.option, type=click.IntRange(0, 65535), metavar="PORT")
file_option = partial(click.option, type=click.Path(dir_okay=False, path_type=Path), metavar="FILE")
A_TIME = "2030-01-31T08:00:00+01:00"


def options(*each: Option) -> Option:
    """Return one decorator for several options or arguments, in this order."""

    def decorate(command: Any) -> Any:
        for option in reversed(each):
            command = option(command)
        return command

    return decorate


json_flag = flag("--json", "as_json", help="Print JSON with stable keys.")
takes_json = options(json_flag, click.pass_obj)
"""Lets a command take --json, and gives it the Context."""


def listing(function: Callable[..., None]) -> click.Group:
    """Make a group of commands. Without one of them it runs the function, which lists what there is.

    The options of the list before a command would count for nothing. They are refused."""

    @click.pass_context
    @wraps(function)
    def run(ctx: click.Context, /, **options: Any) -> None:
        if ctx.invoked_subcommand is None:
            function(**options)
            return
        for option in ctx.command.params:
            source = ctx.get_parameter_source(option.name or "")
            if option.expose_value and source is click.core.ParameterSource.COMMANDLINE:
                command = ctx.invoked_subcommand
                raise click.UsageError(
                    f"{option.opts[0]} comes after {command}, where {command} takes it", ctx
                )

    return click.group(invoke_without_command=True)(run)


# -- values --------------------------------------------------------------------------------------------------


def read_time(text: str) -> datetime:
    """Return the time that an option has."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a time like {A_TIME}") from None
    if time.utcoffset() is None:
        raise click.BadParameter(f"{text!r} has no time zone: add one, as in {text}+01:00, or Z for UTC")
    return time


def read_json(text: str) -> Any:
    """Return a JSON value, strictly: NaN and Infinity are none. Raises `ValueError`."""
    return json.loads(text, parse_constant=_refuse)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


# -- options -------------------------------------------------------------------------------------------------


TYPES: Mapping[str, Mapping[str, Any]] = {
    "text": {},
    "flag": {"is_flag": True},
    "number": {"type": int},
    "duration": {"metavar": "DURATION"},
    "time": {"type": read_time, "metavar": "TIME"},
    "age": {"metavar": "TIME"},
}
"""How a command reads the options of each kind."""


def option_of(verb_option: OfVerb) -> Option:
    """Return the option of a command for one of a verb."""
    metavar = {"metavar": verb_option.metavar} if verb_option.metavar else {}
    return click.option(
        verb_option.words, verb_option.name, help=verb_option.help, **{**TYPES[verb_option.kind], **metavar}
    )


def time_option(words: str, *names: str) -> Option:
    return click.option(*names, type=read_time, metavar="TIME", help=words)


def json_option(words: str, name: str, example: dict[str, Any]) -> Option:
    """Return an option whose value is a JSON object."""
    shown = json.dumps(example)

    def read(text: str) -> Any:
        try:
            value = read_json(text)
        except (ValueError, RecursionError) as error:
            raise click.BadParameter(f"not JSON: {error}") from None
        if not isinstance(value, dict):
            raise click.BadParameter(f"not a JSON object, as in '{shown}'")
        return value

    return click.option(name, type=read, metavar="JSON", help=f"{words}, as a JSON object: '{shown}'.")


those_of_one = options(*map(option_of, ONES))
job_options = options(
    click.argument("task"),
    click.argument("args", nargs=-1),
    json_option("Arguments by name", "--kwargs", {"copy": True}),
    option_of(OTHER_QUEUE),
    option_of(PRIORITY),
)
"""The task and arguments of a new job, its queue and priority."""
exact_option = flag("--exact", help="Count all jobs, beyond 10,000 too.")


def limit_option(default: int, words: str) -> Option:
    """Return the option that bounds how much is listed."""
    rows = click.IntRange(1, 10_000)
    return click.option("-n", "--limit", type=rows, default=default, show_default=True, help=words)


def worker_option(name: str) -> Option:
    """Return the option of a command that sets an option of workers."""
    from sqlq.worker.options import OPTIONS

    option = OPTIONS[name]
    words = f"{option.help} (default {option.default})." if option.default else f"{option.help}."
    names = filter(None, (option.letter, f"--{name.replace('_', '-')}"))
    if option.unit == "flag":
        return flag(*names, help=words)
    return click.option(*names, type=int if option.unit == "N" else None, metavar=option.unit, help=words)


yes_option = flag("-y", "--yes", help="Do not ask.")


def confirm(action: str) -> None:
    """Have a person confirm an action. Raises `ConfigurationError` where the answer is no, or nobody is
    there."""
    if not sys.stdin.isatty():
        raise ConfigurationError(f"nobody is here to confirm: {action}; nothing was done; --yes goes without")
    if not click.confirm(f"{action}?", err=True):
        raise ConfigurationError("nothing was done")
