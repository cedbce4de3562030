"""What workers know of each other and of the queues, and how they wake one another; never a guard, only
information."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import (
    BigInteger,
    Connection,
    String,
    bindparam,
    cast,
    delete,
    func,
    insert,
    null,
    select,
    text,
    type_coerce,
    union_all,
    update,
)

from sqlq.schema.moments import Moment, after, now
from sqlq.schema.qualify import in_catalog
from sqlq.schema.tables import jobs, queues, workers
from sqlq.settings import LEASE_MS
from sqlq.store import control
from sqlq.store.control import Pause, Pauses, Wanted
from sqlq.store.database import Database
from sqlq.store.dialect import Right, schema_of
from sqlq.store.jobs import DIALECTS

ALIVE_MS = 3 * LEASE_MS
"""A worker is taken for alive this long after its last heartbeat. With the default lease it then missed nine
in a row: a database that was away for a minute does not make every worker look dead, and one that died does
not look alive for long."""


def register(
    conn: Connection,
    *,
    id: str,
    host: str,
    pid: int,
    version: str,
    queues: Sequence[str] | None,
    concurrency: int,
    supervisor_pid: int | None = None,
    name: str | None = None,
    state: str = "working",
) -> None:
    """Enter a worker; `queues` None means that it serves all, `supervisor_pid` None that it has no
    supervisor. `state` is one of those of `store.control`."""
    named = None if queues is None else json.dumps(list(queues), ensure_ascii=False)
    conn.execute(
        insert(workers).values(
            id=id,
            host=host,
            pid=pid,
            supervisor_pid=supervisor_pid,
            version=version,
            queues=named,
            concurrency=concurrency,
            name=name,
            state=state,
        )
    )


def seen(conn: Connection, id: str) -> bool:
    """Note that a worker lives, and say whether it is still entered: one that slept for a day was swept out,
    and registers again."""
    return conn.execute(update(workers).where(workers.c.id == id).values(seen_at=now())).rowcount == 1


def stand_in(
    conn: Connection, owners: Collection[str], *, lease_ms: int
) -> tuple[set[str], dict[str, dict[Right, bool]]]:
    """Note that these workers live, and renew all they hold, for their supervisor; in one statement where the
    database can do that in one.

    Rows that another transaction has locked are passed over, so that one worker that is stuck keeps the
    leases of no other from being renewed. Returns which of the workers are entered, and for each the rights
    renewed, and whether their end is asked for. The id of a worker is made anew for each process and never
    used again, so that it stands for its rights.
    """
    given = {"owners": sorted(owners), "lease_ms": lease_ms}
    if not DIALECTS[conn.dialect.name].changes_in_queries:
        rows = [(id, None, None, None) for (id,) in conn.execute(_STILL_HERE, given)]
        rows += [tuple(row) for row in conn.execute(_STILL_THEIRS, given)]
    else:
        rows = [tuple(row) for row in conn.execute(_STAND_IN, given)]
    entered: set[str] = set()
    renewed: dict[str, dict[Right, bool]] = {owner: {} for owner in owners}
    for owner, id, token, cancel_requested_at in rows:
        if id is None:
            entered.add(owner)
        else:
            renewed[owner][id, token] = cancel_requested_at is not None
    return entered, renewed


_owners = bindparam("owners", expanding=True, type_=String)
_STILL_HERE = update(workers).where(workers.c.id.in_(_owners)).values(seen_at=now()).returning(workers.c.id)
_theirs = (
    select(jobs.c.id)
    .where(jobs.c.reserved_at.is_not(None), jobs.c.reserved_by.in_(_owners))  # guard: renews-its-own
    .order_by(jobs.c.id)
    .with_for_update(skip_locked=True)
    .cte("theirs")
    .prefix_with("MATERIALIZED")
)
_STILL_THEIRS = (
    update(jobs)
    .values(lease_expires_at=after(bindparam("lease_ms", type_=BigInteger)))
    .where(jobs.c.id == _theirs.c.id)
    .returning(jobs.c.reserved_by, jobs.c.id, jobs.c.lease_token, jobs.c.cancel_requested_at)
)
_free = (
    select(workers.c.id)
    .where(workers.c.id.in_(_owners))
    .order_by(workers.c.id)
    .with_for_update(skip_locked=True)  # guard: one-stuck-worker-is-passed-over
    .cte("free")
    .prefix_with("MATERIALIZED")
)
_seen = update(workers).where(workers.c.id == _free.c.id).values(seen_at=now()).returning(workers.c.id)
_renewed = _STILL_THEIRS.cte("renewed")
_STAND_IN = union_all(
    select(
        workers.c.id,
        cast(null(), jobs.c.id.type),
        cast(null(), jobs.c.lease_token.type),
        cast(null(), jobs.c.cancel_requested_at.type),
    )
    .where(workers.c.id.in_(_owners))
    .add_cte(_seen.cte("seen")),
    select(*_renewed.c),
)


def note_unstarted(conn: Connection, id: str, number: int) -> None:
    """Note how many jobs a worker has held for long without starting them, for the doctor."""
    conn.execute(update(workers).where(workers.c.id == id).values(unstarted=number))


def note_held(conn: Connection, id: str, jobs: Sequence[int]) -> None:
    """Note which jobs a worker holds without having started them."""
    named = json.dumps(list(jobs)) if jobs else None
    conn.execute(update(workers).where(workers.c.id == id).values(held_jobs=named))


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
    return Look(due_ms, listens, hosts, expired, late, limited, tick_ms, control.wanted(*wanted))


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
    hint(database, channel(database.schema))


def hint(database: Database, channel: str, words: str = "") -> None:
    """Send a notification, in a transaction of its own (PostgreSQL)."""
    # No hint outlives the server, so there is nothing that waiting for the disk could save. What it speaks of
    # was committed before.
    # guard: hint-alone-is-asynchronous
    database.run_statement(
        "SELECT pg_catalog.pg_notify(%(channel)s, %(words)s), "
        "pg_catalog.set_config('synchronous_commit', 'off', true)",
        {"channel": channel, "words": words},
    )


def notifying_statement(
    statement: str, parameters: Mapping[str, Any], schema: str | None
) -> tuple[str, dict[str, Any]]:
    """Return a statement that is a transaction by itself, with a hint to idle workers at its commit
    (PostgreSQL)."""
    told = f"WITH done AS ({statement}) SELECT done.*, pg_catalog.pg_notify(%(channel)s, '') FROM done"
    return told, {**parameters, "channel": channel(schema)}


def wake_others(conn: Connection) -> None:
    """Wake idle workers when this transaction commits, where they do not see commits by themselves."""
    if conn.dialect.name == "postgresql":
        conn.execute(text("SELECT pg_catalog.pg_notify(:channel, '')"), {"channel": _channel_of(conn)})


def listen(conn: Connection) -> None:
    """Have this connection receive what `notify` sends (PostgreSQL)."""
    conn.exec_driver_sql(f'LISTEN "{_channel_of(conn)}"')


def listens(conn: Connection) -> bool:
    """Whether the session that answers now is the one that LISTENs; also a sign of life (PostgreSQL)."""
    found = conn.execute(
        text(in_catalog("SELECT :channel = ANY (SELECT pg_listening_channels())")),
        {"channel": _channel_of(conn)},
    )
    return bool(found.scalar_one())


def channel(schema: str | None) -> str:
    """The name of the channel: one for each schema, short enough for PostgreSQL whatever the schema's
    name."""
    return "sqlq_" + hashlib.sha256(str(schema).encode()).hexdigest()[:16]


def _channel_of(conn: Connection) -> str:
    return channel(schema_of(conn))


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """A worker as it has entered itself; `queues` is a JSON array, None for all."""

    id: str
    host: str
    pid: int
    supervisor_pid: int | None
    version: str
    queues: str | None
    concurrency: int
    unstarted: int
    """How many jobs it has held for long without starting them."""
    held_jobs: str | None
    """Which jobs it holds and has not started yet, as JSON; None for none."""
    started_at: datetime
    seen_at: datetime
    name: str | None
    state: str
    """starting, working, paused or stopping, as it says itself."""
    state_at: datetime
    asked: str | None
    """What an operator has asked of it last."""
    asked_at: datetime | None
    cancels_at: datetime | None


def alive(conn: Connection, *, within_ms: int) -> list[WorkerRow]:
    """Return the workers that sent a heartbeat within this time, the longest running first."""
    recent = workers.c.seen_at >= after(bindparam("ago_ms", type_=BigInteger))
    query = select(workers).where(recent).order_by(workers.c.started_at, workers.c.id)
    return [_worker(row) for row in conn.execute(query, {"ago_ms": -within_ms})]


def served(conn: Connection, *, within_ms: int = ALIVE_MS) -> list[str] | None:
    """Return the queues that the workers serve that are alive; None where one of them serves all, or none is
    alive that could tell."""
    recent = workers.c.seen_at >= after(bindparam("ago_ms", type_=BigInteger))
    query = select(workers.c.queues).where(recent).distinct()
    found = list(conn.scalars(query, {"ago_ms": -within_ms}))
    if not found or None in found:
        return None
    return sorted({name for text in found for name in _names(text)})


def entered(conn: Connection) -> list[WorkerRow]:
    """Return all workers that did not sign off, also those silent for up to a day, the longest running
    first."""
    return [
        _worker(row) for row in conn.execute(select(workers).order_by(workers.c.started_at, workers.c.id))
    ]


def _worker(row: Any) -> WorkerRow:
    """Return a worker as it has entered itself; one that names its queues as no worker does, serves none."""
    found = WorkerRow(*row)
    if found.queues is None or _names(found.queues):
        return found
    return replace(found, queues="[]")


def _names(queues: str) -> list[str]:
    try:
        names = json.loads(queues)
    except (ValueError, TypeError, RecursionError):
        return []
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return names if is_list else []


def held(conn: Connection) -> set[tuple[str, int]]:
    """Return which worker holds which job without having started it, as each has noted."""
    rows = conn.execute(select(workers.c.id, workers.c.held_jobs).where(workers.c.held_jobs.is_not(None)))
    return {(owner, job) for owner, text in rows for job in held_in(text)}


def held_in(text: str | None) -> list[int]:
    """Return the jobs that a worker's row names."""
    try:
        found = json.loads(text or "[]")
    except (ValueError, RecursionError):
        return []
    return [id for id in found if isinstance(id, int)] if isinstance(found, list) else []


class ReservedJob(NamedTuple):
    """A job that a worker holds, from its claim until its outcome is written; whether it has `started` is
    known a few seconds after its claim."""

    id: int
    task: str
    queue: str
    owner: str
    since: datetime
    started: bool = True


def reserved(conn: Connection) -> list[ReservedJob]:
    """Return every job that is reserved, the longest held first; no more than the workers' slots, and what
    they start next."""
    query = select(jobs.c.id, jobs.c.task, jobs.c.queue, jobs.c.reserved_by, jobs.c.reserved_at).where(
        jobs.c.reserved_at.is_not(None)
    )
    return [ReservedJob(*row) for row in conn.execute(query.order_by(jobs.c.reserved_at, jobs.c.id))]


def paused(conn: Connection) -> Pauses:
    """Return what is paused."""
    query = select(queues.c.queue, queues.c.paused_at, queues.c.paused_until)
    rows = conn.execute(query.where(queues.c.paused_at.is_not(None)).order_by(queues.c.queue))
    return Pauses({row.queue: Pause(row.paused_at, row.paused_until) for row in rows})


def moment(conn: Connection) -> datetime:
    """Return what time it is by the database's clock."""
    found: datetime = conn.execute(select(type_coerce(now(), Moment))).scalar_one()
    return found
