"""`sqlq flows`: look at flows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import click

from sqlq.cli.context import Context
from sqlq.cli.options import limit_option, listing, takes_json
from sqlq.cli.terminal.output import Cell, ago, show_fields, show_json, show_list, show_rows, styled
from sqlq.config.command_hint import command
from sqlq.config.durations import counted
from sqlq.model.flow import FlowDetails, StepDetails

SHOWN = 1_000
"""The most steps that are printed; --json has all."""


@listing
@limit_option(20, "Maximum number of rows, newest first.")
@takes_json
def flows(context: Context, limit: int, as_json: bool) -> None:
    """List flows, the newest first; show one, or skip a step.

    sqlq retry --flow ID runs failed steps again, sqlq cancel --flow ID ends a flow.
    """
    found = context.looking().flows.list(limit=limit)
    show_list(found, nothing=f"no flows in {context.shown_url()}", as_json=as_json)


@flows.command()
@click.argument("id", type=int)
@takes_json
def show(context: Context, id: int, as_json: bool) -> None:
    """Show a flow: its steps, what each waits for, and what to do next."""
    found = context.looking().flows.get(id)
    if as_json:
        show_json(found.as_json())
        return
    state = f"{found.state}, {found.steps_by_state}"
    show_fields({"flow": found.id, "name": found.name, "state": state, "enqueued": ago(found.created_at)})
    click.echo()
    show_rows(("step", "task", "state", "after", "error"), map(_step, found.steps[:SHOWN]))
    if len(found.steps) > SHOWN:
        click.echo(f"\nand {counted(len(found.steps) - SHOWN, 'more step')}; --json has all of them")
    if next_ := dict(_next(found)):
        click.echo()
        show_fields(next_)


def _step(step: StepDetails) -> list[Cell]:
    task = step.task if step.label is None else f"{step.task} ({step.label})"
    return [str(step.id), task, styled(step.state), _after(step), (step.error or "").partition("\n")[0]]


def _after(step: StepDetails) -> str:
    """Return the first steps that a step waits for, and the outcome that it needs if that is not success."""
    said = [str(id) if when == "success" else f"{id} ({when})" for id, when in list(step.after.items())[:4]]
    return ", ".join(said) + (f" and {len(step.after) - 4:,} more" if len(step.after) > 4 else "")


def _next(found: FlowDetails) -> Iterator[tuple[str, str]]:
    """Yield the next commands for a flow, each after its effect."""
    states = Counter(step.state for step in found.steps)
    failed = [step for step in found.steps if step.state == "failed"]
    if failed:
        yield "what failed", command(f"show {failed[0].id}")
        yield "run it again", command(f"retry --flow {found.id}")
        yield "go on", command(f"flows skip {failed[0].id}")
    if states.keys() & {"blocked", "scheduled", "available", "running"}:
        yield "end it", command(f"cancel --flow {found.id}")
