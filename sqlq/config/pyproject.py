"""The options of a project in its pyproject.toml: its App, the database it is developed on, and defaults.

[tool.sqlq]
app = "shop:app"
database-url = "sqlite:///dev.db"
retention = "30d"

[tool.sqlq.defaults]
timeout = "5m"

[tool.sqlq.queues.mail]
max-attempts = 10
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from sqlq.errors import ConfigurationError

log = logging.getLogger("sqlq")

TABLE = "[tool.sqlq]"
DEFAULTS, QUEUES = "tool.sqlq.defaults", "tool.sqlq.queues"


@dataclass(frozen=True, slots=True)
class Project:
    """The table [tool.sqlq] of one pyproject.toml."""

    file: Path
    app: str | None = None
    database_url: str | None = field(default=None, repr=False)
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The values of the other keys, such as `max_jobs`."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    queues: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def find(start: Path | None = None) -> Project | None:
    """Return the table [tool.sqlq] of the nearest pyproject.toml that has one, from a directory (the current
    one) upwards. None where there is none.

    A file of another user is passed over, and one line is logged: it would choose which code runs here.
    Raises `ConfigurationError` for a file with the table that cannot be read as TOML, and for an unknown key
    or value.
    """
    try:
        here = (start or Path.cwd()).absolute()
    except OSError:  # the current directory is gone
        return None
    for directory in (here, *here.parents):
        file = directory / "pyproject.toml"
        try:
            written = file.read_bytes()
        except OSError:  # not there, or not for this user to see
            continue
        if TABLE[:-1].encode() in written and not _is_a_strangers(file) and (project := _read(file, written)):
            return project
    return None


def setting(argument: Any, name: str, variable: str, key: str | None = None) -> tuple[str, Any]:
    """Return the name of the place where an option is set, and its value; None where it is set nowhere.

    The argument `name` counts first, then the variable of the environment, then the key of [tool.sqlq].
    """
    if argument is not None:
        return name, argument
    if text := os.environ.get(variable):
        return variable, text
    if key is not None and (project := find()) is not None:
        return f"{key} in {project.file}", project.settings.get(key)
    return variable, None


def _is_a_strangers(file: Path) -> bool:
    """Whether anybody but this user and root owns a file, a symlink to it, or the directory where it lies."""
    user = getattr(os, "geteuid", lambda: 0)()
    own = {"0", str(user), os.environ.get("SUDO_UID") if user == 0 else None}
    for path in (file.parent.resolve(), file, file.resolve()):
        owner = path.lstat().st_uid
        if str(owner) not in own:  # guard: foreign-pyproject-is-ignored
            _warn_once(file, path, owner)
            return True
    return False


@cache
def _warn_once(file: Path, path: Path, owner: int) -> None:
    log.warning(
        "[tool.sqlq] in %s is passed over: %s belongs to another user (uid %d); chown it, or name App and "
        "database by -a and -d, or by SQLQ_APP and SQLQ_DATABASE_URL",
        file,
        path,
        owner,
    )


def _read(file: Path, written: bytes) -> Project | None:
    import tomllib

    try:
        table = tomllib.loads(written.decode()).get("tool", {}).get("sqlq")
    # beside errors in TOML: other bytes than UTF-8, and text that is too long or too deep
    except (ValueError, AttributeError, RecursionError) as error:  # guard: invalid-toml-is-reported
        raise ConfigurationError(f"{file} cannot be read as TOML: {error}") from None
    if table is None:  # the words stood in a comment
        return None
    if not isinstance(table, dict):
        raise ConfigurationError(f"{file}: tool.sqlq is {table!r}: it must be a table, as in {TABLE}")
    for key, value in table.items():
        if key not in _KEYS:
            raise ConfigurationError(f"{file}: {TABLE} has no key {key!r}; it has {', '.join(_KEYS)}")
        example = _KEYS[key]
        kinds = (dict,) if isinstance(example, dict) else (str, type(example))
        if type(value) not in kinds or not str(value).strip():
            raise ConfigurationError(
                f"{file}: tool.sqlq.{key} is {value!r}: it must be like {json.dumps(example)}"
            )
    options = _options(table)
    return Project(
        file,
        options.pop("app", None),
        options.pop("database_url", None),
        defaults=_options(options.pop("defaults", {})),
        queues={name: _options(queue) for name, queue in options.pop("queues", {}).items()},
        settings=options,
    )


def _options(table: Any) -> Any:
    """Return options by the names that Python has for them; what is no table, which the App refuses, as it
    is."""
    if not isinstance(table, dict):
        return table
    return {name.replace("-", "_"): value for name, value in table.items()}


_KEYS: dict[str, Any] = {
    "app": "shop.tasks:app",
    "database-url": "sqlite:///dev.db",
    "read-url": "postgresql://replica/shop",
    "retention": "30d",
    "eager": True,
    "processes": 2,
    "concurrency": 20,
    "lease": "1m",
    "grace": "1m",
    "max-jobs": 1000,
    "max-rss": "400MB",
    "wait": "60s",
    "poll": "500ms",
    "claim-batch": 100,
    "ahead": "50ms",
    "defaults": {"timeout": "5m"},
    "queues": {"mail": {"timeout": "5m"}},
}
"""The keys that the table may have, each with an example."""
