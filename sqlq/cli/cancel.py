"""`sqlq cancel` and `sqlq prune`: end jobs, and delete ended ones by their age."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from sqlq.cli.context import Context
from sqlq.cli.options import (
    MOST_COUNTED,
    ask,
    ids_argument,
    require_named,
    takes_json,
    those_of_one,
    yes_option,
)
from sqlq.cli.output import answer, listed, naming_options, of, plain
from sqlq.config.command_hint import OWNER
from sqlq.config.durations import counted

if TYPE_CHECKING:
    from sqlq.model.job import JobDetails

LIVE = ("blocked", "scheduled", "available", "running")


@click.command()
@those_of_one
@click.option("--all", is_flag=True, help="All jobs that have not ended; asks before.")
@click.option("--flow", type=int, metavar="ID", help="The steps of a flow that have not ended.")
@click.option(
    "--force", is_flag=True, help="End running jobs here and now, without waiting for their handlers."
)
@click.option("--reason", help='Why, as its result says; in place of "cancelled on request".')
@yes_option
@ids_argument
@takes_json
def cancel(
    context: Context,
    /,
    ids: tuple[int, ...],
    flow: int | None,
    force: bool,
    reason: str | None,
    as_json: bool,
    **chosen: Any,
) -> None:
    """Cancel jobs: by id, --task, --queue, --group, --flow or --all.

    Ids, task, queue and group given together must all fit. A job that waits is cancelled at once. One that
    runs gets a request to stop, which its worker sees within 2 seconds. With --force it is cancelled at once,
    too; its handler may go on, but nothing it returns or raises counts. Exits with 1 if one of the ids could
    not be cancelled.
    """
    from sqlq.admin.cancel import Cancellation

    yes = chosen.pop("yes")
    require_named("jobs", "--task, --queue, --group, --flow or --all", ids, flow, *chosen.values())
    if chosen["all"] and not (ids or flow or of(chosen)):
        live = context.app().jobs.ids(states=LIVE, limit=MOST_COUNTED)
        ask("cancel", len(live), "job", yes=yes)
    if flow is None:
        done = context.app().jobs.cancel(ids, **chosen, force=force, reason=reason)
    elif ids or any(chosen.values()):
        raise click.UsageError("--flow is for all steps of a flow: leave out the rest")
    else:
        done = context.app().flows.cancel(flow, force=force, reason=reason)
    by_word = {word: sorted(id for id, each in done.items() if each is word) for word in Cancellation}
    cancelled, requested = by_word.pop(Cancellation.CANCELLED), by_word.pop(Cancellation.REQUESTED)
    which, lines = of(chosen, flow), []
    if cancelled:
        lines += [f"cancelled {counted(len(cancelled), 'job')}{which}: {listed(cancelled)}"]
    if requested:
        asked = f"asked {counted(len(requested), 'running job')}{which} to stop: {listed(requested)}"
        lines += [f"{asked}; its worker sees it within 2 seconds; --force does not wait for it"]
    others = {word.replace(" ", "_"): ids for word, ids in by_word.items()}
    answer(
        {"cancelled": cancelled, "requested": requested, **others},
        *(lines or [f"no jobs{which} cancelled"]),
        as_json=as_json,
    )
    failed = sorted(id for ids in by_word.values() for id in ids)
    if flow is not None:  # a step that has ended meanwhile is no failure
        failed = by_word[Cancellation.LOCKED]

    def why_not(job: JobDetails) -> str:
        if done[job.id] is Cancellation.LOCKED:
            return "another transaction has locked its row: try again"
        if done[job.id] is Cancellation.PASSED_OVER:
            return f"it is of task {plain(job.task)} in queue {plain(job.queue)}, not of those named"
        return f"it is {job.state} already"

    context.refuse(failed, why_not)


@click.command()
@click.option(
    "--finished", metavar="AGE", help="Finished and cancelled jobs that ended longer ago than this, as in 7d."
)
@click.option("--failed", metavar="AGE", help="Failed jobs that failed longer ago than this, as in 30d.")
@click.option("--audit", metavar="AGE", help="Recorded actions of operators older than this, as in 90d.")
@takes_json
def prune(
    context: Context, finished: str | None, failed: str | None, audit: str | None, as_json: bool
) -> None:
    """Delete ended jobs, or the audit, by age.

    Give --finished, --failed or both; deletes in small batches. Workers prune finished jobs by themselves,
    after 7 days or the App's retention=. Failed jobs stay until you retry, delete or prune them. Jobs with a
    retention of their own are left alone: workers delete them, failed ones too, when it is over.
    """
    if audit is not None and finished is None and failed is None:
        context.kind = OWNER
        with naming_options(older_than="audit"):
            actions = context.app().audit.prune(audit)
        answer({"audit": actions}, f"pruned {counted(actions, 'recorded action')}", as_json=as_json)
        return
    if audit is not None:
        raise click.UsageError("--audit is for the record alone: leave out the rest")
    if finished is None and failed is None:
        raise click.UsageError("say what to prune: --finished, --failed or both, each with an age such as 7d")
    with naming_options("finished", "failed"):
        gone = context.app().jobs.prune(finished=finished, failed=failed)
    asked = [("finished", finished, gone.finished), ("failed", failed, gone.failed)]
    parts = [counted(number, f"{what} job") for what, age, number in asked if age is not None]
    answer(gone._asdict(), f"pruned {' and '.join(parts)}", as_json=as_json)
