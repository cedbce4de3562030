"""How options, variables and pyproject.toml name the App and the database. A command looks for them when it
first needs them."""

from __future__ import annotations

import getpass
import importlib
import inspect
import os
import re
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from traceback import TracebackException
from types import ModuleType
from typing import TYPE_CHECKING, Any

import click

from sqlq.cli.processes import conceal
from sqlq.config.command_hint import OWNER, CommandLine, escaped_lines
from sqlq.errors import ConfigurationError

if TYPE_CHECKING:
    from sqlalchemy import URL

    from sqlq.app.app import App
    from sqlq.config.pyproject import Project


@dataclass
class Context(CommandLine):
    """The options of one run of `sqlq` that name the App and the database."""

    database_url: str | None = field(default=None, repr=False)
    """The option -d."""
    app_option: str | None = None
    """The option -a."""
    program: Sequence[str] = (sys.executable, "-m", "sqlq")
    """The command that starts it again, before its arguments."""
    is_a_command: bool = False
    """Whether `run` runs it, so that its actions are recorded."""
    json_log: Mapping[str, Any] | None = None
    """How it logs, where that is as JSON: its error is a line of this log then."""
    _app: App | None = field(default=None, repr=False)
    _replica: App | None = field(default=None, repr=False)

    # -- what names them -------------------------------------------------------------------------------------

    def choose(self, name: str, value: str) -> None:
        """Take an option that may stand before the command and after it."""
        option = {"database_url": "--database-url", "app_option": "--app"}[name]
        if name == "database_url" and ("@" in value or "?" in value):  # where a password stands
            conceal(value)  # guard: no-process-shows-its-url
        if getattr(self, name) not in (None, value):
            raise click.UsageError(
                f"{option} before the command says another thing than {option} after it: give one of them"
            )
        setattr(self, name, value)

    @cached_property
    def project(self) -> Project | None:
        """The table [tool.sqlq] of pyproject.toml."""
        from sqlq.config import pyproject

        return pyproject.find()

    @property
    def app_path(self) -> str | None:
        """The path of the App: -a, else SQLQ_APP, else pyproject.toml."""
        return self._standing_app if self.app_option is None else self.app_option

    @property
    def _standing_app(self) -> str | None:
        return os.environ.get("SQLQ_APP") or (self.project.app if self.project else None)

    @property
    def _standing_url(self) -> str | None:
        return os.environ.get("SQLQ_DATABASE_URL") or (self.project.database_url if self.project else None)

    def names_nothing(self) -> bool:
        """Whether neither an App nor a database is named anywhere."""
        return not (self.database_url or self.app_path or self._standing_url)

    def url(self) -> URL | None:
        return None if self._app is None else self._app.database.engine.url

    def options(self, *, needs_app: bool) -> list[str]:
        # the next command reads the same environment and pyproject.toml
        app = None if self.app_option == self._standing_app else self.app_option
        if app is None and needs_app and self.app_path is None:
            app = "module:attribute"
        return [*([] if app is None else ["-a", shlex.quote(app)]), *self._database_option()]

    def _database_option(self) -> list[str]:
        from sqlalchemy import make_url
        from sqlalchemy.exc import ArgumentError

        from sqlq.config.urls import has_secret, masked

        is_standing = self.database_url == os.environ.get("SQLQ_DATABASE_URL") and self.app_path is None
        if self.database_url is None or is_standing:
            return []
        try:
            url = make_url(self.database_url)
        except (ArgumentError, ValueError):
            return []
        return ["-d", shlex.quote(masked(url) if has_secret(url) else self.database_url)]

    def report(self, sentence: str, *, exc_info: bool = False) -> None:
        """Print the error that ends this run."""
        if self.json_log is None:
            click.echo(escaped_lines(sentence), err=True)
        else:
            from sqlq.cli.terminal import logs

            logs.set_up(**self.json_log)
            logs.log.error("%s", sentence, exc_info=exc_info, extra={"event": "start_failed"})

    # -- the App ---------------------------------------------------------------------------------------------

    def app(self, *, needs_code: bool = False, looks: bool = False) -> App:
        """Return the App that is named, else one without tasks; in either case on the database of -d, if
        given. With -d and without -a the App's module is imported only for a command that `needs_code`: its
        tasks, keys or hooks. A reader, or one that `looks`, does without a module that cannot be imported.

        Raises `ConfigurationError` for an App that cannot be imported, and for a URL that cannot be used.
        """
        if self._app is None:
            # guard: database-url-imports-no-app
            path = self.app_path if needs_code or self.database_url is None else self.app_option
            try:
                self._app = self._find(path)
            except ConfigurationError as error:
                if needs_code or path is None:
                    raise
                self._app = self._without_code(error, looks=looks or self.kind == "reader")
            if self.is_a_command and self.kind != "worker":  # which is no operator
                _record_as_this_user()
        return self._app

    def looking(self) -> App:
        """Return the App for a command that only looks: at the replica of SQLQ_READ_URL, where one is
        named."""
        from sqlq.config.urls import read_url
        from sqlq.database.timeouts import ANY

        self.kind = "reader"
        app = self.app()
        if (url := read_url(of=app.url)) is None:
            return app
        self._replica = app._for_looking(url, ANY)
        return self._replica

    def app_with_tasks(self, why: str) -> App:
        """Return the App that is named. Raises `ConfigurationError` where none is, or it has no tasks; `why`
        is the reason that it is needed."""
        self.require_app(why)
        app = self.app(needs_code=True)
        if not app.tasks:
            raise ConfigurationError(
                f"the App {self.app_path} has no tasks: import the modules that define them in the one that "
                "--app names"
            )
        return app

    def require_app(self, why: str) -> None:
        """Raise `UsageError` where no App is named; `why` is the reason that it is needed. Imports
        nothing."""
        if self.app_path is None:
            raise click.UsageError(
                f"{why}: name the App with --app module:attribute, as in sqlq work --app shop.tasks:app, "
                "with SQLQ_APP, or in pyproject.toml under [tool.sqlq]"
            )

    def close(self) -> None:
        """Close the connections of the App. The end of the process does not: `main` leaves what was made."""
        if self._app is not None:
            self._app.close()

    def _without_code(self, error: ConfigurationError, *, looks: bool) -> App:
        """Return an App without tasks on the database that is known without the module. Raises the error of
        its import where none is, or where it might be another one, for a command that changes something."""
        from sqlq.config.urls import masked

        if self.database_url is None and not (looks and self._standing_url):
            raise ConfigurationError(f"{error}; this command needs no code: name its database with -d")
        app = self._find(None)
        text = f"{self.name}: {error}; going on without the App, with {masked(app.database.engine.url)}"
        click.echo(escaped_lines(text), err=True)
        return app

    def _find(self, path: str | None) -> App:
        from sqlq.app.app import App
        from sqlq.config.urls import database_url, is_same_database
        from sqlq.database.dialects import dialect_at

        if path is None:
            return App() if self.database_url is None else App(self.database_url)
        directories = [Path.cwd(), *([] if self.project is None else [self.project.file.parent])]
        if self.database_url is None:
            return load_app(path, directories)
        url = database_url(self.database_url)
        # an App that names no database itself takes this one, and so does whatever else reads the variable
        os.environ["SQLQ_DATABASE_URL"] = self.database_url
        app = load_app(path, directories)
        if app.url != url:
            # what goes with another database does not go with this one
            schema = None if dialect_at(url).in_a_file else app.schema
            listen_url = app._connected.address.listen_url if is_same_database(app.url, url) else None
            app.use(self.database_url, schema=schema, listen_url=listen_url)
        return app

    def shown_url(self) -> str:
        """Return the database as it may be shown: without its password, an SQLite file with its whole
        path."""
        from sqlq.config.urls import shown

        return shown((self._replica or self.app()).database.engine.url)


def takes_context(command: click.Command, *, explain: bool = True) -> None:
    """Let a command, and those within it, take -d and -a. The help of the first one explains them, and the
    others point to it."""

    def take(ctx: click.Context, option: click.Parameter, value: str | None) -> None:
        context = ctx.find_object(Context)
        if context is not None and value is not None and option.name is not None:
            context.choose(option.name, value)
        words = ctx.command_path.removeprefix(ctx.find_root().command_path).split()
        if context is not None and words:
            context.kind = _KINDS.get(words[0], "operator")

    option = partial(click.Option, hidden=not explain, expose_value=False, callback=take)
    command.params += [
        option(["-d", "--database-url", "database_url"], metavar="URL", help=_DATABASE),
        option(["-a", "--app", "app_option"], metavar="MODULE[:ATTRIBUTE]", help=_APP),
    ]
    if not explain:
        command.epilog = "-a names your App, -d the database: see sqlq --help."
    if isinstance(command, click.Group):
        for each in command.commands.values():
            takes_context(each, explain=False)


_KINDS = {
    "enqueue": "producer",
    "work": "worker",
    "migrate": OWNER,
    "grants": OWNER,
    **dict.fromkeys(("doctor", "show", "why"), "reader"),
}

_DATABASE = (
    "The database: postgresql://user:password@host/name or sqlite:///file.db. Without it the App's own "
    "counts. Without an App, or where the App names none: SQLQ_DATABASE_URL, then database-url in "
    "pyproject.toml, then sqlite:///sqlq.db here."
)
_APP = (
    "Your App with its tasks, as in shop.tasks:app. The module shop.tasks alone is enough if it has one App. "
    "The form shop:create_app() calls a function, and shop:apps.name takes an App of the dict. Found in the "
    "current directory, too. Without it SQLQ_APP counts, and then app in pyproject.toml under [tool.sqlq]; "
    "with -d, only for commands that need its code."
)


_PATH = re.compile(r"(?P<module>[^\s:()]+)(?::(?P<attribute>[^\s:()]+)(?P<call>\(\s*\))?)?")


def load_app(path: str, directories: Sequence[Path] = ()) -> App:
    """Import the App that `module:attribute` names, or call `module:function()` for it.

    A module alone stands for the one App in it. It may be in one of these directories. An attribute may be a
    mapping, with the name of an App behind it. Raises `ConfigurationError` with the reason why it cannot.
    """
    from sqlq.app.app import App

    named = _PATH.fullmatch(path)
    if named is None or named["module"].endswith(".py"):
        raise click.BadParameter(
            f"{path!r} is not of the form module:attribute, as in shop.tasks:app, or module:function(), as "
            "in shop:create_app()",
            param_hint="'--app'",
        )
    for directory in directories:
        if str(directory) not in sys.path and not (directory == Path.cwd() and "" in sys.path):
            sys.path.insert(0, str(directory))
    module_name, attribute = named["module"], named["attribute"]
    module = _imported(module_name)
    # by type: isinstance reads __class__, which a lazy object computes and may fail at
    apps: dict[str, App] = {
        name: value for name, value in vars(module).items() if issubclass(type(value), App)
    }
    names = " or ".join(f"{module_name}:{name}" for name in apps)
    hint = f"did you mean {names}?" if apps else "no App is in that module"
    if attribute is None:
        if len({id(app) for app in apps.values()}) == 1:
            return next(iter(apps.values()))
        raise ConfigurationError(f"--app {path} names a module with {len(apps)} Apps, not one: {hint}")
    target: Any = module
    try:
        for name in attribute.split("."):
            target = target[name] if isinstance(target, Mapping) else getattr(target, name)
        if named["call"]:
            target = target()
        elif inspect.isroutine(target):
            hint = f"to have it called, write '{path}()'"
        if isinstance(target, App):
            return target
    except (Exception, SystemExit) as error:  # a module may create its App on access, as that of Django does
        trace = error.__traceback__
        if isinstance(error, (AttributeError, KeyError)) and (trace is None or trace.tb_next is None):
            raise ConfigurationError(
                f"--app {path}: the module {module_name} ({module.__file__}) has no {attribute!r}; {hint}"
            ) from None
        code = f"import {module_name}; {path.replace(':', '.')}"
        raise _failure(f"--app {path} failed", error, code) from error
    raise ConfigurationError(f"--app {path} is of type {type(target).__name__}, not a sqlq.App; {hint}")


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # a module may call sys.exit()
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise ConfigurationError(
                f"there is no module {error.name!r} in {Path.cwd()} or among the installed packages: "
                "see --app, and where you run sqlq"
            ) from error
        raise _failure(f"the App's module {name!r} cannot be imported", error, f"import {name}") from error


def _failure(subject: str, error: BaseException, code: str) -> ConfigurationError:
    """Return an error in the user's code with the line it comes from, and with the command that shows its
    traceback."""
    from sqlq.model.outcome import users_line

    trace = TracebackException.from_exception(error)  # whose text is there even where __str__ raises
    line = users_line("".join(trace.format()), or_last=True)
    where = "" if line is None else f" ({line.file}, line {line.number})"
    text, _, _ = str(trace).strip().partition("\n")
    reason = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return ConfigurationError(
        f"{subject}: {reason}{where}; see all of it with: python -c {shlex.quote(code)}"
    )


def _record_as_this_user() -> None:
    """Record what this process does to the database as done by its user."""
    from sqlq.admin.facet import act_as

    try:
        import pwd

        # getpass would believe LOGNAME; guard: actors-are-those-of-the-system
        user = pwd.getpwuid(os.getuid()).pw_name
    except (ImportError, KeyError):  # Windows; or a container's user, who has no name
        user = str(getattr(os, "getuid", getpass.getuser)())
    act_as(f"{user}@{socket.gethostname()}")
