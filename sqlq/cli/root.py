"""The command `sqlq`: its global options, its commands, and what becomes of an error."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from sqlq import __version__
from sqlq.cli.context import Context
from sqlq.cli.demo import demo
from sqlq.cli.doctor import doctor
from sqlq.cli.enqueue import enqueue
from sqlq.cli.failed import failed
from sqlq.cli.health import health
from sqlq.cli.migrate import migrate
from sqlq.cli.operate import cancel, pause, prune, resume
from sqlq.cli.status import status
from sqlq.cli.work import work
from sqlq.cli.workers import workers

if TYPE_CHECKING:
    from typing import NoReturn

INTERRUPTED = 130
"""128 + SIGINT, as shells count it."""


class InOrder(click.Group):
    """A group that lists its commands in the order in which people meet them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=InOrder, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "-d",
    "--database-url",
    metavar="URL",
    help="The database: postgresql://user:password@host/name or sqlite:///file.db. Without it the App's own counts, where --app is "
    "given; without an App, or where the App names none, SQLQ_DATABASE_URL; and then sqlite:///sqlq.db here.",
)
@click.option(
    "-a",
    "--app",
    "app_path",
    metavar="MODULE:ATTRIBUTE",
    envvar="SQLQ_APP",
    show_envvar=True,
    help="Your App with its tasks, as in shop.tasks:app; found in the current directory, too.",
)
@click.version_option(__version__, prog_name="sqlq")
@click.pass_context
def sqlq(ctx: click.Context, database_url: str | None, app_path: str | None) -> None:
    """A job queue inside the SQL database you already have.

    \b
    sqlq demo                                  see it work, on a database thrown away afterwards
    sqlq -d postgresql://localhost/shop migrate
    sqlq -a shop.tasks:app work
    """
    context = ctx.ensure_object(Context)
    context.database_url = database_url
    context.app_path = app_path


for command in (migrate, work, enqueue, status, workers, failed, cancel, pause, resume, prune, doctor, health, demo):
    sqlq.add_command(command)


def main() -> NoReturn:
    """Run the command line and exit: 0 for done, 1 when it could not be, 2 for a command line that is wrong."""
    context = Context()
    try:
        sys.exit(sqlq.main(prog_name="sqlq", standalone_mode=False, obj=context) or 0)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(INTERRUPTED)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except BrokenPipeError:  # whoever reads the pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        from sqlq.cli.problems import explain

        sentence = explain(error, context)
        if sentence is None:
            raise
        click.echo(f"sqlq: {sentence}", err=True)
        sys.exit(1)
