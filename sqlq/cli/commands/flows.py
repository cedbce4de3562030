"""`sqlq flows`: look at flows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import click

from sqlq.cli.context import Context
from sqlq.cli.options import limit_option, listing, takes_json
from sqlq.cli.terminal.output import ago, show_fields, show_json, show_list, show_table
from sqlq.config.command_hint import command
from sqlq.config.durations import counted
from sqlq.model.flow import FlowDetails

SHOWN = 1_000
"""The most steps that are printed; --json has all."""


@listing
@limit_option(20, "Maximum number of rows, newest first.")
@takes_json
def flows(context: Context, limit: int, as_json: bool) -> None:
    """List flows, the newest first; show one, or skip a step.

    sqlq retry --flow ID runs failed steps again, sqlq cancel --flow ID ends a flow.
    """
    details = context.looking().flows.list(limit=limit)
    show_list(details, nothing=f"no flows in {context.shown_url()}", as_json=as_json)


@flows.command()
@click.argument("id", type=int)
@takes_json
def show(context: Context, id: int, as_json: bool) -> None:
    """Show a flow: its steps, what each waits for, and what to do next."""
    details = context.looking().flows.get(id)
    if as_json:
        show_json(details.as_json())
        return
    show_fields(
        {
            "flow": details.id,
            "name": details.name,
            "state": f"{details.state}, {details.steps_by_state}",
            "enqueued": ago(details.created_at),
        }
    )
    click.echo()
    show_table(details.steps[:SHOWN])
    if len(details.steps) > SHOWN:
        click.echo(f"\nand {counted(len(details.steps) - SHOWN, 'more step')}; --json has all of them")
    if next_ := dict(_next(details)):
        click.echo()
        show_fields(next_)


def _next(details: FlowDetails) -> Iterator[tuple[str, str]]:
    """Yield the next commands for a flow, each after its effect."""
    states = Counter(step.state for step in details.steps)
    failed = [step for step in details.steps if step.state == "failed"]
    if failed:
        yield "what failed", command(f"show {failed[0].id}")
        yield "run it again", command(f"retry --flow {details.id}")
        yield "go on", command(f"flows skip {failed[0].id}")
    if states.keys() & {"blocked", "scheduled", "available", "running"}:
        yield "end it", command(f"cancel --flow {details.id}")
