"""`sqlq web`: the dashboard, served for this machine or behind a proxy."""

from __future__ import annotations

import secrets
import signal
import sys
from pathlib import Path
from typing import Any

import click

from sqlq.cli.context import Context
from sqlq.web.access import ROLES


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Listen here.")
@click.option("--port", type=click.IntRange(0, 65535), default=8787, show_default=True, help="0 for any.")
@click.option(
    "--users",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Who may log in, and the tokens of the JSON API; without it a link that works once.",
)
@click.option(
    "--allow-host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="Answer under this name, too, as behind a proxy; may be given again.",
)
@click.option("--read-url", metavar="URL", help="Read from this replica, else SQLQ_READ_URL.")
@click.option("--hide-from-viewers", is_flag=True, help="Show arguments and results to operators only.")
@click.option("--new-user", metavar="NAME", help="Ask for a password, print the lines for --users, and exit.")
@click.option("--new-token", metavar="NAME", help="Make a token of the JSON API likewise.")
@click.option(
    "--role", type=click.Choice(ROLES), default="viewer", show_default=True, help="Of a new user or token."
)
@click.pass_obj
def web(context: Context, /, host: str, port: int, users: Path | None, **options: Any) -> None:
    """Look and act in a browser: the dashboard.

    On this machine alone it prints a URL that logs in once. A viewer looks; an operator retries, cancels and
    pauses; an admin also deletes, stops workers and changes limits.
    """
    from sqlq.web.serve import Server, logins_of, new_token, new_user

    name, token_of, role = (options.pop(each) for each in ("new_user", "new_token", "role"))
    if name:
        password = click.prompt("password", hide_input=True, confirmation_prompt=True, err=True)
        click.echo(new_user(name, role, password))
        return
    if token_of:
        token = secrets.token_urlsafe(32)
        click.echo(f"# the token, shown this once: {token}\n{new_token(token_of, role, token)}")
        return
    server = Server(
        context.app(),
        host=host,
        port=port,
        logins=logins_of(users),
        link=lambda url: click.echo(f"log in once with {url}", err=True),
        **options,
    )
    click.echo(f"sqlq web on {server.url}; stop it with Ctrl-C", err=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        server.run()
    finally:
        server.close()
