"""`sqlq failed`: look at the jobs that failed for good, run them again, or forget them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from sqlq.cli.context import Context
from sqlq.cli.jobs import attempts, show_job
from sqlq.cli.looks import queue_name, show_rows
from sqlq.cli.output import (
    Column,
    F,
    ago,
    counted,
    json_option,
    limit_option,
    listed,
    of,
    require_named,
    show_json,
)

if TYPE_CHECKING:
    from sqlq.model.job import JobDetails


@click.group()
def failed() -> None:
    """List failed jobs, run them again, or forget them."""


def selection(command: F) -> F:
    """Add the ways to say which failed jobs are meant; ids, task and queue given together must all fit."""
    for option in (
        click.option("--all", is_flag=True, help="All failed jobs."),
        click.option("--queue", help="Those of one queue."),
        click.option("--task", help="Those of one task."),
        click.argument("ids", type=int, nargs=-1),
    ):
        command = option(command)
    return command


@failed.command("list")
@click.option("--task", help="Of one task only.")
@click.option("--queue", help="Of one queue only.")
@click.option(
    "--by", type=click.Choice(["error"]), help="Count them by task and error, the most frequent first."
)
@click.option(
    "--exact",
    is_flag=True,
    help="Look at all of them, and not only at the newest 100,000 (with --by 10,000).",
)
@limit_option(100, "At most so many, the newest; with --by the most frequent.")
@json_option
@click.pass_obj
def list_failed(
    context: Context, /, by: str | None, exact: bool, limit: int, as_json: bool, **chosen: Any
) -> None:
    """List failed jobs, the newest first.

    With --by error, count them by task and error instead.
    """
    if by is not None:
        _list_errors(context, chosen, exact, limit, as_json)
        return
    how: dict[str, Any] = {"within": None} if exact else {}
    found, complete = context.app().jobs.listing(state="failed", limit=limit + 1, **chosen, **how)
    more, found = len(found) > limit, found[:limit]
    if as_json:
        show_json([_listed(job) for job in found])
    elif found:
        _show_list(found)
    else:
        click.echo(f"no failed jobs{of(**chosen)}")
    if more and not as_json:
        click.echo(f"\nthese are the newest {limit:,}; --limit N shows more")
    if not complete:
        click.echo("\nonly the newest 100,000 failed jobs were looked at; --exact goes on", err=as_json)


def _show_list(found: list[JobDetails]) -> None:
    columns = [Column("id", right=True), Column("queue"), Column("task")]
    columns += [Column("attempts", right=True), Column("failed"), Column("error", wide=True)]
    show_rows(
        columns,
        (
            [str(job.id), queue_name(job.queue), job.task, attempts(job, "/"), ago(job.ended_at), _error(job)]
            for job in found
        ),
    )


def _list_errors(context: Context, chosen: dict[str, Any], exact: bool, limit: int, as_json: bool) -> None:
    found, complete = context.app().jobs.failures(**chosen, exact=exact)
    shown = found[:limit]
    if as_json:
        errors = [
            {"task": each.task, "error": each.error, "number": each.number, "newest": each.newest}
            for each in shown
        ]
        show_json({"errors": errors, "capped": not complete})
        return
    if not found:
        click.echo(f"no failed jobs{of(**chosen)}")
        return
    columns = [Column("number", right=True), Column("task"), Column("newest", right=True)]
    show_rows(
        [*columns, Column("error", wide=True)],
        [[each.number, each.task, str(each.newest), each.error] for each in shown],
    )
    if len(found) > limit:
        click.echo(f"\nand {counted(len(found) - limit, 'other error')}; --limit N shows more")
    if not complete:
        click.echo("\nof the newest 10,000 failed jobs; --exact counts all of them")


@failed.command("show")
@click.argument("id", type=int)
@json_option
@click.pass_obj
def show(context: Context, id: int, as_json: bool) -> None:
    """Show all about one failed job.

    Arguments, error, traceback, and the errors of earlier attempts.
    """
    from sqlq.errors import JobNotFoundError
    from sqlq.model.job import State

    job = context.app().jobs.get(id)
    if job.state is not State.FAILED:
        raise JobNotFoundError(
            f"job {id} has not failed for good: it is {job.state}, in attempt {attempts(job, ' of ')}"
        )
    show_job(context, job, as_json)


@failed.command("retry")
@selection
@json_option
@click.pass_obj
def retry(context: Context, /, as_json: bool, **chosen: Any) -> None:
    """Run failed jobs again: by id, --task, --queue, or --all.

    They keep their ids and get all their attempts anew. A job whose unique key a live job holds stays failed.
    """
    require_named("failed jobs", "--task, --queue or --all", *chosen.values())
    done = context.app().jobs.move_back(**chosen)
    missing = _missing(chosen["ids"], [*done.moved, *done.held])
    if as_json:
        show_json({"retried": done.moved, "held_back": done.held, "not_failed": missing})
    else:
        click.echo(_counted("moved back", done.moved, of(chosen["task"], chosen["queue"]), "to run again"))
        if done.held:
            stay = "1 job stays" if len(done.held) == 1 else f"{len(done.held):,} jobs stay"
            click.echo(f"{stay} failed, since live jobs hold the same unique keys: {listed(done.held)}")
    _report_missing(context, missing)


@failed.command("forget")
@selection
@json_option
@click.pass_obj
def forget(context: Context, /, as_json: bool, **chosen: Any) -> None:
    """Delete failed jobs for good: by id, --task, --queue, or --all."""
    require_named("failed jobs", "--task, --queue or --all", *chosen.values())
    forgotten = context.app().jobs.delete(**chosen)
    missing = _missing(chosen["ids"], forgotten)
    if as_json:
        show_json({"forgotten": forgotten, "not_failed": missing})
    else:
        click.echo(_counted("forgot", forgotten, of(chosen["task"], chosen["queue"])))
    _report_missing(context, missing)


def _listed(job: JobDetails) -> dict[str, Any]:
    names = (
        *("id", "queue", "task", "payload", "priority", "attempts", "max_attempts", "unique_key"),
        *("created_at", "reserved_at", "ended_at", "reason", "exception", "message"),
    )
    return {"failed_at" if name == "ended_at" else name: getattr(job, name) for name in names}


def _error(job: JobDetails) -> str:
    from sqlq.model.job import error_line

    return error_line(job.reason, job.exception, job.message)


def _counted(verb: str, ids: list[int], which: str, purpose: str = "") -> str:
    if not ids:
        return f"no failed jobs{which} {verb}" if verb != "forgot" else f"no failed jobs{which} to forget"
    return f"{verb} {counted(len(ids), 'job')}{which}{' ' + purpose if purpose else ''}: {listed(ids)}"


def _missing(ids: tuple[int, ...], found: list[int]) -> list[int]:
    return sorted(set(ids) - set(found))


def _report_missing(context: Context, missing: list[int]) -> None:
    """Say of ids that were named, but are not those of failed jobs, where they are; the command has not done
    all it should."""
    from sqlq.errors import JobNotFoundError

    for id in missing:
        try:
            state = context.app().jobs.get(id).state
            said = (
                "it has failed, but is not of the task and queue named, or is locked by another command"
                if state == "failed"
                else f"it is {state}"
            )
        except JobNotFoundError:
            said = "there is no such job"
        click.echo(f"sqlq: job {id}: {said}", err=True)
    if missing:
        raise SystemExit(1)
