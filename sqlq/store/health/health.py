"""Queries of `sqlq doctor`: settings, sessions, statistics and files. They read only.

Each function is one query, so that a role without the right to one of them still gets the others.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import BigInteger, Connection, bindparam, func, literal, select

from sqlq.database.database import Database
from sqlq.database.dialects import dialect_of
from sqlq.schema.tables import jobs
from sqlq.schema.types import after, now
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


class Stuck(NamedTuple):
    """Running jobs whose leases expired long ago: their number, some ids, and the seconds since the first
    expired."""

    number: int
    ids: list[int]
    seconds: float


def stuck(conn: Connection, *, longer_than_ms: int) -> Stuck | None:
    """Return the running jobs whose lease expired longer ago than that; a rescue should have taken them."""
    # a row that was reserved by hand may have no lease end
    until = func.coalesce(jobs.c.lease_expires_at, jobs.c.reserved_at)  # guard: no-lease-is-one-that-ran-out
    late = until < after(bindparam("ago_ms", type_=BigInteger))
    where = (jobs.c.reserved_at.is_not(None), late)
    count, oldest, moment = conn.execute(
        select(func.count(), func.min(until, type_=until.type), now()).where(*where),
        {"ago_ms": -longer_than_ms},
    ).one()
    if not count:
        return None
    ids = conn.scalars(
        select(jobs.c.id).where(*where).order_by(jobs.c.id).limit(5), {"ago_ms": -longer_than_ms}
    )
    return Stuck(count, list(ids), (moment - oldest).total_seconds())


def unheeded_cancels(conn: Connection, *, longer_than_ms: int) -> list[int]:
    """Return running jobs, at most five, that were to be cancelled longer ago than that."""
    late = jobs.c.cancel_requested_at < after(bindparam("ago_ms", type_=BigInteger))
    query = select(jobs.c.id).where(jobs.c.reserved_at.is_not(None), late).order_by(jobs.c.id).limit(5)
    return list(conn.scalars(query, {"ago_ms": -longer_than_ms}))


class Unknown(NamedTuple):
    """A task that no worker knows: the number of its jobs that workers release, and the seconds since the
    first release."""

    task: str
    number: int
    seconds: float


PUT_BACK_WITHIN_MS = 3_600_000
"""A worker releases a job of an unknown task for less than this."""
LOOKED_AT = 1_000
LEVELS_LOOKED_AT = 50


def unknown_tasks(conn: Connection) -> list[Unknown]:
    """Return the tasks whose jobs workers release because they do not know them, those waiting longest first.

    No index has these jobs. While workers keep up, they are among the first due jobs of each queue and
    priority, or the next to be due. The search reads only those.
    """
    firsts: dict[str, tuple[int, datetime]] = {}
    moment = workers.moment(conn)
    due = jobs.c.available_at <= now()
    soon = jobs.c.available_at <= after(literal(PUT_BACK_WITHIN_MS, BigInteger))
    for level in counts.levels(conn)[:LEVELS_LOOKED_AT]:
        for when in (due, ~due & soon):
            some = (
                select(jobs.c.task, jobs.c.unknown_since)
                .where(jobs.c.queue == level.queue, jobs.c.priority == level.priority)
                .where(jobs.c.reserved_at.is_(None), when)
                .order_by(jobs.c.available_at)
                .limit(LOOKED_AT)
                .subquery()
            )
            since = func.min(some.c.unknown_since, type_=jobs.c.unknown_since.type)
            known = some.c.unknown_since.is_not(None)
            query = select(some.c.task, func.count(), since).where(known).group_by(some.c.task)
            for task, number, first in conn.execute(query):
                before, earliest = firsts.get(task, (0, first))
                firsts[task] = (before + number, min(first, earliest))
    found = [
        Unknown(task, number, (moment - first).total_seconds()) for task, (number, first) in firsts.items()
    ]
    return sorted(found, key=lambda unknown: -unknown.seconds)


def hears(database: Database, *, seconds: float) -> bool | None:
    """Whether a LISTEN on the workers' connection receives a NOTIFY from where jobs are enqueued. None where
    the driver cannot report notifications.

    It uses a channel of its own, so that no notification to workers is mistaken for its own.
    """
    channel = f"sqlq_doctor_{uuid.uuid4().hex[:16]}"
    from sqlq.database.postgresql.health import _asked

    with (
        database.for_listening() as ear,
        ear.connect(isolation_level="AUTOCOMMIT") as listening,
        database.connect(isolation_level="AUTOCOMMIT") as calling,
    ):
        driver: Any = listening.connection.driver_connection
        if not callable(getattr(driver, "notifies", None)):
            return None
        try:
            listening.exec_driver_sql(f'LISTEN "{channel}"')
            deadline = time.monotonic() + seconds
            # it waits for no standby that is away
            notify = "SELECT pg_notify(:channel, ''), set_config('synchronous_commit', 'off', true)"
            _asked(calling, notify, channel=channel)
            while (left := deadline - time.monotonic()) > 0:
                if any(
                    notified.channel == channel for notified in driver.notifies(timeout=left, stop_after=1)
                ):
                    return True
            return False
        except _dbapi_error(listening):  # the driver's own, since SQLAlchemy is not in between
            return False
        finally:
            listening.invalidate()  # a listening connection must not return to the pool


def _dbapi_error(conn: Connection) -> type[Exception]:
    dbapi: Any = conn.dialect.loaded_dbapi
    error: type[Exception] = dbapi.Error
    return error
