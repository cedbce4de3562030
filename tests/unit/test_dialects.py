"""A database differs from others in few methods and facts, so that another one can be added."""

from __future__ import annotations

import inspect
from typing import Any

from sqlq.database.dialect import Driver, Migrations
from sqlq.database.sql import Sql

MOST_VERBS = 25


def verbs(part: Any) -> list[str]:
    """Return the methods that a database may override."""
    functions = [name for name, _ in inspect.getmembers(part, inspect.isfunction)]
    others = [name for name, kind in inspect.get_annotations(part).items() if "Callable" in kind]
    return [f"{part.__name__}.{name}" for name in (*functions, *others) if not name.startswith("_")]


def test_a_database_overrides_few_verbs() -> None:
    known = [verb for part in (Sql, Driver, Migrations) for verb in verbs(part)]
    assert len(known) <= MOST_VERBS, f"each database answers one verb more: {', '.join(known)}"
