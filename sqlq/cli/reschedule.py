"""`sqlq reschedule`: move waiting jobs to another time."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from sqlq.cli.context import Context
from sqlq.cli.options import ids_argument, require_named, takes_json, those_of_one, time_option
from sqlq.cli.output import answer, listed, naming_options, of
from sqlq.config.durations import counted

if TYPE_CHECKING:
    from sqlq.model.job import JobDetails


@click.command()
@ids_argument
@those_of_one
@click.option("--all", is_flag=True, help="All waiting jobs.")
@time_option("When they are due.", "--at")
@click.option("--in", "delay", metavar="DURATION", help="How long from now they are due, as in 10m.")
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
    if at is not None and delay is not None:
        raise click.UsageError("--at and --in both say when: give one of the two")
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


def _why_not(job: JobDetails) -> str:
    if job.state == "running":
        return "it is running, and only waiting jobs are moved"
    if job.state in ("available", "scheduled", "blocked"):
        return f"it is {job.state}, but not of those named, or locked by another transaction"
    return f"it is {job.state} already; sqlq retry and sqlq replay run jobs again"
