"""Queries of the poller: due jobs, due schedules, and requests of operators."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from sqlalchemy import Connection

from sqlq.database.database import Database
from sqlq.database.values import LARGEST_WINDOW, LookRequest
from sqlq.store.workers.notify import channel
from sqlq.store.workers.workers import Requests, requests_of

KEPT_SECONDS = 600.0
"""A queue stays known for this time after its last job was claimed."""


class KnownQueues:
    """The queues that looks read: the named ones or, for a worker of all queues, the known ones and a window.

    The window is of 1,000 queues with jobs, and begins where the last one ended. So each queue is read in its
    turn, and a look costs the same however many queues a producer makes.
    """

    def __init__(self, names: Sequence[str] | None = None, own: Iterable[str] = ()) -> None:
        """`own` are queues that stay known."""
        self.after = None if names is not None else ""
        """The queue before the window, by the order of the database; None where there is no window."""
        self._own = [*(own if names is None else names)]
        self._claimed_at: dict[str, float] = {}

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys([*self._own, *self._claimed_at]))

    @property
    def with_jobs(self) -> list[str]:
        """The known queues that had jobs lately."""
        return list(self._claimed_at)

    def note(self, rows: Iterable[Sequence[Any]], claimed: Iterable[str] = ()) -> None:
        """Note the rows of a look, as of `Sql.due_in`, and the queues of claimed jobs. Those with the
        latest claims stay known."""
        if self.after is None:
            return
        now, seen = time.monotonic(), {queue: position for queue, _, position in rows}
        window = {position: name for name, position in seen.items() if position is not None}
        # guard: looks-reach-every-queue
        self.after = window[len(window)] if len(window) == LARGEST_WINDOW else ""
        known = dict.fromkeys(seen, -math.inf) | self._claimed_at | dict.fromkeys(claimed, now)
        known = {
            name: at
            for name, at in known.items()
            if isinstance(name, str) and (name in seen or at > now - KEPT_SECONDS)  # SQLite lets in bytes
        }
        # guard: known-queues-are-bounded
        self._claimed_at = dict(
            sorted(known.items(), key=lambda item: item[1], reverse=True)[:LARGEST_WINDOW]
        )


def due_in(database: Database, queues: KnownQueues, claimed: Iterable[str] = ()) -> dict[str, float]:
    """Return the queues with unreserved jobs, each with the milliseconds until its next job is due (0 or
    less: it is due).

    It reads `queues`, notes there what it found and the queues of `claimed` jobs, and leaves out paused ones.
    It costs one probe of the claim index for each queue and priority, of any length. It takes no lock on
    SQLite.
    """
    sql = database.dialect.sql
    rows = database.run_raw(lambda execute: sql.due_in(execute, queues.names, queues.after), reads=True)
    return _noted(queues, rows, claimed)


def _noted(queues: KnownQueues, rows: Sequence[Sequence[Any]], claimed: Iterable[str]) -> dict[str, float]:
    queues.note(rows, claimed)
    return {queue: float(ms) for queue, ms, _ in rows if ms is not None}


class Look(NamedTuple):
    """The result of one poll for the workers of a host."""

    due: dict[str, float]
    """As `due_in` returns it."""
    listens: bool | None
    """Whether the connection that polled receives notifications; None where its server takes no writes."""
    hosts: int | None
    """The number of hosts that poll, this one included; None where that was not queried."""
    expired: bool | None
    """Whether a lease has expired; None where the poll was not for maintenance services too."""
    limited: bool | None
    """Whether a job is under a limit; None likewise."""
    signalled: bool | None
    """Whether a signal is new, or a wait for one is to be looked at."""
    tick_ms: float | None
    """The milliseconds until the next schedule is due; None where there is none."""
    wanted: Requests
    """The requests of operators to the workers."""


def look(
    conn: Connection,
    database: Database,
    queues: KnownQueues,
    *,
    hosts_within_ms: int | None,
    maintenance: bool,
    workers: Sequence[str] = (),
) -> Look:
    """Run the poll that a host repeats about once a second, on a connection that may LISTEN (PostgreSQL).
    With `maintenance` it also finds out whether the maintenance services have work."""
    driver, dialect = conn.connection.dbapi_connection, database.dialect
    options = (channel(database.schema), hosts_within_ms, maintenance, list(workers))
    execute = database.naming()(partial(dialect.driver.run, driver))
    rows = dialect.sql.look(execute, LookRequest(queues.names, queues.after, *options))
    *due, (_, tick_ms, _, listens, hosts, expired, limited, signalled, *wanted) = sorted(
        rows, key=lambda row: row[0] is None
    )
    due_ms = _noted(queues, [row[:3] for row in due], ())
    return Look(due_ms, listens, hosts, expired, limited, signalled, tick_ms, requests_of(*wanted))
