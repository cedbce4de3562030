"""`sqlq web`: the dashboard, served for this machine or behind a proxy."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import click

from sqlq.cli.context import Context
from sqlq.cli.options import file_option, flag, port_option


@click.command()
@click.option(
    "--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Address to listen at."
)
@port_option("--port", default=8787, show_default=True, help="Port to listen at; 0 for any free one.")
@file_option(
    "--users",
    help="File of users, with a line name:role:hash each; without it, a link that works once.",
)
@click.option(
    "--allow-host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="Host name to accept, as behind a proxy; repeatable.",
)
@click.option("--read-url", metavar="URL", help="URL of a replica to read from (default SQLQ_READ_URL).")
@flag("--hide-from-viewers", help="Show arguments and results to operators only.")
@click.pass_obj
def web(context: Context, /, host: str, port: int, users: Path | None, **options: Any) -> None:
    """Look and act in a browser: the dashboard.

    On this machine alone it prints a URL that logs in once. A viewer looks; an operator retries, cancels and
    pauses; an admin also deletes, stops workers and changes limits.
    """
    from sqlq.web.serve import Server

    dashboard = Server(
        context.app(),
        host=host,
        port=port,
        users=users,
        link=lambda url: click.echo(f"log in once with {url}", err=True),
        **options,
    )
    click.echo(f"sqlq web on {dashboard.url}; stop it with Ctrl-C", err=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    dashboard.server.run()
