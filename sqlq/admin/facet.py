"""The common base of the parts of an App that operators use: `app.jobs`, `app.queues` and the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

from sqlalchemy import Connection

from sqlq.database.caller.session import asynchronous
from sqlq.database.database import Database
from sqlq.errors import ConfigurationError
from sqlq.model.checks import checked_name, checked_whole
from sqlq.store.jobs import lookup
from sqlq.store.jobs.lookup import Selection

P = ParamSpec("P")
T = TypeVar("T")


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


def for_asyncio(method: Callable[P, T]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Return the twin of a method for asynchronous code. It runs the method in a thread, so that the event
    loop goes on, or with a `session` in the transaction of that asynchronous session."""
    name = method.__name__

    @wraps(method)
    async def twin(self: Any, /, *args: Any, session: Any = None, **options: Any) -> Any:
        work = getattr(self, name)
        if session is None:
            return await asyncio.to_thread(work, *args, **options)
        return await asynchronous(session).run_sync(lambda joined: work(*args, session=joined, **options))

    twin.__name__ = f"a{name}"
    twin.__qualname__ = method.__qualname__.replace(name, twin.__name__)
    twin.__doc__ = f"`{name}` for asynchronous code."
    return cast("Callable[P, Coroutine[Any, Any, T]]", twin)


def portions(ids: Sequence[int], task: str | None, queue: str | None) -> Sequence[Selection]:
    """Return the selected jobs in portions: a statement takes some ten thousand parameters at most."""
    starts = range(0, max(len(ids), 1), lookup.BATCH)
    return [Selection(tuple(ids[i : i + lookup.BATCH]), task, queue) for i in starts]


def check_most(limit: int) -> None:
    """Raise `ConfigurationError` for a number of rows that no list can have."""
    checked_whole(limit, "limit", range(1, 100_001), ConfigurationError)


def check_names(task: str | None, queue: str | None) -> None:
    """Raise `ConfigurationError` for what cannot be the name of a task or queue."""
    for name, value in (("task", task), ("queue", queue)):
        if value is not None:
            checked_name(value, name, ConfigurationError)
