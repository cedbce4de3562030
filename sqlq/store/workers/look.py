"""Queries of the poller: due jobs, due schedules, and requests of operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import Connection

from sqlq.database.database import Database
from sqlq.database.values import LookWanted
from sqlq.store.workers import workers as workerss
from sqlq.store.workers.notify import channel
from sqlq.store.workers.workers import Wanted


def due_in(database: Database, names: Sequence[str] | None = None) -> dict[str, float]:
    """Return the queues with unreserved jobs, each with the milliseconds until its next job is due (0 or
    less: it is due).

    It searches the queues named, or all, and leaves out paused ones. It costs one probe of the claim index
    for each queue and priority, of any length. It takes no lock on SQLite.
    """
    dialect, schema = database.dialect, database.schema
    rows = database.run_raw(lambda ask: dialect.due_in(ask, schema, names), reads=True)
    return {name: float(ms) for name, ms in rows}


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
    late: bool | None
    """Whether a job was not started in time; None likewise."""
    limited: bool | None
    """Whether a job is under a limit, or blocked by a pause; None likewise."""
    tick_ms: float | None
    """The milliseconds until the next schedule is due; None where there is none."""
    wanted: Wanted
    """The requests of operators to the workers."""


def look(
    conn: Connection,
    database: Database,
    names: Sequence[str] | None,
    *,
    hosts_within_ms: int | None,
    maintenance: bool,
    workers: Sequence[str] = (),
) -> Look:
    """Run the poll that a host repeats about once a second, on a connection that may LISTEN (PostgreSQL).
    With `maintenance` it also finds out whether the maintenance services have work."""
    driver, dialect = conn.connection.dbapi_connection, database.dialect
    rows = dialect.look(
        lambda statement, parameters: dialect.run(driver, statement, parameters),
        *(database.schema, names),
        LookWanted(channel(database.schema), hosts_within_ms, maintenance, list(workers)),
    )
    *due, (_, tick_ms, listens, hosts, expired, late, limited, *wanted) = sorted(
        rows, key=lambda row: row[0] is None
    )
    due_ms = {row[0]: float(row[1]) for row in due}
    return Look(due_ms, listens, hosts, expired, late, limited, tick_ms, workerss.wanted(*wanted))
