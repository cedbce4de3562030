"""`sqlq replay`: enqueue ended jobs once more, as new jobs."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from sqlq.cli.context import Context
from sqlq.cli.jobs import attempts
from sqlq.cli.looks import queue_name, show_rows
from sqlq.cli.options import ids_argument, json_option, require_named, takes_json, those_of_one, time_option
from sqlq.cli.output import Column, ago, listed, naming_options, of, on_terminal, plain, shortened, show_json
from sqlq.config.durations import counted, readable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlq.admin.replay import Progress, Replayed

SHOWN = 60
"""Characters of the arguments of a job that a dry run shows."""


@click.command()
@ids_argument
@those_of_one
@click.option(
    "--state",
    type=click.Choice(["finished", "failed", "cancelled"]),
    help="In one state only; finished and failed without it.",
)
@time_option("That ended at this time or later; or AGE, as in 2h.", "--from", "since", or_age=True)
@time_option("That ended before this time; or AGE.", "--to", "until", or_age=True)
@click.option("--rate", metavar="RATE", help="Due one after the other: 10/s, 100/1m.")
@json_option("Other arguments for one job", "--args", [7])
@json_option("The same by name", "--kwargs", {"copy": True})
@click.option("--again", is_flag=True, help="Also those that were replayed before, and replays themselves.")
@click.option("--dry-run", is_flag=True, help="Count them and show the first few; write nothing.")
@takes_json
def replay(context: Context, /, ids: tuple[int, ...], dry_run: bool, as_json: bool, **options: Any) -> None:
    """Enqueue ended jobs once more, as new jobs.

    By id, --task, --queue, --group, --from and --to; all that is given must fit. Each becomes a new job with
    an id of its own, which names the one it is a replay of; it has no unique key. Jobs that were replayed
    before are left out, so a command that was broken off is simply repeated. With --args or --kwargs one job
    gets other arguments; what is not given stays as it was.

    \b
    sqlq replay --task shop.send_receipt --from 2h --dry-run
    """
    named = [options[name] for name in ("task", "queue", "group", "since", "until")]
    require_named("jobs", "--task, --queue, --group, --from or --to", ids, *named)
    app = context.app(needs_code=True)
    which, rate = _which(options), options["rate"]
    with naming_options("rate"):
        if dry_run:
            _show_plan(app.jobs.replay(ids, dry_run=True, **options), which, rate, as_json=as_json)
            return
        with _told() as progress:
            done = app.jobs.replay(ids, progress=progress, **options)
    if as_json:
        show_json(
            {
                "replayed": [{"id": new, "replay_of": old} for old, new in done.jobs.items()],
                "already": done.already,
                "steps": done.steps,
            }
        )
        return
    if len(done.jobs) == 1:
        ((old, new),) = done.jobs.items()
        click.echo(f"replayed job {old} as job {new}")
    elif done.jobs:
        click.echo(f"replayed {counted(done.number, 'job')}{which} as {listed([*done.jobs.values()])}")
    else:
        click.echo(f"no jobs{which} to replay")
    _left_out(done)


def _show_plan(found: Replayed, which: str, rate: str | None, *, as_json: bool) -> None:
    if as_json:
        first = [
            {"id": job.id, "queue": job.queue, "task": job.task, "payload": job.payload}
            for job in found.first
        ]
        show_json({"number": found.number, "already": found.already, "steps": found.steps, "first": first})
        return
    if not found.number:
        click.echo(f"no jobs{which} to replay")
    else:
        over = _over(found.number, rate)
        click.echo(f"{counted(found.number, 'job')}{which} would be replayed{over}; nothing was written\n")
        columns = [Column("id", right=True), Column("state"), Column("queue"), Column("task")]
        columns += [Column("attempts", right=True), Column("ended"), Column("arguments", wide=True)]
        show_rows(
            columns,
            [
                [
                    *(str(job.id), str(job.state), queue_name(job.queue), job.task, attempts(job, "/")),
                    *(ago(job.ended_at), _shortened(job.payload)),
                ]
                for job in found.first
            ],
        )
        if found.number > len(found.first):
            click.echo(f"… and {counted(found.number - len(found.first), 'more', 'more')}")
    _left_out(found)


def _over(number: int, rate: str | None) -> str:
    """Return how long a replay at a rate goes on, from the first job to the last."""
    from sqlq.admin.replay import lasts_ms

    return "" if rate is None or number < 2 else f" over {readable(lasts_ms(number, rate))}"


def _left_out(found: Replayed) -> None:
    if found.already:
        jobs = counted(found.already, "job was", "jobs were")
        click.echo(f"left out: {jobs} replayed before, or replays themselves; --again replays those, too")
    if found.steps:
        steps = counted(found.steps, "step of a flow", "steps of flows")
        click.echo(f"left out: {steps}: a step cannot be replayed alone")


def _which(options: dict[str, Any]) -> str:
    state = options["state"]
    return of(options) + (f" that {_VERBS[state]}" if state else "")


_VERBS = {"finished": "finished", "failed": "failed", "cancelled": "were cancelled"}


def _shortened(payload: Any) -> str:
    text = payload if isinstance(payload, str) else json.dumps(payload, ensure_ascii=False)
    return shortened(plain(text), SHOWN)


@contextmanager
def _told() -> Iterator[Progress]:
    """Show the progress on a terminal, and print what was done if the command is interrupted."""
    from sqlq.cli.logs import ERASE

    drawn = on_terminal()
    seen = 0

    def progress(done: int, number: int) -> None:
        nonlocal seen
        seen = done
        if drawn:
            click.echo(f"{ERASE}replayed {done:,} of {number:,}", nl=False, err=True)

    try:
        yield progress
    except KeyboardInterrupt:
        erase = ERASE if drawn else ""
        said = f"interrupted: {counted(seen, 'job')} had been replayed"
        click.echo(f"{erase}{said}; the same command goes on with the others", err=True)
        raise
    if drawn and seen:
        click.echo(ERASE, nl=False, err=True)
