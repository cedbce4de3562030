"""`sqlq result`: what a job returned, for a script that waits for it."""

from __future__ import annotations

import click

from sqlq.cli.context import Context
from sqlq.cli.output import naming_options, show_json


@click.command()
@click.argument("id", type=int)
@click.option(
    "--timeout",
    default="0s",
    show_default=True,
    metavar="DURATION",
    help='Wait so long for its end, as in "30s"; none waits without end.',
)
@click.pass_obj
def result(context: Context, id: int, timeout: str) -> None:
    """Print the result of a job as JSON, once it has finished.

    Exits with 1, and says why in one sentence, when it has failed, was cancelled, or has not ended by then.
    """
    with naming_options("timeout"):
        show_json(context.app().result(id, None if timeout == "none" else timeout, raw=True))
