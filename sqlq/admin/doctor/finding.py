"""The findings of `sqlq doctor`, and the base of its checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

from sqlalchemy import Connection

from sqlq.database.database import Database
from sqlq.store.health import health

P = ParamSpec("P")
T = TypeVar("T")


class Verdict(StrEnum):
    """OK: as it should be. CHECK: works, but an operator should know. TO_DO: something does not work, or will
    not for long."""

    OK = "ok"
    CHECK = "check"
    TO_DO = "to do"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check, and the remedy."""

    check: str
    verdict: Verdict
    said: str
    remedy: str | None = None


class Answer(NamedTuple):
    """The answer of one check, and the remedy."""

    verdict: Verdict
    said: str
    remedy: str | None = None


def ok(said: str) -> Answer:
    return Answer(Verdict.OK, said)


def check(said: str, remedy: str | None = None) -> Answer:
    return Answer(Verdict.CHECK, said, remedy)


def to_do(said: str, remedy: str | None) -> Answer:
    return Answer(Verdict.TO_DO, said, remedy)


class Checks:
    """Checks of one database. Each is a method, named after its subject."""

    def __init__(self, database: Database, *, deep: bool = False) -> None:
        self._database = database
        self._deep = deep

    def _ask(self, query: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run one query, in a transaction of its own with a limited time."""
        with health.reading(self._database) as conn:
            return query(conn, *args, **kwargs)


class PlaceChecks(Checks):
    """Checks of one kind of database."""

    def in_general(self) -> Sequence[Callable[[], Iterator[Answer]]]:
        """Return the checks that need none of our tables."""
        raise NotImplementedError

    def of_tables(self) -> Sequence[Callable[[], Iterator[Answer]]]:
        """Return the checks of our tables."""
        return ()


FREE_CONNECTIONS = 10


class ServerChecks(PlaceChecks):
    """Checks of one kind of server."""

    in_use: Callable[[Connection], tuple[int, int]]
    """Return the number of connections in use, and their limit."""
    room = "raise max_connections"
    """How a server gets more connections."""

    def connections(self) -> Iterator[Answer]:
        used, limit = self._ask(self.in_use)
        said = f"{used} of {limit} connections are in use"
        if limit - used < FREE_CONNECTIONS:
            yield check(said, f"{self.room}; sqlq work -p N needs 2 × N + 2")
        else:
            yield ok(said)


def in_units(number: float) -> str:
    """Write a number of bytes the way a person would.

    >>> in_units(3 << 20)
    '3 MiB'
    """
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(number) < 1000:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.3g} TiB"
