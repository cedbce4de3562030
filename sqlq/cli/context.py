"""What the global options name: the database and the App. Both are looked for when a command first needs them."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from types import TracebackType

    from sqlalchemy import URL

    from sqlq.app import App


@dataclass
class Context:
    """The global options of one run of `sqlq`."""

    database_url: str | None = None
    app_path: str | None = None
    _app: App | None = field(default=None, repr=False)

    def app(self) -> App:
        """Return the App of --app, else one without tasks; in either case on the database of -d, if given.

        Raises `ConfigurationError` for an App that cannot be imported and for a URL that cannot be used.
        """
        if self._app is None:
            self._app = self._make_app()
        return self._app

    def app_with_tasks(self, why: str) -> App:
        """Return the App of --app. Raises `ConfigurationError` where none is named, or it has no tasks; `why` says what for."""
        from sqlq.errors import ConfigurationError

        self.require_app(why)
        app = self.app()
        if not app.tasks:
            raise ConfigurationError(
                f"the App {self.app_path} has no tasks: import the modules that define them in the one that --app names"
            )
        return app

    def require_app(self, why: str) -> None:
        """Raise `ConfigurationError` where no App is named; `why` says what for. Imports nothing."""
        from sqlq.errors import ConfigurationError

        if self.app_path is None:
            raise ConfigurationError(f"{why}: name the App with --app module:attribute (or SQLQ_APP), as in sqlq --app shop.tasks:app …")

    def _make_app(self) -> App:
        from sqlq.app import App
        from sqlq.settings import database_url

        if self.database_url is None:
            return App() if self.app_path is None else load_app(self.app_path)
        if self.app_path is None:
            return App(self.database_url)
        url = database_url(self.database_url)
        # an App that names no database itself takes this one, and so does whatever else reads the variable
        os.environ["SQLQ_DATABASE_URL"] = self.database_url
        app = load_app(self.app_path)
        if app.database.engine.url != url:
            app.use(self.database_url, schema=app.database.requested_schema)
        return app

    def place(self) -> str:
        """Return the database as it may be shown: without its password, an SQLite file with its whole path."""
        return place(self.app().database.engine.url)


def place(url: URL) -> str:
    from sqlq.settings import masked

    if url.get_backend_name() != "sqlite" or not url.database or url.database.startswith("file:"):
        return masked(url)
    return f"sqlite:///{Path(url.database).absolute()}"


def load_app(path: str) -> App:
    """Import the App that `module:attribute` names. Raises `ConfigurationError` saying what stood in the way."""
    from sqlq.app import App
    from sqlq.errors import ConfigurationError

    module_name, colon, attribute = path.partition(":")
    if not (module_name and colon and attribute) or any(part.strip() != part for part in (module_name, attribute)):
        raise click.BadParameter(f"{path!r} is not of the form module:attribute, as in shop.tasks:app", param_hint="'--app'")
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module may call sys.exit()
        raise ConfigurationError(_why_not_imported(module_name, error)) from error
    found = module
    for name in attribute.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            apps = [f"{module_name}:{name}" for name, value in vars(module).items() if isinstance(value, App)]
            hint = f"did you mean {' or '.join(apps)}?" if apps else "no App is in that module"
            raise ConfigurationError(f"--app {path}: the module {module_name} ({module.__file__}) has no {attribute!r}; {hint}") from None
    if not isinstance(found, App):
        raise ConfigurationError(f"--app {path}: that is of type {type(found).__name__}, not a sqlq.App")
    return found


def _why_not_imported(module: str, error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name and (module == error.name or module.startswith(error.name + ".")):
        missing = "" if error.name == module else f" (there is no {error.name!r})"
        return f"there is no module {module!r}{missing} in {Path.cwd()} or among the installed packages: see --app, and where you run sqlq"
    where, text = _line(error.__traceback__), str(error).strip()
    if isinstance(error, SyntaxError):
        where, text = f"{_near(error.filename or '?')}, line {error.lineno}", error.msg
    what = f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
    return f"the App's module {module!r} cannot be imported: {what} ({where}); see all of it with: python -c 'import {module}'"


def _line(trace: TracebackType | None) -> str:
    """Return the line that was running: the last one in the user's own code, or else the last one there is."""
    own = str(Path(__file__).parents[1])
    places: list[tuple[str, int]] = []
    while trace is not None:
        places.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    places = [
        place for place in places if not place[0].startswith(("<frozen importlib", own)) and Path(place[0]).parts[-2:-1] != ("importlib",)
    ]
    mine = [place for place in places if Path(place[0]).is_relative_to(Path.cwd()) and "site-packages" not in place[0]]
    if not (mine or places):
        return "while it was being found"
    file, line = (mine or places)[-1]
    return f"{_near(file)}, line {line}"


def _near(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
