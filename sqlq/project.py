"""What a project says to sqlq in its pyproject.toml: its App, and the database it is developed on.

[tool.sqlq]
app = "shop:app"
database-url = "sqlite:///dev.db"
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sqlq.errors import ConfigurationError

TABLE = "[tool.sqlq]"


@dataclass(frozen=True, slots=True)
class Project:
    """The table [tool.sqlq] of one pyproject.toml."""

    file: Path
    app: str | None = None
    database_url: str | None = None


def find(start: Path | None = None) -> Project | None:
    """Return what the nearest pyproject.toml with a table [tool.sqlq] says, from a directory (the current
    one) upwards; None where there is none.

    Raises `ConfigurationError` for such a file that cannot be read as TOML, and for a key or value that is
    not known.
    """
    here = (start or Path.cwd()).absolute()
    for directory in (here, *here.parents):
        file = directory / "pyproject.toml"
        try:
            text = file.read_text(encoding="utf-8", errors="replace")
        except OSError:  # not there, or not for this user to see
            continue
        if TABLE in text:
            return _read(file, text)
    return None


def _read(file: Path, text: str) -> Project | None:
    import tomllib

    try:
        table = tomllib.loads(text).get("tool", {}).get("sqlq")
    except (tomllib.TOMLDecodeError, AttributeError) as error:
        raise ConfigurationError(f"{file} cannot be read as TOML: {error}") from None
    if table is None:  # the words stood in a comment
        return None
    known = {"app": "app", "database-url": "database_url"}
    for key, value in table.items():
        if key not in known:
            raise ConfigurationError(f"{file}: {TABLE} has no key {key!r}; it has {' and '.join(known)}")
        if not isinstance(value, str) or not value.strip():
            raise ConfigurationError(
                f"{file}: {key} in {TABLE} is {value!r}: it must be text, as in "
                + ('app = "shop.tasks:app"' if key == "app" else 'database-url = "sqlite:///dev.db"')
            )
    return Project(file, **{known[key]: value for key, value in table.items()})
