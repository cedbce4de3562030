"""`sqlq prune`: delete ended jobs, and the record of actions, by their age."""

from __future__ import annotations

import click

from sqlq.cli.context import Context
from sqlq.cli.options import takes_json
from sqlq.cli.terminal.output import answer, naming_options
from sqlq.config.command_hint import OWNER
from sqlq.config.durations import counted


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
        with naming_options(older_than="--audit"):
            actions = context.app().audit.prune(audit)
        answer({"audit": actions}, f"pruned {counted(actions, 'recorded action')}", as_json=as_json)
        return
    if audit is not None:
        raise click.UsageError("--audit is for the record alone: leave out the rest")
    with naming_options():
        gone = context.app().jobs.prune(finished=finished, failed=failed)
    results = [("finished", finished, gone.finished), ("failed", failed, gone.failed)]
    parts = [counted(number, f"{state} job") for state, age, number in results if age is not None]
    answer(gone._asdict(), f"pruned {' and '.join(parts)}", as_json=as_json)
