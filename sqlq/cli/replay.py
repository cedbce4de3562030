"""`sqlq replay`: enqueue ended jobs once more, as new jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from sqlq.cli.context import Context
from sqlq.cli.options import ids_argument, require_named, takes_json, those_of_one, time_option
from sqlq.cli.output import answer, listed, of
from sqlq.config.durations import counted

if TYPE_CHECKING:
    from sqlq.model.job import JobDetails


@click.command()
@ids_argument
@those_of_one
@time_option("That ended at this time or later; or AGE, as in 2h.", "--from", "since", or_age=True)
@time_option("That ended before this time; or AGE.", "--to", "until", or_age=True)
@takes_json
def replay(context: Context, /, as_json: bool, **chosen: Any) -> None:
    """Enqueue copies of ended jobs, as new jobs.

    By id, --task, --queue, --group, --from and --to; all that is given must fit. Each copy has an id of its
    own, and no unique key. Cancelled jobs are copied by id only, steps of flows never. Exits with 1 if one of
    the ids was not copied.

    \b
    sqlq replay --task shop.send_receipt --from 2h
    """
    require_named("jobs", "--task, --queue, --group, --from or --to", *chosen.values())
    replays, which = context.app(needs_code=True).jobs.replay(**chosen), of(chosen)
    new, missing = [*replays.values()], sorted(set(chosen["ids"]) - replays.keys())
    line = f"replayed {counted(len(new), 'job')}{which} as {listed(new)}"
    if not new:
        line = f"no ended jobs{which} to replay"
    rows = [{"id": id, "replay_of": original} for original, id in replays.items()]
    answer({"replayed": rows, "not_replayed": missing}, line, as_json=as_json)
    context.refuse(missing, _why_not)


def _why_not(job: JobDetails) -> str:
    if job.flow_id is not None:
        return f"it is a step of flow {job.flow_id}: sqlq retry --flow {job.flow_id} runs failed steps again"
    if job.ended_at is None:
        return f"it is {job.state}, and only ended jobs are replayed"
    return f"it is {job.state}, but not of those named"
