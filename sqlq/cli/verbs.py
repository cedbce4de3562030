"""The commands that do the verbs of operators: `sqlq retry`, `sqlq queues pause`."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from sqlq.admin.verb import Verb, states_of
from sqlq.admin.verbs import of
from sqlq.cli.context import Context
from sqlq.cli.options import confirm, json_flag, option_of, yes_option
from sqlq.cli.terminal.output import answer, naming_options, plain
from sqlq.config.command_hint import command as quoted
from sqlq.config.durations import counted
from sqlq.errors import ConfigurationError, JobNotFoundError

EXPLAINED = 20
"""The number of jobs that are explained one by one."""
COUNT_LIMIT = 100_000
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
    for option in (*verb.selectors, *verb.options):
        option_of(option)(command)
    if verb.confirms:
        yes_option(command)
    json_flag(command)
    return command


def _run(
    verb: Verb, context: Context, /, subjects: Any, as_json: bool, yes: bool = False, **options: Any
) -> None:
    named = subjects if isinstance(subjects, tuple) else (subjects,)
    names = {each.name for each in verb.selectors if options[each.name] not in (None, False)}
    if verb.selectors and not subjects and not names:
        choices = ", ".join(option.words for option in verb.selectors)
        raise click.UsageError(f"name the {verb.group or 'jobs'}, or give {choices}")
    for name in names & {"flow", "error"}:
        if subjects or len(names) > 1:
            raise click.UsageError(f"--{name} chooses the jobs: leave out the rest")
    app = context.app(needs_code=verb.needs_code, looks=verb.group == "workers")
    if error := options.pop("error", None):
        named = tuple(app.jobs.failed_alike(error))
        if not named:
            raise ConfigurationError(f"no failed job has the error {error!r}: see {quoted('failed')}")
    if not yes and not subjects and not names.isdisjoint(verb.confirms):
        search = {name: options[name] for name in ("task", "queue", "batch")}
        number = len(states_of(app, verb.states, COUNT_LIMIT, ids=named, **search))
        if number:
            more = "at least " if number >= COUNT_LIMIT else ""
            noun = "failed job" if verb.states == ("failed",) else "job"
            confirm(plain(f"{verb.words} {more}{counted(number, noun)}{of(search)}"))
    with naming_options():
        outcome = verb.do(app, named, **options)
    answer(outcome.value, *outcome.lines, as_json=as_json)
    for id in outcome.unchanged[:EXPLAINED]:
        try:
            reason = verb.why_not(outcome, app.jobs.get(id))
        except JobNotFoundError:
            reason = "there is no such job"
        click.echo(plain(f"sqlq: job {id}: {reason}"), err=True)
    if (others := len(outcome.unchanged) - EXPLAINED) > 0:
        click.echo(f"sqlq: {counted(others, 'more job')} not changed", err=True)
    if outcome.unchanged:
        raise SystemExit(1)
