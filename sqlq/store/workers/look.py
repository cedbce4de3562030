"""Looks for what workers wait for: jobs that are due, schedules, requests of operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import Connection, func, select

from sqlq.database.database import Database
from sqlq.schema.tables import jobs
from sqlq.store.workers import workers as workerss
from sqlq.store.workers.notify import channel
from sqlq.store.workers.workers import Wanted


def due_in(database: Database, names: Sequence[str] | None = None) -> dict[str, float]:
    """Return the queues that hold jobs that no worker has reserved, and in how many milliseconds the next of
    each is due (0 or less: it is due).

    Of the queues named, or of all. Those that are paused are left out. One probe of the claim index for each
    queue and priority, whatever its length; takes no lock on SQLite.
    """
    dialect, schema = database.dialect, database.schema
    rows = database.run_past_sqlalchemy(lambda ask: dialect.due_in(ask, schema, names), reads=True)
    return {name: float(ms) for name, ms in rows}


class Look(NamedTuple):
    """What a host sees when it looks for its workers."""

    due: dict[str, float]
    """As `due_in` has it."""
    listens: bool
    """Whether the connection that was asked hears hints."""
    hosts: int | None
    """How many hosts look, this one included; None where that was not asked."""
    expired: bool | None
    """Whether a lease has run out; None where it was not asked what there is for chores."""
    late: bool | None
    """Whether a job was not started in time; None likewise."""
    limited: bool | None
    """Whether a job is under a limit; None likewise."""
    tick_ms: float | None
    """In how many milliseconds the next schedule is due; None where there is none."""
    wanted: Wanted
    """What operators ask of the workers."""


def look(
    conn: Connection,
    database: Database,
    names: Sequence[str] | None,
    *,
    hosts_within_ms: int | None,
    chores: bool,
    workers: Sequence[str] = (),
) -> Look:
    """Look, on a connection that may LISTEN, for all that a host wants to know about once a second, and, if
    asked, whether there is something to do for its chores (PostgreSQL)."""
    driver, dialect = conn.connection.dbapi_connection, database.dialect
    rows = dialect.look(
        lambda statement, parameters: dialect.run(driver, statement, parameters),
        *(database.schema, names, channel(database.schema), hosts_within_ms, chores, workers),
    )
    *due, (_, tick_ms, listens, hosts, expired, late, limited, *wanted) = sorted(
        rows, key=lambda row: row[0] is None
    )
    due_ms = {row[0]: float(row[1]) for row in due}
    return Look(due_ms, listens, hosts, expired, late, limited, tick_ms, workerss.wanted(*wanted))


_first = (
    select(func.min(jobs.c.queue).label("name"))
    .where(jobs.c.reserved_at.is_(None))
    .cte("names", recursive=True)
)
_next = (
    select(func.min(jobs.c.queue))
    .where(jobs.c.reserved_at.is_(None), jobs.c.queue > _first.c.name)
    .correlate(_first)
    .scalar_subquery()
)
waiting_queues = _first.union_all(select(_next).where(_first.c.name.is_not(None)))
"""The names of the queues that hold jobs that no worker has reserved, and at last a NULL."""
