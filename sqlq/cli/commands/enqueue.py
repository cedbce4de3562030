"""`sqlq enqueue`: put a job into the queue by hand."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from sqlq.cli.context import Context
from sqlq.cli.options import (
    duration,
    job_options,
    json_option,
    read_json,
    takes_json,
    time_option,
)
from sqlq.cli.terminal.output import answer, naming_options
from sqlq.errors import ArgumentsError
from sqlq.model.task import new_from_json
from sqlq.payload.annotations import admits, hints_of, is_plain
from sqlq.payload.signatures import signature_of

KEY_TAKEN = 3
"""The exit code where a live job holds the unique key, and nothing was enqueued."""


@click.command()
@job_options
@duration("--delay", help='Delay before the job is due, as in "30s", "5m", "2h", "1d".')
@time_option(
    'Time when the job is due, with a time zone: "2030-01-31T08:00:00+01:00".',
    "--available-at",
)
@click.option("--max-attempts", type=int, help="Maximum number of attempts, if not the one of the task.")
@duration("--timeout", help="Timeout of an attempt, if not the one of the task; none for no timeout.")
@duration("--start-within", help="Cancel the job if it has not started within this time after it is due.")
@time_option("Cancel the job if it has not started by this time.", "--start-by")
@duration("--retention", help="Keep the job for this time after its end, or forever.")
@click.option("--label", help="Short text for people, shown by sqlq jobs and sqlq show.")
@click.option("--batch", help="Text shared with other jobs, for sqlq jobs --batch.")
@json_option("Headers", "--headers", {"tenant": "blue"})
@click.option("--unique-key", metavar="KEY", help="Enqueue only if no live job in its queue has this key.")
@click.option(
    "--unique-until",
    type=click.Choice(["finish", "start", "pruned"]),
    help="End of the unique key: the job's finish, its start, or when its row is pruned.",
)
@takes_json
def enqueue(context: Context, /, task: str, args: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Enqueue a job of TASK with ARGS.

    Each of ARGS that can be read as JSON is JSON: 7, true, null, '[1, 2]', '"7"' for the text 7. All others
    are text. A UUID or a date is text, a dataclass an object. Put -- before arguments that begin with a dash.
    The App checks the task's name, the arguments, their types and the options before anything is written.
    Where only a database is named, TASK is a name. The worker's task then sets attempts and timeout, and
    takes the arguments or not; the queue is --queue. Exits with 3 where a live job holds the unique key,
    and nothing was enqueued.

    \b
    sqlq enqueue -a shop.tasks:app shop.tasks.send_receipt 7 --delay 5m
    """
    positional, by_name = [argument(arg) for arg in args], options.pop("kwargs") or {}
    by_its_name = context.app_path is None and not context.names_nothing()
    if by_its_name:
        app = context.app()
        new = app.named(task).new(*positional, **by_name)
    else:
        app = context.app_with_tasks("enqueue checks the job against its task")
        known = app.tasks.find(task)
        new = new_from_json(known, positional, by_name)
        _check_plain_types(known.handler, positional, by_name)
    changes = {name: value for name, value in options.items() if value is not None}
    if changes.get("timeout") == "none":
        changes["timeout"] = None
    with naming_options():
        new = new.set(**changes)
    job = app.enqueue(new, commit=True, eager=False)  # a command has no current session
    about = f"{job.task} in queue {job.queue}, {job.state}"
    line = f"enqueued job {job.id}: {about}"
    line += "; no App is named, so nothing checked that the task takes it" if by_its_name else ""
    if not job.created:
        line = f"nothing enqueued: job {job.id} ({about}) holds this unique key"
    names = ("id", "queue", "task", "state", "created")
    answer({name: getattr(job, name) for name in names}, line, as_json=as_json)
    if not job.created:
        raise SystemExit(KEY_TAKEN)


def _check_plain_types(
    handler: Callable[..., Any], positional: Sequence[Any], named: Mapping[str, Any]
) -> None:
    """Refuse values that are not of the plain types in the handler's annotations; programs have type checkers
    for that."""
    signature = signature_of(handler)
    hints = hints_of(getattr(handler, "stands_for", handler))
    for name, value in signature.bind(*positional, **named).arguments.items():
        hint, kind = hints.get(name, Any), signature.parameters[name].kind
        if kind in _VARIADIC or not is_plain(hint) or admits(hint, value):
            continue
        expected = inspect.formatannotation(hint)
        message = f"{name} is {json.dumps(value, ensure_ascii=False)}: the task takes {expected} there"
        if admits(hint, ""):
            message += "; text that looks like JSON is given in quotes of its own, as in '\"7\"'"
        raise ArgumentsError(message)


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def argument(text: str) -> Any:
    """Return an argument of the command line: what it is as JSON, or the text itself."""
    try:
        return read_json(text)
    except (ValueError, RecursionError):
        return text
