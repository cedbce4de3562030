"""All parts of an App that depend on where its database is."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

from sqlq.app.code import Code
from sqlq.database.database import Address, Database
from sqlq.enqueue.enqueue import Enqueuer
from sqlq.results.results import Results

F = TypeVar("F")


class Connected:
    """The parts of an App for one address. `App.use` replaces it as a whole. Each part is made when it is
    first used."""

    def __init__(self, address: Address, code: Code, here: Callable[[], Any]) -> None:
        """`here` returns the enqueuer of the jobs that run in this process; None without one."""
        self.address = address
        self._code = code
        self._here = here
        self._parts: dict[Callable[..., Any], Any] = {}

    @cached_property
    def database(self) -> Database:
        """sqlq's own connections to the database."""
        return self.address.open()

    @cached_property
    def enqueuer(self) -> Enqueuer:
        """Writes jobs to the database."""
        return Enqueuer(self.database, self._code.events)

    @cached_property
    def results(self) -> Results:
        """Results and states of jobs."""
        return Results(self.database, self._code.tasks, self._here)

    def part(self, kind: Callable[..., F], *more: Any) -> F:
        """Return one of the parts for operators, of the database and `more`."""
        if kind not in self._parts:
            self._parts[kind] = kind(self.database, *more)
        part: F = self._parts[kind]
        return part

    def close(self) -> None:
        """Close the parts that were used."""
        for name in ("results", "enqueuer", "database"):
            if name in self.__dict__:
                getattr(self, name).close()
