"""The common base of the parts of an App that operators use: `app.jobs`, `app.queues` and the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection

from sqlq.database.database import Database
from sqlq.errors import ConfigurationError
from sqlq.model.checks import checked_name


class Facet:
    """A group of operations in one database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @contextmanager
    def _read(self) -> Iterator[Connection]:
        """Open a connection that reads, once it is known that the tables are there."""
        self._database.require_tables()
        with self._database.read() as conn:
            yield conn


def check_most(limit: int) -> None:
    """Raise `ConfigurationError` for a number of rows that no list can have."""
    if not isinstance(limit, int) or not 1 <= limit <= 100_000:
        raise ConfigurationError(f"limit is {limit!r}: it must be a whole number from 1 to 100,000")


def check_names(task: str | None, queue: str | None) -> None:
    """Raise `ConfigurationError` for what cannot be the name of a task or queue."""
    for name, value in (("task", task), ("queue", queue)):
        if value is not None:
            checked_name(value, name, ConfigurationError)
