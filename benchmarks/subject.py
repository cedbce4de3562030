"""The interface of all measured subjects: sqlq, the limits, and each peer.

A subject's methods run in the subject's own environment, by `benchmarks.inside`; its attributes are read in
ours. So a module with a subject imports at its top nothing but the standard library. It imports its library
inside its methods.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, ClassVar, Protocol

NOOP = "noop"
"""The task every subject has, which does nothing, as the kind of handler that suits it best. sqlq also has
"nap:MS", which sleeps."""


class Producer(Protocol):
    """Enqueues jobs; either of both may be a coroutine function. `many` is missing where the peer knows one
    at a time only."""

    def one(self, number: int) -> Awaitable[Any] | None: ...


class Subject:
    """Something that enqueues jobs, runs them and keeps them somewhere."""

    name: ClassVar[str]
    databases: ClassVar[tuple[str, ...]]
    """The databases that it is measured on: "postgresql", "sqlite", "mariadb" or "redis"."""
    requirements: ClassVar[tuple[str, ...]] = ()
    """Requirements of its own environment. A subject without any runs in the environment of sqlq."""
    packages: ClassVar[tuple[str, ...]] = ()
    """Whose versions the report names."""
    settings: ClassVar[str] = ""
    """How it is configured, for the report."""
    handles: ClassVar[str] = "def"
    """Which kind of handler it runs here."""
    many: ClassVar[bool] = True
    """Whether it can enqueue many jobs in one go."""
    answers: ClassVar[bool] = False
    """Whether its producer can wait for a result (`answer`)."""
    ticks: ClassVar[bool] = False
    """Whether its workers enqueue a job each full second, which calls `work.ticked`, where the environment
    has SQLQ_BENCHMARK_TICKS."""
    chains: ClassVar[bool] = False
    """Whether it has jobs that start when another one has succeeded (`chain`)."""
    traced: ClassVar[bool] = False
    """Whether it is known where its inserts and claims are (`note_inserts`, `note_claims`)."""
    enqueued: ClassVar[str | Sequence[Sequence[str]]]
    """SQL for how many jobs were enqueued, as long as none has run; for Redis, commands whose numbers are
    added up."""
    settled: ClassVar[str] = ""
    """SQL that counts the settled jobs; empty where the store forgets them, so that only `left` counts."""
    left: ClassVar[str | Sequence[Sequence[str]]]
    """SQL for a number that is 0 when no job is left; for Redis, commands whose numbers are added up."""

    def prepare(self, url: str) -> None:
        """Make its tables in an empty database."""

    def producer(self, url: str, task: str) -> AbstractContextManager[Any] | AbstractAsyncContextManager[Any]:
        """Open what enqueues jobs of a task."""
        raise NotImplementedError

    def workers(self, url: str, task: str, concurrency: int, processes: int) -> list[list[str]]:
        """Return the commands that run so many worker processes, each with so many jobs at a time. Runs in
        our environment; the programs are those of the subject's."""
        raise NotImplementedError

    def chain(self, url: str, steps: int) -> None:
        """Enqueue so many jobs, numbered from 0, of which each waits for the one before."""
        raise NotImplementedError

    def note_inserts(self, noted: dict[str, list[int]]) -> None:
        """Have it noted when this process sends the INSERT of a job (`sent`), and when that is committed
        (`answered`)."""
        raise NotImplementedError

    def note_claims(self, noted: dict[str, list[int]]) -> None:
        """Note when this process begins a claim that gets jobs (`claiming`), and when the claim is committed
        (`claimed`)."""
        raise NotImplementedError

    def environment(self, url: str, concurrency: int) -> dict[str, str]:
        """Return what its programs want to have in their environment."""
        return {}
