"""`sqlq status`: what each queue holds, and who serves it."""

from __future__ import annotations

import sys
import time
from typing import Any, NamedTuple, NoReturn

import click
from sqlalchemy.exc import SQLAlchemyError

from sqlq.admin.queues import Pause, Pauses, QueueStatuses
from sqlq.admin.verbs import listed
from sqlq.admin.workers import WorkerStatus
from sqlq.cli.context import Context
from sqlq.cli.options import exact_option, flag, takes_json
from sqlq.cli.problems import explain
from sqlq.cli.terminal.output import plain, queue_name, show_json, show_table
from sqlq.config.command_hint import command, word
from sqlq.config.durations import span, written
from sqlq.errors import ConfigurationError

WATCH_SECONDS = 2.0


@click.command()
@exact_option
@flag("--watch", help="Refresh every two seconds, until Ctrl-C.")
@takes_json
def status(context: Context, exact: bool, watch: bool, as_json: bool) -> None:
    """Show what each queue holds, and who serves it.

    Jobs are counted by state: available, scheduled, blocked, running and failed; beside them stands how
    long the oldest has waited. A count ends at 10,000, shown as 10,000+; --exact counts on. A queue that no
    live worker serves is marked. A worker counts as live for 90 seconds after its last heartbeat.
    """
    if watch:
        _watch(context, exact, as_json)
    found = _look(context, exact)
    if as_json:
        show_json(_object(found))
    else:
        _show(context, found)


def _object(found: _Found) -> dict[str, Any]:
    return {
        "queues": [queue.as_json() for queue in found.queues],
        "workers": [{**worker.as_json(), "jobs": len(worker.jobs)} for worker in found.workers],
        "all_paused": None if found.pauses.all is None else found.pauses.all._asdict(),
        "replica": found.replica,
    }


class _Found(NamedTuple):
    queues: QueueStatuses
    workers: list[WorkerStatus]
    pauses: Pauses
    replica: dict[str, Any] | None
    """The URL of the replica that is read from, and the seconds that it is behind, if they are known."""


def _look(context: Context, exact: bool) -> _Found:
    app = context.looking()
    replica = None
    if app is not context.app():
        with app.database.read() as conn:
            behind = app.database.dialect.health.burden(conn).behind_seconds
        replica = {"url": context.shown_url(), "behind_seconds": behind}
    return _Found(app.queues.list(exact=exact), app.workers.list(), app.queues.pauses(), replica)


def _watch(context: Context, exact: bool, as_json: bool) -> NoReturn:
    """Show it again and again. While the database is away, print that in its place."""

    if as_json:
        raise ConfigurationError("--watch is for people and --json for programs: give one of the two")
    if not sys.stdout.isatty():
        raise ConfigurationError("--watch needs a terminal to show it on: leave --watch out, or use --json")
    found: _Found | str | None = _look(context, exact)
    while True:
        click.clear()
        if isinstance(found, _Found):
            _show(context, found)
        else:
            click.echo(f"sqlq: {found}", err=True)
        time.sleep(WATCH_SECONDS)
        try:
            found = _look(context, exact)
        except SQLAlchemyError as error:
            found = explain(error, context)


def show_queues(context: Context, queues: QueueStatuses, pauses: Pauses) -> None:
    """Print what each queue holds, and which are paused."""
    if queues:
        show_table(queues)
        if queues.others:
            click.echo(f"and {queues.others:,} other queues")
    else:
        click.echo(f"no jobs wait, run or have failed in {context.shown_url()}")
    if pauses.all is not None:
        click.echo(
            f"\nall queues are paused{_until(pauses.all)}; go on with {command('queues resume --all')}"
        )
    if pauses.named:
        paused = ", ".join(f"{queue_name(name)}{_until(pause)}" for name, pause in pauses.named.items())
        first = word(next(iter(pauses.named)))
        click.echo(f"\npaused: {paused}; go on with {command(f'queues resume {first}')}")


def _show(context: Context, found: _Found) -> None:
    queues, workers, pauses, replica = found
    show_queues(context, queues, pauses)
    click.echo()
    if workers:
        show_table(workers)
    else:
        click.echo(f"no worker is running: start one with {command('work', needs_app=True)}")
    unserved = [queue.queue for queue in queues if not queue.served and queue.available + queue.scheduled]
    if workers and unserved:
        click.echo(
            f"no worker serves {listed([*map(queue_name, unserved)])}: start one with "
            f"{command(f'work -q {word(unserved[0])}', needs_app=True)}, or without -q for all"
        )
    if replica is not None:
        seconds = replica["behind_seconds"]
        behind = "how far it is behind is not known" if seconds is None else f"{span(seconds)} behind"
        click.echo(f"\nread from {plain(replica['url'])}, {behind}")


def _until(pause: Pause) -> str:
    return "" if pause.until is None else f" until {written(pause.until)}"
