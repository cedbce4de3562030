"""A database differs from others in few methods and facts, so that another one can be added."""

from __future__ import annotations

import inspect
from typing import Any

from sqlq.database.driver import Driver
from sqlq.database.migrations import Migrations
from sqlq.database.sql import Sql
from tests.kit import for_each

VERBS: dict[Any, int] = {Sql: 21, Driver: 7, Migrations: 3}
"""The most methods of each part of a `Dialect`."""


def verbs(part: Any) -> list[str]:
    """Return the methods that a database may override."""
    functions = inspect.getmembers(part, inspect.isfunction)
    named = [name for name, _ in functions if not name.startswith("_")]
    return [*named, *[name for name, kind in inspect.get_annotations(part).items() if "Callable" in kind]]


@for_each("part", VERBS)
def test_a_database_overrides_few_verbs(part: Any) -> None:
    found = verbs(part)
    assert len(found) <= VERBS[part], f"a verb more of {part.__name__}, which each database answers: {found}"
