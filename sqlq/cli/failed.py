"""`sqlq failed`, `retry`, `delete`: count failed jobs by error, run them again, or delete them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from sqlq.cli.context import Context
from sqlq.cli.looks import show_list
from sqlq.cli.options import (
    MOST_COUNTED,
    ask,
    ids_argument,
    limit_option,
    options,
    require_named,
    takes_json,
    those_of_one,
    yes_option,
)
from sqlq.cli.output import Column, answer, listed, of
from sqlq.config.command_hint import command
from sqlq.config.durations import counted
from sqlq.errors import ConfigurationError

if TYPE_CHECKING:
    from sqlq.model.job import JobDetails


@click.command()
@those_of_one
@click.option("--exact", is_flag=True, help="Count all of them, and not only the newest 10,000.")
@limit_option(100, "At most so many errors.")
@takes_json
def failed(context: Context, /, exact: bool, limit: int, as_json: bool, **chosen: Any) -> None:
    """Count failed jobs by task and error, the most frequent first.

    sqlq jobs --state failed lists them, and sqlq show has all about one.
    """
    errors, is_complete = context.looking().jobs.failures(**chosen, exact=exact)
    shown = [each.as_json() for each in errors[:limit]]
    if as_json:
        answer({"errors": shown, "capped": not is_complete}, as_json=True)
        return
    columns = [Column("number", right=True), Column("task"), Column("newest", right=True)]
    columns += [Column("fingerprint")]
    show_list(
        [*columns, Column("error", wide=True)],
        errors[:limit],
        lambda each: [each.number, each.task, str(each.newest), each.fingerprint, each.error],
        nothing=f"no failed jobs{of(chosen)}",
    )
    if len(errors) > limit:
        click.echo(f"\nand {counted(len(errors) - limit, 'other error')}; --limit N shows more")
    if not is_complete:
        click.echo("\nof the newest 10,000 failed jobs; --exact counts all of them")


selection = options(
    ids_argument,
    those_of_one,
    click.option("--all", is_flag=True, help="All failed jobs."),
    click.option("--error", metavar="FINGERPRINT", help="Those with this error, as sqlq failed has it."),
)


def _with_error(context: Context, error: str | None, chosen: dict[str, Any]) -> dict[str, Any]:
    """Return the selection, with the ids of the jobs that failed of an error."""
    if error is None:
        return chosen
    if chosen["ids"] or chosen["all"]:
        raise click.UsageError("--error names the jobs: leave out ids and --all")
    ids = context.app().jobs.failed_alike(error)
    if not ids:
        raise ConfigurationError(f"no failed job has the error {error!r}: see {command('failed')}")
    return {**chosen, "ids": tuple(ids)}


@click.command()
@selection
@click.option("--flow", type=int, metavar="ID", help="The failed steps of a flow, which then goes on.")
@takes_json
def retry(context: Context, /, flow: int | None, as_json: bool, **chosen: Any) -> None:
    """Run failed jobs again.

    Choose them by id, --task, --queue, --group, --error, --flow, or --all. They keep their ids and get all
    their attempts anew. A job whose unique key a live job holds stays failed. Exits with 1 if one of the ids
    was not moved back.
    """
    error = chosen.pop("error")
    require_named(
        "failed jobs", "--task, --queue, --group, --error, --flow or --all", flow, error, *chosen.values()
    )
    chosen = _with_error(context, error, chosen)
    if flow is not None:
        if any(chosen.values()):
            raise click.UsageError("--flow is for all failed steps of a flow: leave out the rest")
        moved, held = context.app().flows.retry(flow), list[int]()
    else:
        moved, held = context.app().jobs.move_back(**chosen)
    missing, which = _missing(chosen["ids"], moved), of(chosen, flow)
    lines = [f"no failed jobs{which} moved back"]
    if moved:
        lines = [f"moved back {counted(len(moved), 'job')}{which} to run again: {listed(moved)}"]
    if held:
        stay = counted(len(held), "job stays", "jobs stay")
        lines += [f"{stay} failed, since live jobs hold the same unique keys: {listed(held)}"]
    others = _missing(tuple(missing), held)
    answer({"retried": moved, "held_back": held, "not_failed": others}, *lines, as_json=as_json)

    def why_not(job: JobDetails) -> str:
        if job.id in held:
            return context.app().jobs.why(job.id)[0]
        return _why_not(job) if job.state == "failed" else f"it is {job.state}: only failed jobs are retried"

    context.refuse(missing, why_not)


@click.command()
@selection
@yes_option
@takes_json
def delete(context: Context, /, yes: bool, as_json: bool, **chosen: Any) -> None:
    """Delete failed jobs for good, and ended ones by id.

    Choose failed jobs by id, --task, --queue, --group, --error, or --all. Unless they are named by their ids,
    it counts them, and wants a yes. An id may also be that of a finished or cancelled job.
    """
    error = chosen.pop("error")
    require_named("failed jobs", "--task, --queue, --group, --error or --all", error, *chosen.values())
    chosen = _with_error(context, error, chosen)
    if error is not None:
        ask("delete", len(chosen["ids"]), "failed job", yes=yes)
    elif not chosen["ids"]:
        only = {name: chosen[name] for name in ("task", "queue", "group")}
        number = len(context.app().jobs.ids(states=("failed",), limit=MOST_COUNTED, **only))
        ask("delete", number, "failed job", of(only), yes=yes)
    deleted = context.app().jobs.delete(**chosen)
    missing, which = _missing(chosen["ids"], deleted), of(chosen)
    line = f"deleted {counted(len(deleted), 'job')}{which}: {listed(deleted)}"
    if not deleted:
        line = f"no failed jobs{which} to delete"
    answer({"deleted": deleted, "not_deleted": missing}, line, as_json=as_json)
    context.refuse(missing, lambda job: _NEEDED if job.state == "finished" else _why_not(job))


_NEEDED = "another step of its flow may still take its result"


def _missing(ids: tuple[int, ...], known: list[int]) -> list[int]:
    return sorted(set(ids) - set(known))


def _why_not(job: JobDetails) -> str:
    if job.state == "failed":
        return "it has failed, but is not of those named, or is locked by another command"
    return f"it is {job.state}"
