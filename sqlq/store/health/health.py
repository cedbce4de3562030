"""Queries of `sqlq doctor`: settings, sessions, statistics and files. They read only.

Each function is one query, so that a role without the right to one of them still gets the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import Connection, func, select

from sqlq.database.database import Database
from sqlq.database.dialects import dialect_of
from sqlq.schema.tables import IS_RESERVED, IS_UNRESERVED, finished_jobs, jobs
from sqlq.schema.types import after, ago, far, now, since_ms
from sqlq.store.health import counts
from sqlq.store.workers import workers

STATEMENT_TIMEOUT_MS = 15_000
"""On a server: an examination must not become the load that it looks for."""


@contextmanager
def reading(database: Database) -> Iterator[Connection]:
    """Read in a transaction that limits the time of each query."""
    with database.read(within_ms=STATEMENT_TIMEOUT_MS) as conn:
        yield conn


class Indexes(NamedTuple):
    """The indexes of ours that are missing, and those that queries cannot use."""

    missing: list[str]
    invalid: list[str]


def indexes(conn: Connection) -> Indexes:
    """Compare the indexes of our tables with those of a migration."""
    dialect = dialect_of(conn)
    found = dialect.indexes(conn)
    missing = dialect.own_indexes - found.keys()
    return Indexes(sorted(missing), sorted(name for name, is_valid in found.items() if not is_valid))


def stuck(conn: Connection, *, longer_than_ms: int) -> dict[int, float]:
    """Return running jobs whose lease expired longer ago than that, at most 1,000, and the seconds since. A
    rescue should have taken them."""
    # a row that was reserved by hand may have no lease end
    until = func.coalesce(jobs.c.lease_expires_at, jobs.c.reserved_at)  # guard: no-lease-is-one-that-ran-out
    query = select(jobs.c.id, since_ms(until)).where(IS_RESERVED, until < ago(longer_than_ms))
    return {id: float(ms) / 1000 for id, ms in conn.execute(query.order_by(jobs.c.id).limit(LOOKED_AT))}


def lost_again(conn: Connection) -> list[int]:
    """Return running jobs, at most five, that have lost workers before, again and again."""
    query = select(jobs.c.id).where(IS_RESERVED, jobs.c.losses > 1)
    return list(conn.scalars(query.order_by(jobs.c.id).limit(5)))


def unheeded_cancels(conn: Connection, *, longer_than_ms: int) -> list[int]:
    """Return running jobs, at most five, that were to be cancelled longer ago than that."""
    query = select(jobs.c.id).where(IS_RESERVED, jobs.c.cancel_requested_at < ago(longer_than_ms))
    return list(conn.scalars(query.order_by(jobs.c.reserved_by, jobs.c.id).limit(5)))  # as in its index


class Unknown(NamedTuple):
    """A task that workers do not know: the number of its released jobs, the seconds since the first release,
    and a queue of these jobs. `runs` is whether other workers know the task: one of the newest
    finished jobs is of it, and was completed since."""

    task: str
    number: int
    seconds: float
    queue: str
    runs: bool


PUT_BACK_WITHIN_MS = 3_600_000
"""A worker releases a job of an unknown task for less than this."""
LOOKED_AT = 1_000
LEVELS_LOOKED_AT = 50


def unknown_tasks(conn: Connection) -> list[Unknown]:
    """Return the tasks whose jobs workers release because they do not know them, those waiting longest first.

    No index has these jobs. While workers keep up, they are among the first jobs of each queue and priority
    that are due, will be due, or are blocked. The search reads only those.
    """
    firsts: dict[str, tuple[int, datetime, str]] = {}
    moment = workers.moment(conn)
    due = jobs.c.available_at <= now()
    soon = jobs.c.available_at <= after(PUT_BACK_WITHIN_MS)
    for level in counts.levels(conn)[:LEVELS_LOOKED_AT]:
        for when in (due, ~due & soon, jobs.c.available_at >= far()):
            some = (
                select(jobs.c.task, jobs.c.unknown_since)
                .where(jobs.c.queue == level.queue, jobs.c.priority == level.priority)
                .where(IS_UNRESERVED, when)
                .order_by(jobs.c.available_at)
                .limit(LOOKED_AT)
                .subquery()
            )
            since = func.min(some.c.unknown_since, type_=jobs.c.unknown_since.type)
            known = some.c.unknown_since.is_not(None)
            query = select(some.c.task, func.count(), since).where(known).group_by(some.c.task)
            for task, number, first in conn.execute(query):
                before, earliest, queue = firsts.get(task, (0, first, level.queue))
                firsts[task] = (before + number, min(first, earliest), queue)
    runs = _last_completions(conn)
    found = [
        Unknown(task, number, (moment - first).total_seconds(), queue, runs.get(task, first) > first)
        for task, (number, first, queue) in firsts.items()
    ]
    return sorted(found, key=lambda unknown: -unknown.seconds)


def _last_completions(conn: Connection) -> dict[str, datetime]:
    """Return when a job of each task was last completed, by the newest finished jobs."""
    newest = select(finished_jobs).order_by(finished_jobs.c.id.desc()).limit(LOOKED_AT).subquery()
    last = func.max(newest.c.finished_at, type_=newest.c.finished_at.type)
    completed = select(newest.c.task, last).where(newest.c.outcome == "completed")
    return dict(conn.execute(completed.group_by(newest.c.task)).all())
