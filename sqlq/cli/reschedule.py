"""`sqlq reschedule` and `sqlq change`: move waiting jobs to another time, queue or priority."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from sqlq.cli.context import Context
from sqlq.cli.options import (
    ids_argument,
    options,
    priority_option,
    queue_option,
    require_named,
    takes_json,
    those_of_one,
    time_option,
)
from sqlq.cli.output import answer, listed, naming_options, of
from sqlq.config.durations import counted

if TYPE_CHECKING:
    from sqlq.model.job import JobDetails


_when = options(
    time_option("When they are due.", "--at"),
    click.option("--in", "delay", metavar="DURATION", help="How long from now they are due, as in 10m."),
)


@click.command()
@ids_argument
@those_of_one
@click.option("--all", is_flag=True, help="All waiting jobs.")
@_when
@takes_json
def reschedule(
    context: Context, /, at: datetime | None, delay: str | None, as_json: bool, **chosen: Any
) -> None:
    """Move waiting jobs to another time.

    Without --at or --in it is now.

    Choose them by id, --task, --queue, --group, or --all. Jobs that wait for a retry are moved, too. Those
    that wait under a limit or in a flow do not start before that time. Exits with 1 if one of the ids was not
    moved.
    """
    require_named("waiting jobs", "--task, --queue, --group or --all", *chosen.values())
    _check_time(at, delay)
    with naming_options(at="at", delay="in"):
        moved = context.app().jobs.reschedule(**chosen, at=at, delay=delay)
    missing = sorted(set(chosen["ids"]) - set(moved))
    which = of(chosen)
    when = "now" if delay is None else f"in {delay.strip()}"
    when = when if at is None else f"at {at.isoformat()}"
    line = f"{counted(len(moved), 'job')}{which} due {when}: {listed(moved)}"
    if not moved:
        line = f"no waiting jobs{which} to move"
    answer({"rescheduled": moved, "not_waiting": missing}, line, as_json=as_json)
    context.refuse(missing, _why_not)


def _check_time(at: datetime | None, delay: str | None) -> None:
    if at is not None and delay is not None:
        raise click.UsageError("--at and --in both say when: give one of the two")


def _why_not(job: JobDetails) -> str:
    if job.state == "running":
        return "it is running, and only waiting jobs are moved"
    if job.state in ("available", "scheduled", "blocked"):
        return f"it is {job.state}, but not of those named, or locked by another transaction"
    return f"it is {job.state} already; sqlq retry and sqlq replay run jobs again"


@click.command()
@ids_argument
@queue_option
@priority_option
@_when
@takes_json
def change(
    context: Context,
    ids: tuple[int, ...],
    at: datetime | None,
    as_json: bool,
    **values: Any,
) -> None:
    """Change the queue, priority or time of waiting jobs.

    A signed or encrypted job stays in its queue, and so does one whose unique key another job holds in the
    other queue. Exits with 1 if one of the jobs was not changed.
    """
    require_named("waiting jobs", "as in sqlq change 42 --queue bulk", ids)
    _check_time(at, values["delay"])
    with naming_options("queue", "priority", available_at="at", delay="in"):
        effects = context.app().jobs.change(ids, available_at=at, **values)
    changed = [id for id, effect in effects.items() if effect == "changed"]
    line = f"changed {counted(len(changed), 'job')}{': ' if changed else ''}{listed(changed)}"
    answer(effects, line, as_json=as_json)
    stays = [id for id in effects if id not in changed]
    context.refuse(stays, lambda job: _STAYS.get(effects[job.id]) or _why_not(job))


_STAYS = {
    "sealed": "it is signed or encrypted for its queue; enqueue it anew in the other one",
    "key held": "another job holds its unique key in that queue",
}
