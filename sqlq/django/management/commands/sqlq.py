"""`manage.py sqlq …`: the command line of sqlq, with the project's App."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from typing import Any, NoReturn

from django.core.management.base import BaseCommand, CommandError

from sqlq.cli.context import Context
from sqlq.django.configuration import Configuration

APP = "sqlq.django:app"


@dataclass
class InManage(Context):
    """The command line of sqlq as a command of manage.py, which knows the App."""

    app_option: str | None = APP

    def options(self, *, needs_app: bool) -> list[str]:
        """Return the options of another command, without the App, which is always this one."""
        return super().options(needs_app=False)[2:]


class Command(BaseCommand):
    """Hands its arguments to `sqlq`, and Django's own options (--settings, --pythonpath) to Django."""

    def run_from_argv(self, argv: list[str]) -> NoReturn:
        from sqlq.cli.root import run

        # Django has taken these two from the line already, and left them on it
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--settings")
        parser.add_argument("--pythonpath")
        options, arguments = parser.parse_known_args(argv[2:])
        script = os.path.basename(argv[0])  # noqa: PTH119 - a name, not a place
        name = f"{'python ' if script.endswith('.py') else ''}{script} sqlq"
        name = "python -m django sqlq" if script == "__main__.py" else name
        # a worker's children are started as this process was, and so find the same settings and modules
        line = sys.orig_argv
        if line[-len(argv[1:]) :] == argv[1:]:
            program = [sys.executable, *line[1 : len(line) - len(argv[2:])]]
        else:  # called by a program with arguments of its own
            program = [sys.executable, "-m", "sqlq", "-a", APP]
        program += [f"--{key}={value}" for key, value in vars(options).items() if value]
        for option, value in Configuration.read().workers.items():  # which the processes of a worker inherit
            os.environ.setdefault(f"SQLQ_{option.upper()}", str(value))
        sys.argv = [name, *arguments]
        run(InManage(name=name, program=program))

    def print_help(self, prog_name: str, subcommand: str) -> None:
        """Show what `manage.py sqlq --help` shows, at `manage.py help sqlq`."""
        self.run_from_argv([prog_name, subcommand, "--help"])

    def create_parser(self, *args: Any, **options: Any) -> NoReturn:
        """Refuse `call_command`, which begins here."""
        raise CommandError(
            "sqlq runs in a process of its own, as in python manage.py sqlq status; call the App in code, as "
            "in app.migrate(), and sqlq.testing.drain(app) in tests"
        )
