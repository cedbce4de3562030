"""Marks for what a test needs of its database, and tables of values that it tries as one case."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from tests.kit.databases import DATABASES

ABILITIES = {
    "sqlite": {"file", "one_writer", "cheap"},
    "postgresql": {"server", "row_locks", "listen", "roles", "schemas", "plans", "sessions"},
    "mariadb": {"server", "row_locks"},
}
"""The abilities of each kind of database. Its name stands for its own SQL, settings and faults.

`file` and `one_writer`: the database is a file, which one transaction at a time may write. `cheap`: it is
made in a millisecond, for tests that any database would do for. `server`: it is reached over a network.
`row_locks`: transactions lock single rows, and others pass over these. `listen`: idle workers are notified.
`roles`: rights to tables and columns. `schemas`: tables of one name beside each other. `plans`: EXPLAIN
shows which pages a statement reads. `sessions`: a session sees what others do and wait for.
"""


def needs(*abilities: str, empty: bool = False) -> pytest.MarkDecorator:
    """Run a test on each tested database that has these abilities, or is of this name.

    Where none is tested, it runs on all that have them. `empty` is for tests of `empty_database_url`.
    """
    able = [kind for kind, has in ABILITIES.items() if {*abilities} <= {kind, *has}]
    assert able, f"no database has {abilities}"
    tested = [kind for kind in able if kind in DATABASES] or able
    return pytest.mark.parametrize("empty_database_url" if empty else "database_url", tested, indirect=True)


def for_each(
    names: str | Sequence[str], rows: Iterable[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test for all rows of a table, as one case with the same fixtures.

    It is for tables where a case for each row costs more than the test. Each row
    that fails is reported; a row that is skipped does not skip the others.
    """
    keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    table = list(rows)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*given: Any, **fixtures: Any) -> None:
            failures: list[BaseException] = []
            skipped: list[BaseException] = []
            for row in table:
                values = dict(zip(keys, [row] if len(keys) == 1 else row, strict=True))
                try:
                    test(*given, **fixtures, **values)
                except pytest.skip.Exception as skip:
                    skipped.append(skip)
                except (Exception, pytest.fail.Exception) as error:
                    error.add_note(f"with {values}")
                    failures.append(error)
            if len(skipped) == len(table):
                raise skipped[0]
            if len(failures) == 1:
                raise failures[0]
            if failures:
                raise BaseExceptionGroup(f"{len(failures)} of {len(table)} rows", failures)

        signature = inspect.signature(test)
        asked_for = [each for each in signature.parameters.values() if each.name not in keys]
        vars(run)["__signature__"] = signature.replace(parameters=asked_for)
        return run

    return decorate
