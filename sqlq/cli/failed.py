"""`sqlq failed`: look at the jobs that failed for good, run them again, or forget them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

import click

from sqlq.cli.context import Context
from sqlq.cli.output import Column, ago, counted, json_option, listed, of, plain, plain_lines, show_json, show_table

if TYPE_CHECKING:
    from sqlq.job import JobDetails

F = TypeVar("F", bound=Callable[..., Any])


@click.group()
def failed() -> None:
    """Look at jobs that failed for good, run them again, or forget them."""


def selection(command: F) -> F:
    """Add the ways to say which failed jobs are meant; ids, task and queue given together must all fit."""
    for option in (
        click.option("--all", "all_of_them", is_flag=True, help="All failed jobs."),
        click.option("--queue", help="Those of one queue."),
        click.option("--task", help="Those of one task."),
        click.argument("ids", type=int, nargs=-1),
    ):
        command = option(command)
    return command


@failed.command("list")
@click.option("--task", help="Of one task only.")
@click.option("--queue", help="Of one queue only.")
@click.option("-n", "--limit", type=click.IntRange(1, 10_000), default=100, show_default=True, help="At most so many, the newest.")
@json_option
@click.pass_obj
def list_failed(context: Context, task: str | None, queue: str | None, limit: int, as_json: bool) -> None:
    """List failed jobs, the newest first."""
    found = context.app().admin.list(state="failed", task=task, queue=queue, limit=limit + 1)
    more, found = len(found) > limit, found[:limit]
    if as_json:
        show_json([_listed(job) for job in found])
        return
    if not found:
        click.echo(f"no failed jobs{of(task, queue)}")
        return
    columns = [
        Column("id", right=True),
        Column("queue"),
        Column("task"),
        Column("attempts", right=True),
        Column("failed"),
        Column("error", wide=True),
    ]
    show_table(
        columns, ([str(job.id), job.queue, job.task, f"{job.attempts}/{job.max_attempts}", ago(job.ended_at), _error(job)] for job in found)
    )
    if more:
        click.echo(f"\nthese are the newest {limit:,}; --limit N shows more")


@failed.command("show")
@click.argument("id", type=int)
@json_option
@click.pass_obj
def show(context: Context, id: int, as_json: bool) -> None:
    """Show all about one failed job: arguments, error, traceback, and the errors of earlier attempts."""
    from sqlq.errors import JobNotFoundError
    from sqlq.job import State

    job = context.app().admin.get(id)
    if job.state is not State.FAILED:
        raise JobNotFoundError(f"job {id} has not failed for good: it is {job.state}, in attempt {job.attempts} of {job.max_attempts}")
    if as_json:
        show_json(asdict(job))
        return
    for name, value in (
        ("job", job.id),
        ("task", job.task),
        ("queue", job.queue),
        ("arguments", json.dumps(job.payload, ensure_ascii=False)),
        ("attempts", f"{job.attempts} of {job.max_attempts}"),
        ("unique key", job.unique_key),
        ("created", job.created_at),
        ("last started", job.reserved_at),
        ("failed", f"{job.ended_at} ({ago(job.ended_at)})"),
        ("reason", job.reason),
        ("error", _error(job)),
    ):
        if value is not None:
            click.echo(f"{name:<13} {plain(str(value))}")
    if job.errors:
        click.echo("\nearlier attempts")
        for record in job.errors:
            said = {name: plain(str(record.get(name, "?"))) for name in ("attempt", "at", "reason", "exception", "message")}
            click.echo("  {attempt}  {at}  {reason}  {exception}: {message}".format(**said))
    if job.traceback:
        click.echo(f"\n{plain_lines(job.traceback)}")


@failed.command("retry")
@selection
@json_option
@click.pass_obj
def retry(context: Context, ids: tuple[int, ...], task: str | None, queue: str | None, all_of_them: bool, as_json: bool) -> None:
    """Run failed jobs again: by id, --task, --queue, or --all.

    They keep their ids and get all their attempts anew. A job whose unique key a live job holds stays failed.
    """
    admin = context.app().admin
    done = admin.move_failed_back(ids, task=task, queue=queue, all=all_of_them)
    missing = _missing(ids, [*done.moved, *done.held])
    if as_json:
        show_json({"retried": done.moved, "held_back": done.held, "not_failed": missing})
    else:
        click.echo(_counted("moved back", done.moved, of(task, queue), "to run again"))
        if done.held:
            click.echo(f"{counted(len(done.held), 'job')} stay failed, since live jobs hold their unique keys: {listed(done.held)}")
    _report_missing(context, missing)


@failed.command("forget")
@selection
@json_option
@click.pass_obj
def forget(context: Context, ids: tuple[int, ...], task: str | None, queue: str | None, all_of_them: bool, as_json: bool) -> None:
    """Delete failed jobs for good: by id, --task, --queue, or --all."""
    forgotten = context.app().admin.forget_failed(ids, task=task, queue=queue, all=all_of_them)
    missing = _missing(ids, forgotten)
    if as_json:
        show_json({"forgotten": forgotten, "not_failed": missing})
    else:
        click.echo(_counted("forgot", forgotten, of(task, queue)))
    _report_missing(context, missing)


def _listed(job: JobDetails) -> dict[str, Any]:
    names = ("id", "queue", "task", "payload", "priority", "attempts", "max_attempts", "unique_key", "created_at", "reserved_at")
    return {
        **{name: getattr(job, name) for name in names},
        "failed_at": job.ended_at,
        **{name: getattr(job, name) for name in ("reason", "exception", "message")},
    }


def _error(job: JobDetails) -> str:
    lines = (job.message or "").strip().splitlines()
    text = ": ".join(part for part in (job.exception, lines[0] if lines else None) if part) or job.reason or "?"
    return text if job.reason == "error" else f"{job.reason}: {text}"


def _counted(verb: str, ids: list[int], which: str, purpose: str = "") -> str:
    if not ids:
        return f"no failed jobs{which} {verb}" if verb != "forgot" else f"no failed jobs{which} to forget"
    return f"{verb} {counted(len(ids), 'job')}{which}{' ' + purpose if purpose else ''}: {listed(ids)}"


def _missing(ids: tuple[int, ...], found: list[int]) -> list[int]:
    return sorted(set(ids) - set(found))


def _report_missing(context: Context, missing: list[int]) -> None:
    """Say of ids that were named, but are not those of failed jobs, where they are; the command has not done all it should."""
    from sqlq.errors import JobNotFoundError

    for id in missing:
        try:
            state = context.app().admin.get(id).state
            said = (
                "it is failed, but not of the task and queue named, or somebody else works on it" if state == "failed" else f"it is {state}"
            )
        except JobNotFoundError:
            said = "there is no such job"
        click.echo(f"sqlq: job {id}: {said}", err=True)
    if missing:
        raise SystemExit(1)
