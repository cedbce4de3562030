"""`sqlq schedules`: look at schedules, and add one."""

from __future__ import annotations

from typing import Any

import click

from sqlq.admin.schedules import ScheduleDetails
from sqlq.cli.commands.enqueue import argument
from sqlq.cli.context import Context
from sqlq.cli.options import duration, job_options, listing, number, takes_json, time_option
from sqlq.cli.terminal.output import (
    answer,
    dated,
    naming_options,
    queue_name,
    show_fields,
    show_heading,
    show_json,
    show_list,
    show_part,
    show_table,
    show_wrapped,
)
from sqlq.config.durations import ago, milliseconds, readable, written
from sqlq.model.schedule import Schedule
from sqlq.model.task import new_from_json


@listing
@takes_json
def schedules(context: Context, as_json: bool) -> None:
    """List schedules; add, pause and run them.

    The list has when each is due, and the state of its last job.
    """
    show_list(context.looking().schedules.list(), nothing="no schedules", as_json=as_json)


# -- look ----------------------------------------------------------------------------------------------------


@schedules.command()
@click.argument("name")
@takes_json
def show(context: Context, name: str, as_json: bool) -> None:
    """Show a schedule: its next ten runs, and its last ten jobs."""
    details = context.looking().schedules.get(name)
    if as_json:
        show_json(details.as_json())
        return
    show_heading(f"schedule {details.name}: {details.state}")
    show_fields(_fields(details))
    if details.upcoming:
        show_part("next runs")
        for time in details.upcoming:
            show_wrapped("", written(time), before="  ")
    if details.jobs:
        show_part("last jobs")
        show_table(details.jobs)


def _fields(details: ScheduleDetails) -> dict[str, object]:
    plan, service = details.plan, "" if details.service is None else f" of service {details.service}"
    values: dict[str, object] = {}
    if plan is not None:
        values = {
            "when": plan,
            "starts": plan.starts and written(plan.starts),
            "ends": plan.ends and written(plan.ends),
            "repeats": plan.repeats and f"{plan.repeats:,}",
            "jitter": plan.jitter and readable(milliseconds(plan.jitter, "jitter")),
            "catch up": plan.catch_up,
            "overlap": plan.overlap,
        }
    return values | {
        "error": details.error_at and f"{details.error} ({ago(details.error_at)})",
        "task": details.task,
        "queue": queue_name(details.queue),
        "arguments": details.payload,
        "declared": f"by code{service}" if details.is_declared else "at run time",
        "paused": dated(details.paused_at),
        "retired": dated(details.retired_at),
        "ticks": f"{details.ticks:,}, {details.skipped:,} skipped, up to {written(details.last_at)}",
    }


# -- write ---------------------------------------------------------------------------------------------------


@schedules.command()
@click.argument("name")
@job_options
@click.option("--cron", metavar="TEXT", help='Cron expression of five fields, as in "0 3 * * *".')
@duration("--every", help='Interval, as in "90s" or "1h"; at least 1s.')
@time_option('Single run time: "2030-01-31T08:00:00+01:00".', "--at")
@click.option("--timezone", metavar="ZONE", help='Time zone of --cron, as in "Europe/Berlin" (default UTC).')
@number("--repeats", help="Maximum number of jobs.")
@time_option("Earliest run time.", "--starts")
@time_option("End of the schedule: no run at or after this time.", "--ends")
@duration("--jitter", help="Delay each job by a random time up to this.")
@click.option(
    "--catch-up",
    type=click.Choice(["latest", "all", "skip"]),
    help="After an outage: run one job, one for each missed run (up to 1,000), or none.",
)
@click.option(
    "--overlap",
    type=click.Choice(["allow", "skip", "queue"]),
    help="If the last job has not ended: enqueue another, skip the run, or wait.",
)
@takes_json
def add(
    context: Context, /, name: str, task: str, args: tuple[str, ...], as_json: bool, **options: Any
) -> None:
    """Add a schedule NAME that enqueues jobs of TASK with ARGS.

    Arguments are read as by sqlq enqueue. It stays until it is removed, whatever code declares.

    \b
    sqlq schedules add -a shop.tasks:app nightly shop.tasks.report --cron "0 3 * * *"
    """

    kwargs, queue, priority = (options.pop(option) for option in ("kwargs", "queue", "priority"))
    plan_options = {name: value for name, value in options.items() if value is not None}
    if not plan_options.keys() & {"cron", "every", "at"}:
        raise click.UsageError('say when: --cron "0 3 * * *", --every 90s or --at with a moment')
    with naming_options():
        plan = Schedule(**plan_options)
    app = context.app_with_tasks("schedules add checks the job against its task")
    job = new_from_json(app.tasks.find(task), [argument(arg) for arg in args], kwargs or {})
    with naming_options():
        job = job.set(queue=queue, priority=priority)
    app.schedules.add(name, job, plan)
    details = app.schedules.get(name)
    due = f"next {written(details.upcoming[0])}" if details.upcoming else details.state
    answer(details.as_json(), f"added {name}: {details.plan}, {due}", as_json=as_json)
