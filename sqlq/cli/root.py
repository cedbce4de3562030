"""The command `sqlq`: its global options, its commands, and what becomes of an error."""

from __future__ import annotations

import io
import os
import sys
from collections import UserDict
from contextvars import copy_context
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from sqlq import __version__
from sqlq.admin.verbs import VERBS
from sqlq.cli.context import Context, takes_context
from sqlq.config import command_hint
from sqlq.config.constants import INTERRUPTED
from sqlq.errors import SqlqError

if TYPE_CHECKING:
    from typing import NoReturn

    from sqlq.admin.verb import Verb


_COMMANDS = {
    "init": "Begin to use sqlq in the project here.",
    "migrate": "Create the tables, or bring them up to this version.",
    "work": "Run jobs until stopped.",
    "enqueue": "Enqueue a job of TASK with ARGS.",
    "status": "Show what is wrong, what each queue holds, and who serves it.",
    "jobs": "List jobs, the newest first, in whatever state they are.",
    "show": "Show all about one job, in whatever state it is.",
    "why": "Explain why a job does not run now, and when it will.",
    "failed": "Count failed jobs by task and error, the most frequent first.",
    **{words: verb.help.partition("\n")[0] for words, verb in VERBS.items() if not verb.group},
    "prune": "Delete ended jobs, or the audit, by age.",
    "queues": "Show what each queue holds; pause and resume queues.",
    "workers": "Show workers and what they run; pause, stop or restart them.",
    "flows": "List flows, the newest first; show one, or skip a step.",
    "limits": "List the keys of limits; set a limit, and clear it.",
    "schedules": "List schedules; add, pause and run them.",
    "web": "Look and act in a browser: the dashboard.",
    "audit": "Show what operators did, the newest first; stop an action.",
    "keys": "Make keys that sign or encrypt arguments and results.",
    "grants": "Print the GRANTs that ROLE needs, or run them.",
    "doctor": "Examine the database and the queue in it.",
    "health": "Exit with 0 if a worker with this health file is alive.",
    "metrics": "Show for Prometheus what only the database knows.",
    "demo": "See the whole flow in a few seconds.",
}
"""The commands with the first sentence of each, in the order in which people meet them. So `sqlq --help`
imports none of them."""


_MODULES = {"queues": "status", "why": "show"} | dict.fromkeys(
    ("jobs", "failed", "workers", "flows", "limits", "audit"), "lists"
)
"""The modules of commands that share one; each other command has its own."""


class Commands(UserDict[str, Any]):
    """The commands by name. The module of each is imported when the command is first used."""

    def __getitem__(self, name: str) -> click.Command:
        if self.data[name] is None:
            self.data[name] = command = _verb(VERBS[name]) if name in VERBS else _with_its_verbs(name)
            takes_context(command, explain=False)
        result: click.Command = self.data[name]
        return result


def _verb(verb: Verb) -> click.Command:
    from sqlq.cli.verbs import command_of

    return command_of(verb)


def _with_its_verbs(name: str) -> click.Command:
    """Return a command of a module, and below it the verbs that begin with its name."""
    command: click.Command = getattr(import_module(f"sqlq.cli.commands.{_MODULES.get(name, name)}"), name)
    if isinstance(command, click.Group):
        for verb in (each for each in VERBS.values() if each.group == name):
            command.add_command(_verb(verb))
    return command


class InOrder(click.Group):
    """A group that lists its commands in the order in which people meet them, and knows those of others."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        for words in (args[0], " ".join(args[:2])):
            if advice := _COMMANDS_ELSEWHERE.get(words):
                raise click.UsageError(f"no such command {words!r}: {advice}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # the reader of the pipe has seen enough; click would exit with 1
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0


_COMMANDS_ELSEWHERE = {
    "flows cancel": "write sqlq cancel --flow ID",
    "flows retry": "write sqlq retry --flow ID",
    "beat": "sqlq work enqueues what is scheduled, too; see sqlq schedules",
    "empty": "sqlq cancel --queue QUEUE ends what waits in a queue",
    "inspect": "see sqlq workers, sqlq jobs and sqlq doctor",
    "purge": "sqlq cancel --queue QUEUE ends what waits in a queue, sqlq prune deletes what has ended",
    "restart": "write sqlq workers restart --all",
    "result": "write sqlq show ID --result, and --wait 10s to wait for it",
    "resume": "write sqlq queues resume",
    "worker": "write sqlq work, or sqlq workers for those that run",
    "work --burst": "write --drain",
    "work --pool": "write -c for jobs at a time, -p for processes",
}


@click.group(cls=InOrder, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="sqlq")
def sqlq() -> None:
    """A job queue inside the SQL database you already have.

    \b
    sqlq demo                         see it work, on a throw-away database
    sqlq migrate -a shop.tasks:app    create the tables
    sqlq work -a shop.tasks:app       run jobs
    """


takes_context(sqlq)
sqlq.commands = Commands(dict.fromkeys(_COMMANDS))


def run(context: Context | None = None) -> NoReturn:
    """Run the command line and exit: 0 for done, 1 when it could not be, 2 for a command line that is
    wrong."""
    command_hint.current = context = context or Context()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a character that the locale has not is no reason to end
            stream.reconfigure(errors="backslashreplace")
    context.is_a_command = True
    main = partial(sqlq.main, prog_name=context.name, standalone_mode=False, obj=context)
    try:
        sys.exit(copy_context().run(main) or 0)  # the actor is that of this command alone
    except (click.Abort, KeyboardInterrupt):
        sys.exit(INTERRUPTED)
    except click.ClickException as error:
        text = io.StringIO()
        error.show(text)
        context.report(text.getvalue().rstrip("\n") if context.json_log is None else error.format_message())
        sys.exit(error.exit_code)
    except Exception as error:
        if isinstance(error, SqlqError):  # its sentence is there, and costs no import of SQLAlchemy
            sentence: str | None = str(error)
        else:
            from sqlq.cli.problems import explain

            sentence = explain(error, context)
        if sentence is None and context.json_log is None:
            raise
        context.report(f"{context.name}: {sentence or repr(error)}", exc_info=sentence is None)
        sys.exit(1)
    finally:
        context.close()
