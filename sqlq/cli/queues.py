"""`sqlq queues`: see what each queue holds, and pause and resume queues."""

from __future__ import annotations

from collections.abc import Sequence

import click

from sqlq.cli.context import Context
from sqlq.cli.options import exact_option, listing, require_names, takes_json
from sqlq.cli.output import answer, naming_options, plain, show_json
from sqlq.cli.status import show_queues


@listing
@exact_option
@takes_json
def queues(context: Context, exact: bool, as_json: bool) -> None:
    """Show what each queue holds; pause and resume queues.

    Counts end at 10,000, shown as 10,000+; --exact counts on. sqlq status has the workers, too.
    """
    app = context.looking()
    rows = app.queues.status(exact=exact)
    if as_json:
        show_json([row.as_json() for row in rows])
    else:
        show_queues(context, rows, app.queues.pauses())


@queues.command()
@click.argument("names", metavar="[QUEUE...]", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All queues, those made later included.")
@click.option("--for", "lasting", metavar="DURATION", help="Resume by itself after so long, as in 10m.")
@takes_json
def pause(
    context: Context,
    names: tuple[str, ...],
    everything: bool,
    lasting: str | None,
    as_json: bool,
) -> None:
    """Let no worker claim from queues until they are resumed.

    Running jobs and enqueueing go on. Workers that serve a paused queue by name wait as if it were empty. A
    pause of a queue counts from the next claim on, that of all queues within 2 seconds. To pause workers, and
    not queues: sqlq workers pause.
    """
    require_names("queues", names, everything)
    ending = "" if lasting is None else f" for {lasting.strip()}"
    already = f"paused already, and from now on{ending or ' without an end'}"
    queues = context.app().queues
    unknown = queues.unknown(names)
    with naming_options(lasting="for"):
        changed = queues.pause(*names, all=everything, lasting=lasting)
    if everything:
        line = f"paused all queues{ending}" if changed else f"all queues are {already}"
        answer({"all": True, "paused": bool(changed)}, line, as_json=as_json)
    else:
        nothing = (
            "; nothing else is known of a queue of that name: no job is in it, and no worker or task names it"
        )
        lines = [
            f"paused {plain(name)}{ending}{nothing if name in unknown else ''}"
            if name in changed
            else f"{plain(name)} is {already}"
            for name in sorted({*names})
        ]
        answer(_switched(names, "paused", changed, unknown), *lines, as_json=as_json)


@queues.command()
@click.argument("names", metavar="[QUEUE...]", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="End a pause of all queues.")
@takes_json
def resume(context: Context, names: tuple[str, ...], everything: bool, as_json: bool) -> None:
    """Let workers claim from these queues again.

    With --all the pause of all queues ends; those that were paused by name stay so.
    """
    require_names("queues", names, everything)
    queues = context.app().queues
    unknown = queues.unknown(names) if as_json else []
    changed = queues.resume(*names, all=everything)
    if everything:
        line = "resumed all queues that are not paused by name" if changed else "all queues are not paused"
        answer({"all": True, "resumed": bool(changed)}, line, as_json=as_json)
    else:
        lines = [
            f"resumed {plain(name)}" if name in changed else f"{plain(name)} is not paused"
            for name in sorted({*names})
        ]
        answer(_switched(names, "resumed", changed, unknown), *lines, as_json=as_json)


def _switched(
    names: Sequence[str], verb: str, changed: Sequence[str], unknown: Sequence[str]
) -> list[dict[str, object]]:
    return [{"queue": q, verb: q in changed, "known": q not in unknown} for q in sorted({*names})]
