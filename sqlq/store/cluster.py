"""What workers know of each other and of the queues, and how they wake one another; never a guard, only
information."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import (
    BigInteger,
    Connection,
    bindparam,
    delete,
    func,
    insert,
    select,
    text,
    type_coerce,
    update,
)

from sqlq.schema.tables import TOKEN_SCHEMA, Moment, after, jobs, now, queues, workers
from sqlq.store.database import Database


def register(
    conn: Connection,
    *,
    id: str,
    host: str,
    pid: int,
    version: str,
    queues: Sequence[str] | None,
    concurrency: int,
) -> None:
    """Enter a worker; `queues` None means that it serves all."""
    named = None if queues is None else json.dumps(list(queues), ensure_ascii=False)
    conn.execute(
        insert(workers).values(
            id=id, host=host, pid=pid, version=version, queues=named, concurrency=concurrency
        )
    )


def seen(conn: Connection, id: str) -> bool:
    """Note that a worker lives, and say whether it is still entered: one that slept for a day was swept out,
    and registers again."""
    return conn.execute(update(workers).where(workers.c.id == id).values(seen_at=now())).rowcount == 1


def note_unstarted(conn: Connection, id: str, number: int) -> None:
    """Note how many jobs a worker has held for long without starting them, for the doctor."""
    conn.execute(update(workers).where(workers.c.id == id).values(unstarted=number))


def leave(conn: Connection, id: str) -> None:
    """Take a worker out."""
    conn.execute(delete(workers).where(workers.c.id == id))


def sweep(conn: Connection, *, silent_ms: int) -> None:
    """Take out workers that have been silent for long; theirs is no orderly end."""
    conn.execute(
        delete(workers).where(workers.c.seen_at < after(bindparam("ago_ms", type_=BigInteger))),
        {"ago_ms": -silent_ms},
    )


def still_holds(conn: Connection, id: str) -> bool:
    """Say whether anything is reserved by a worker, locked rows included."""
    return (
        conn.scalar(
            select(jobs.c.id).where(jobs.c.reserved_at.is_not(None), jobs.c.reserved_by == id).limit(1)
        )
        is not None
    )


def due_in(database: Database, names: Sequence[str] | None = None) -> dict[str, float]:
    """Return the queues that hold jobs that no worker has reserved, and in how many milliseconds the next of
    each is due (0 or less: it is due).

    Of the queues named, or of all. Those that are paused are left out. One probe of the claim index for each
    queue and priority, whatever its length; takes no lock on SQLite.
    """
    dialect, schema = database.dialect, database.schema
    rows = database.run_past_sqlalchemy(lambda ask: dialect.due_in(ask, schema, names), reads=True)
    return {name: float(ms) for name, ms in rows}


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


def notify(database: Database) -> None:
    """Wake the idle workers now (PostgreSQL)."""
    # No hint outlives the server, so there is nothing that waiting for the disk could save. What it speaks of
    # was committed before.
    # guard: hint-alone-is-asynchronous
    database.run_statement(
        "SELECT pg_notify(%(channel)s, ''), set_config('synchronous_commit', 'off', true)",
        {"channel": channel(database.schema)},
    )


def notifying_statement(
    statement: str, parameters: Mapping[str, Any], schema: str | None
) -> tuple[str, dict[str, Any]]:
    """Return a statement that is a transaction by itself, with a hint to idle workers at its commit
    (PostgreSQL)."""
    told = f"WITH done AS ({statement}) SELECT done.*, pg_notify(%(channel)s, '') FROM done"
    return told, {**parameters, "channel": channel(schema)}


def wake_others(conn: Connection) -> None:
    """Wake idle workers when this transaction commits, where they do not see commits by themselves."""
    if conn.dialect.name == "postgresql":
        conn.execute(text("SELECT pg_notify(:channel, '')"), {"channel": _channel_of(conn)})


def listen(conn: Connection) -> None:
    """Have this connection receive what `notify` sends (PostgreSQL)."""
    conn.exec_driver_sql(f'LISTEN "{_channel_of(conn)}"')


def listens(conn: Connection) -> bool:
    """Whether the session that answers now is the one that LISTENs; also a sign of life (PostgreSQL)."""
    found = conn.execute(
        text("SELECT :channel IN (SELECT pg_listening_channels())"), {"channel": _channel_of(conn)}
    )
    return bool(found.scalar_one())


def channel(schema: str | None) -> str:
    """The name of the channel: one for each schema, short enough for PostgreSQL whatever the schema's
    name."""
    return "sqlq_" + hashlib.sha256(str(schema).encode()).hexdigest()[:16]


def _channel_of(conn: Connection) -> str:
    return channel(conn.get_execution_options()["schema_translate_map"][TOKEN_SCHEMA])


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """A worker as it has entered itself; `queues` is a JSON array, None for all."""

    id: str
    host: str
    pid: int
    version: str
    queues: str | None
    concurrency: int
    unstarted: int
    """How many jobs it has held for long without starting them."""
    started_at: datetime
    seen_at: datetime


def alive(conn: Connection, *, within_ms: int) -> list[WorkerRow]:
    """Return the workers that sent a heartbeat within this time, the longest running first."""
    recent = workers.c.seen_at >= after(bindparam("ago_ms", type_=BigInteger))
    query = select(workers).where(recent).order_by(workers.c.started_at, workers.c.id)
    return [_worker(row) for row in conn.execute(query, {"ago_ms": -within_ms})]


def entered(conn: Connection) -> list[WorkerRow]:
    """Return all workers that did not sign off, also those silent for up to a day, the longest running
    first."""
    return [
        _worker(row) for row in conn.execute(select(workers).order_by(workers.c.started_at, workers.c.id))
    ]


def _worker(row: Any) -> WorkerRow:
    """Return a worker as it has entered itself; one that names its queues as no worker does, serves none."""
    found = WorkerRow(*row)
    try:
        names = [] if found.queues is None else json.loads(found.queues)
    except (ValueError, RecursionError):
        names = None
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        return found
    return replace(found, queues="[]")


class ReservedJob(NamedTuple):
    """A job that a worker holds, from its claim until its outcome is written."""

    id: int
    task: str
    queue: str
    owner: str
    since: datetime


def reserved(conn: Connection) -> list[ReservedJob]:
    """Return every job that is reserved, the longest held first; no more than the workers' slots, and what
    they start next."""
    query = select(jobs.c.id, jobs.c.task, jobs.c.queue, jobs.c.reserved_by, jobs.c.reserved_at).where(
        jobs.c.reserved_at.is_not(None)
    )
    return [ReservedJob(*row) for row in conn.execute(query.order_by(jobs.c.reserved_at, jobs.c.id))]


def paused(conn: Connection) -> dict[str, datetime]:
    """Return the paused queues, and since when they are."""
    query = (
        select(queues.c.queue, queues.c.paused_at)
        .where(queues.c.paused_at.is_not(None))
        .order_by(queues.c.queue)
    )
    return {row.queue: row.paused_at for row in conn.execute(query)}


def moment(conn: Connection) -> datetime:
    """Return what time it is by the database's clock."""
    found: datetime = conn.execute(select(type_coerce(now(), Moment))).scalar_one()
    return found
