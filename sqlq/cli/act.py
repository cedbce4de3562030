"""Commands that do the verbs of operators, and those on jobs: `sqlq retry`, `cancel`, `delete`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import wraps
from typing import Any, TypeAlias

import click

from sqlq.admin.verbs import VERBS, of
from sqlq.app.app import App
from sqlq.cli.context import Context
from sqlq.cli.options import (
    confirm,
    duration,
    flag,
    priority_option,
    queue_option,
    takes_json,
    those_of_one,
    time_option,
    yes_option,
)
from sqlq.cli.output import answer, naming_options, plain
from sqlq.config.command_hint import command
from sqlq.config.durations import counted
from sqlq.errors import ConfigurationError

MOST_COUNTED = 100_000
"""Jobs are counted up to here before a command wants a yes."""
SELECTING = ("task", "queue", "group", "error", "flow", "since", "until", "all")
"""The options that choose jobs."""

Help: TypeAlias = Callable[[], None]


def acts(words: str, *, confirms: Collection[str] = (), needs_code: bool = False) -> Callable[[Help], Any]:
    """Have a command do a verb; its function has the help. It `confirms` jobs that one of these options
    chooses, and no ids."""

    def decorate(function: Help) -> Any:
        @takes_json
        @wraps(function)
        def run(context: Context, /, subjects: Any, as_json: bool, yes: bool = False, **options: Any) -> None:
            named = subjects if isinstance(subjects, tuple) else (subjects,)
            chosen = {name for name in SELECTING if options.get(name) not in (None, False)}
            if "task" in options:
                _check_jobs(named, chosen)
            elif "all" in options and options["all"] == bool(named):
                both = ", and not both" if named else ""
                raise click.UsageError(f"name the {words.split(maxsplit=1)[0]}, or give --all{both}")
            app = context.app(needs_code=needs_code)
            must_confirm = not (yes or named or chosen.isdisjoint(confirms))
            if error := options.pop("error", None):
                named = tuple(app.jobs.failed_alike(error))
                if not named:
                    see = command("failed")
                    raise ConfigurationError(f"no failed job has the error {error!r}: see {see}")
            if must_confirm:
                _confirm(app, words, named, options)
            with naming_options():
                outcome = VERBS[words].do(app, named, **options)
            answer(outcome.value, *outcome.lines, as_json=as_json)
            context.refuse(outcome.unchanged, outcome.why_not)

        return run

    return decorate


def _check_jobs(ids: Collection[int], chosen: Collection[str]) -> None:
    if not ids and not chosen:
        params = click.get_current_context().command.params
        options = ", ".join(each.opts[0] for each in params if each.name in SELECTING)
        raise click.UsageError(f"name the jobs: by id, {options}")
    for name in ("all", "flow"):
        if name in chosen and (ids or len(chosen) > 1):
            raise click.UsageError(f"--{name} is for all of them: leave out the rest")
    if "error" in chosen and ids:
        raise click.UsageError("--error names the jobs: leave out ids")


def _confirm(app: App, words: str, ids: tuple[int, ...], options: dict[str, Any]) -> None:
    states = VERBS[words].states
    fields = {name: options[name] for name in ("task", "queue", "group")}
    if number := len(app.jobs.ids(states=states, limit=MOST_COUNTED, ids=ids, **fields)):
        more = "at least " if number >= MOST_COUNTED else ""
        what = "failed job" if states == ("failed",) else "job"
        confirm(plain(f"{words} {more}{counted(number, what)}{of(fields)}"))


_ids = click.argument("subjects", metavar="[IDS]...", type=int, nargs=-1)
_error = click.option("--error", metavar="FINGERPRINT", help="Those with this error, as sqlq failed has it.")
_all_failed = flag("--all", help="All failed jobs.")


@click.command()
@those_of_one
@_error
@click.option("--flow", type=int, metavar="ID", help="The failed steps of a flow, which then goes on.")
@_all_failed
@_ids
@acts("retry")
def retry() -> None:
    """Run failed jobs again.

    Choose them by id, --task, --queue, --group, --error, --flow, or --all. They keep their ids and get all
    their attempts anew. A job whose unique key a live job holds stays failed. Exits with 1 if one of the ids
    was not moved back.
    """


@click.command()
@those_of_one
@_error
@_all_failed
@yes_option
@_ids
@acts("delete", confirms=("all", "task", "queue", "group", "error"))
def delete() -> None:
    """Delete failed jobs for good, and ended ones by id.

    Choose failed jobs by id, --task, --queue, --group, --error, or --all. Unless they are named by their ids,
    it counts them, and wants a yes. An id may also be that of a finished or cancelled job.
    """


@click.command()
@those_of_one
@click.option("--flow", type=int, metavar="ID", help="The steps of a flow that have not ended.")
@flag("--all", help="All jobs that have not ended; asks before.")
@flag("--force", help="End running jobs here and now, without waiting for their handlers.")
@click.option("--reason", help='Why, as its result says; in place of "cancelled on request".')
@yes_option
@_ids
@acts("cancel", confirms=("all",))
def cancel() -> None:
    """Cancel jobs: by id, --task, --queue, --group, --flow or --all.

    Ids, task, queue and group given together must all fit. A job that waits is cancelled at once. One that
    runs gets a request to stop, which its worker sees within 2 seconds. With --force it is cancelled at once,
    too; its handler may go on, but nothing it returns or raises counts. Exits with 1 if one of the ids could
    not be cancelled.
    """


_delay_option = duration("--in", "delay", help="How long from now they are due, as in 10m.")


@click.command()
@those_of_one
@flag("--all", help="All waiting jobs.")
@time_option("When they are due.", "--at")
@_delay_option
@_ids
@acts("reschedule")
def reschedule() -> None:
    """Move waiting jobs to another time.

    Without --at or --in it is now.

    Choose them by id, --task, --queue, --group, or --all. Jobs that wait for a retry are moved, too. Those
    that wait under a limit or in a flow do not start before that time. Exits with 1 if one of the ids was not
    moved.
    """


@click.command()
@click.argument("subjects", metavar="IDS...", type=int, nargs=-1, required=True)
@queue_option
@priority_option
@time_option("When they are due.", "--at", "available_at")
@_delay_option
@acts("change")
def change() -> None:
    """Change the queue, priority or time of waiting jobs.

    A signed or encrypted job stays in its queue, and so does one whose unique key another job holds in the
    other queue. Exits with 1 if one of the jobs was not changed.
    """


@click.command()
@those_of_one
@time_option("That ended at this time or later; or AGE, as in 2h.", "--from", "since", or_age=True)
@time_option("That ended before this time; or AGE.", "--to", "until", or_age=True)
@_ids
@acts("replay", needs_code=True)
def replay() -> None:
    """Enqueue copies of ended jobs, as new jobs.

    By id, --task, --queue, --group, --from and --to; all that is given must fit. Each copy has an id of its
    own, and no unique key. Cancelled jobs are copied by id only, steps of flows never. Exits with 1 if one of
    the ids was not copied.

    \b
    sqlq replay --task shop.send_receipt --from 2h
    """
