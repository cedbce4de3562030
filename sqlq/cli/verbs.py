"""The commands that do the verbs of operators: `sqlq retry`, `sqlq queues pause`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import click

from sqlq.admin.verb import JobSelection, Option, Verb
from sqlq.admin.verbs import of
from sqlq.cli.context import Context
from sqlq.cli.options import confirm, json_flag, option_of, yes_option
from sqlq.cli.terminal.output import answer, naming_options, plain
from sqlq.config.command_hint import command as quoted
from sqlq.config.durations import counted
from sqlq.errors import ConfigurationError

MOST_COUNTED = 100_000
"""Jobs are counted up to here before a command wants a yes."""


def command_of(verb: Verb) -> click.Command:
    """Return the command that does a verb."""
    several = verb.subjects.rstrip("]").endswith("...")
    subjects = click.Argument(
        ["subjects"],
        metavar=verb.subjects,
        type=int if verb.is_of_jobs else None,
        nargs=-1 if several else 1,
        required=not verb.subjects.startswith("["),
    )
    command = click.Command(
        verb.words.rpartition(" ")[2],
        params=[subjects],
        callback=click.pass_obj(partial(_run, verb)),
        help=verb.help,
    )
    confirmed = [yes_option] if verb.confirms else []
    for option in (*map(option_of, (*verb.chosen_by, *verb.options)), *confirmed, json_flag):
        option(command)
    return command


def _run(
    verb: Verb, context: Context, /, subjects: Any, as_json: bool, yes: bool = False, **options: Any
) -> None:
    named = subjects if isinstance(subjects, tuple) else (subjects,)
    choices = [each for each in verb.chosen_by if options[each.name] not in (None, False)]
    _check(verb, named, choices)
    app = context.app(needs_code=verb.needs_code)
    if error := options.pop("error", None):
        named = tuple(app.jobs.failed_alike(error))
        if not named:
            raise ConfigurationError(f"no failed job has the error {error!r}: see {quoted('failed')}")
    if not yes and not subjects and any(each.name in verb.confirms for each in choices):
        search = {name: options[name] for name in ("task", "queue", "batch")}
        number = len(JobSelection(named, search).states(app, verb.states, MOST_COUNTED))
        if number:
            more = "at least " if number >= MOST_COUNTED else ""
            what = "failed job" if verb.states == ("failed",) else "job"
            confirm(plain(f"{verb.words} {more}{counted(number, what)}{of(search)}"))
    with naming_options():
        outcome = verb.do(app, named, **options)
    answer(outcome.value, *outcome.lines, as_json=as_json)
    context.refuse(outcome.unchanged, outcome.why_not)


def _check(verb: Verb, named: Collection[Any], choices: Sequence[Option]) -> None:
    """Raise `UsageError` unless the subjects are named in one way."""
    chosen = {each.name for each in choices}
    if not verb.chosen_by:
        return
    if not verb.is_of_jobs:
        if bool(chosen) == bool(named):
            both = ", and not both" if named else ""
            raise click.UsageError(f"name the {verb.group}, or give --all{both}")
        return
    if not named and not chosen:
        raise click.UsageError(f"name the jobs: by id, {', '.join(each.words for each in verb.chosen_by)}")
    for name in ("all", "flow"):
        if name in chosen and (named or len(chosen) > 1):
            raise click.UsageError(f"--{name} is for all of them: leave out the rest")
    if "error" in chosen and named:
        raise click.UsageError("--error names the jobs: leave out ids")
