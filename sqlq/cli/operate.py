"""`sqlq cancel`, `pause`, `resume`, `prune`: what an operator does to jobs and queues."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import click

from sqlq.cli.context import Context
from sqlq.cli.output import (
    counted,
    json_option,
    listed,
    naming_options,
    of,
    plain,
    require_named,
    show_json,
)

if TYPE_CHECKING:
    from sqlq.admin.cancel import Cancellation

EXPLAINED = 20
"""Of how many jobs it is said, one line each, why they were not cancelled."""


@click.command()
@click.option("--task", help="Those of one task.")
@click.option("--queue", help="Those of one queue.")
@click.option(
    "--force", is_flag=True, help="End running jobs here and now, without waiting for their handlers."
)
@click.argument("ids", type=int, nargs=-1)
@json_option
@click.pass_obj
def cancel(
    context: Context, ids: tuple[int, ...], task: str | None, queue: str | None, force: bool, as_json: bool
) -> None:
    """Cancel jobs: by id, --task or --queue.

    Ids, task and queue given together must all fit. A job that waits is cancelled at once. One that runs
    is asked to stop: its worker sees the request within 2 seconds. With --force
    it is cancelled at once, too; its handler may go on, but nothing it returns or raises counts. Exits
    with 1 if one of the ids could not be cancelled.
    """
    from sqlq.admin.cancel import Cancellation

    require_named("jobs", "--task or --queue", ids, task, queue)
    done = context.app().jobs.cancel(ids, task=task, queue=queue, force=force)
    by_word: dict[Cancellation, list[int]] = {word: [] for word in Cancellation}
    for id, word in done.items():
        by_word[word].append(id)
    cancelled, requested = by_word[Cancellation.CANCELLED], by_word[Cancellation.REQUESTED]
    if as_json:
        show_json({word.replace(" ", "_"): sorted(found) for word, found in by_word.items()})
    else:
        if cancelled:
            click.echo(f"cancelled {counted(len(cancelled), 'job')}{of(task, queue)}: {listed(cancelled)}")
        if requested:
            what = "its worker sees it within 2 seconds; --force does not wait for it"
            click.echo(
                f"asked {counted(len(requested), 'running job')}{of(task, queue)} to stop: "
                f"{listed(requested)}; {what}"
            )
        if not cancelled and not requested:
            click.echo(f"no jobs{of(task, queue)} cancelled")
    failed = {
        id: word for id, word in done.items() if word not in (Cancellation.CANCELLED, Cancellation.REQUESTED)
    }
    for id in sorted(failed)[:EXPLAINED]:
        click.echo(f"sqlq: job {id}: {_why_not(context, id, failed[id])}", err=True)
    others = Counter(failed[id].value for id in sorted(failed)[EXPLAINED:])
    for reason, (one, many) in _COUNTED.items():
        if number := others[reason]:
            click.echo(f"sqlq: {counted(number, 'more job')} {one if number == 1 else many}", err=True)
    if failed:
        raise SystemExit(1)


_COUNTED = {
    "ended": ("has ended already", "have ended already"),
    "unknown": ("does not exist", "do not exist"),
    "passed over": ("is not of the task and queue named", "are not of the task and queue named"),
    "locked": ("is locked by another transaction: try again", "are locked by other transactions: try again"),
}


def _why_not(context: Context, id: int, word: Cancellation) -> str:
    from sqlq.admin.cancel import Cancellation
    from sqlq.errors import JobNotFoundError

    if word is Cancellation.UNKNOWN:
        return "there is no such job"
    if word is Cancellation.LOCKED:
        return "another transaction has locked its row: try again"
    try:
        job = context.app().jobs.get(id)
    except JobNotFoundError:
        return "it has ended, and is gone by now"
    if word is Cancellation.PASSED_OVER:
        return f"it is of task {plain(job.task)} in queue {plain(job.queue)}, not of those named"
    return f"it is {job.state} already"


@click.command()
@click.argument("queues", metavar="[QUEUE...]", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All queues, those made later included.")
@click.option("--for", "lasting", metavar="DURATION", help="Resume by itself after so long, as in 10m.")
@json_option
@click.pass_obj
def pause(
    context: Context, queues: tuple[str, ...], everything: bool, lasting: str | None, as_json: bool
) -> None:
    """Let no worker claim from queues until they are resumed.

    What runs already runs on, and enqueueing goes on as ever. Workers that serve a paused queue by name wait
    as if it were empty. A pause of a queue counts from the next claim on, that of all queues within 2
    seconds. To pause workers, and not queues: sqlq workers pause.
    """
    _require_queues(queues, everything)
    length = None if lasting is None else _length(lasting)
    ending = "" if lasting is None else f" for {lasting.strip()}"
    if everything:
        changed = context.app().queues.pause(all=True, lasting=length)
        said = f"paused all queues{ending}" if changed else f"all queues are paused already{_now(ending)}"
        _show_all(said, "paused", bool(changed), as_json=as_json)
        return
    unknown = context.app().queues.unknown(queues)
    changed = context.app().queues.pause(*queues, lasting=length)
    if as_json:
        show_json(_switched(queues, "paused", changed, unknown))
        return
    for queue in sorted({*queues}):
        name = plain(queue)
        nothing = (
            "; nothing else is known of a queue of that name: no job is in it, and no worker or task names it"
            if queue in unknown
            else ""
        )
        again = f"{name} is paused already{_now(ending)}"
        click.echo(f"paused {name}{ending}{nothing}" if queue in changed else again)


@click.command()
@click.argument("queues", metavar="[QUEUE...]", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="End a pause of all queues.")
@json_option
@click.pass_obj
def resume(context: Context, queues: tuple[str, ...], everything: bool, as_json: bool) -> None:
    """Let workers claim from these queues again.

    With --all the pause of all queues ends; those that were paused by name stay so.
    """
    _require_queues(queues, everything)
    if everything:
        changed = context.app().queues.resume(all=True)
        said = "resumed all queues that are not paused by name" if changed else "all queues are not paused"
        _show_all(said, "resumed", bool(changed), as_json=as_json)
        return
    unknown = context.app().queues.unknown(queues) if as_json else []
    changed = context.app().queues.resume(*queues)
    if as_json:
        show_json(_switched(queues, "resumed", changed, unknown))
        return
    for queue in sorted({*queues}):
        click.echo(f"resumed {plain(queue)}" if queue in changed else f"{plain(queue)} is not paused")


def _require_queues(queues: tuple[str, ...], everything: bool) -> None:
    if bool(queues) == everything:
        raise click.UsageError("name the queues, or give --all" + (", and not both" if queues else ""))


def _length(lasting: str) -> timedelta:
    from sqlq.config.durations import milliseconds

    with naming_options("for"):
        ms = milliseconds(lasting, "for")
    if ms == 0:
        raise click.UsageError("--for is zero: a pause has a length, or leave it out for one without end")
    return timedelta(milliseconds=ms)


def _now(ending: str) -> str:
    return f", and from now on{ending}" if ending else ", and from now on without an end"


def _show_all(said: str, word: str, changed: bool, *, as_json: bool) -> None:
    if as_json:
        show_json({"all": True, word: changed})
    else:
        click.echo(said)


def _switched(
    queues: Sequence[str], word: str, changed: Sequence[str], unknown: Sequence[str]
) -> list[dict[str, object]]:
    return [{"queue": q, word: q in changed, "known": q not in unknown} for q in sorted({*queues})]


@click.command()
@click.option(
    "--finished", metavar="AGE", help="Finished and cancelled jobs that ended longer ago than this, as in 7d."
)
@click.option("--failed", metavar="AGE", help="Failed jobs that failed longer ago than this, as in 30d.")
@json_option
@click.pass_obj
def prune(context: Context, finished: str | None, failed: str | None, as_json: bool) -> None:
    """Delete ended jobs by their age.

    Give --finished, --failed or both; deletes in small batches. Workers prune finished jobs by
    themselves, after 7 days or what your App says (retention=). Failed jobs stay until you retry, forget
    or prune them. Jobs with a retention of their own are left alone: workers delete them, failed ones
    too, when it is over.
    """
    if finished is None and failed is None:
        raise click.UsageError("say what to prune: --finished, --failed or both, each with an age such as 7d")
    with naming_options("finished", "failed"):
        gone = context.app().jobs.prune(finished=finished, failed=failed)
    if as_json:
        show_json({"finished": gone.finished, "failed": gone.failed})
        return
    asked = [("finished", finished, gone.finished), ("failed", failed, gone.failed)]
    parts = [counted(number, f"{what} job") for what, age, number in asked if age is not None]
    click.echo(f"pruned {' and '.join(parts)}")
