"""Try a table of values in one case."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


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
            for row in table:
                values = dict(zip(keys, [row] if len(keys) == 1 else row, strict=True))
                try:
                    test(*given, **fixtures, **values)
                except pytest.skip.Exception:
                    continue
                except (Exception, pytest.fail.Exception) as error:
                    error.add_note(f"with {values}")
                    failures.append(error)
            if len(failures) == 1:
                raise failures[0]
            if failures:
                raise BaseExceptionGroup(f"{len(failures)} of {len(table)} rows", failures)

        signature = inspect.signature(test)
        asked_for = [each for each in signature.parameters.values() if each.name not in keys]
        vars(run)["__signature__"] = signature.replace(parameters=asked_for)
        return run

    return decorate
