"""The commands that do the verbs of operators: `sqlq retry`, `sqlq queues pause`."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import click

from sqlq.admin.batches import Watch, watched
from sqlq.admin.jobs import SEARCH_LIMIT
from sqlq.admin.verb import Verb, of
from sqlq.cli.context import Context
from sqlq.cli.options import confirm, json_flag, option_of, yes_option
from sqlq.cli.terminal.output import answer, console, naming_options, on_terminal, plain
from sqlq.config.constants import INTERRUPTED
from sqlq.config.durations import counted
from sqlq.errors import JobNotFoundError

EXPLAINED = 20
"""The number of jobs that are explained one by one."""


def command_of(verb: Verb) -> click.Command:
    """Return the command that does a verb."""
    subjects = click.Argument(
        ["subjects"],
        metavar=verb.subjects,
        type=int if verb.is_of_jobs else None,
        nargs=-1 if verb.subjects[-1] in ".]" else 1,
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
    if "flow" in names and (subjects or len(names) > 1):
        raise click.UsageError("--flow chooses the jobs: leave out the rest")
    app = context.app(needs_code=verb.needs_code, looks=verb.group == "workers")
    number = len(named)
    to_confirm = not yes and not subjects and not names.isdisjoint(verb.confirms)
    with naming_options():
        if to_confirm or (verb.is_of_jobs and not subjects and names != {"flow"} and on_terminal()):
            number = sum(app.jobs._counts(verb.states, **{name: options[name] for name in names}).values())
        if to_confirm and number:
            more = "at least " if number >= SEARCH_LIMIT else ""
            noun = "failed job" if verb.states == ("failed",) else "job"
            confirm(plain(f"{verb.words} {more}{counted(number, noun)}{of(options)}"))
        with _followed(verb, number) as watch:
            outcome = verb.do(app, named, **options)
    answer(outcome.value, *outcome.lines, as_json=as_json)
    if watch.is_stopped:
        click.echo("sqlq: stopped after this batch: the same command goes on with the rest", err=True)
        raise SystemExit(INTERRUPTED)
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


@contextmanager
def _followed(verb: Verb, total: int) -> Iterator[Watch]:
    """Draw a bar on a terminal. The first Ctrl-C ends the action after its batch, the second one at once."""
    from rich.progress import Progress

    has_batches, stops = verb.is_of_jobs and not verb.group, False
    with Progress(
        console=console(err=True), transient=True, disable=not (has_batches and on_terminal())
    ) as bar:
        row = bar.add_task(verb.words, total=total)

        def see(changed: int) -> bool:
            bar.advance(row, changed)
            return not stops

        def stop(*_: object) -> None:
            nonlocal stops
            stops = True
            signal.signal(signal.SIGINT, before)

        before = signal.getsignal(signal.SIGINT)
        with suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGINT, stop if has_batches else before)
        try:
            with watched(see) as watch:
                yield watch
        finally:
            with suppress(ValueError):
                signal.signal(signal.SIGINT, before)
