"""The rows of workers, with the requests of operators to them, and the pauses of queues."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from sqlalchemy import (
    BigInteger,
    Connection,
    Row,
    String,
    bindparam,
    delete,
    func,
    insert,
    literal,
    null,
    select,
    type_coerce,
    update,
)

from sqlq.config.constants import LEASE_MS
from sqlq.database.batch import RIGHT, Change, Key, Right, rights
from sqlq.database.dialects import dialect_of
from sqlq.payload.codec import decoded
from sqlq.schema.tables import IS_RESERVED, jobs, queues, workers
from sqlq.schema.types import after, ago, now
from sqlq.store.workers.notify import wake_others

ALIVE_MS = 3 * LEASE_MS
"""A worker counts as alive this long after its last heartbeat; with the default lease it then missed nine in
a row. So one minute without the database makes no worker look dead, and a dead one does not look alive for
long."""


def register(
    conn: Connection, *, queues: Sequence[str] | None, state: str = "working", **columns: str | int | None
) -> None:
    """Register a worker, by the columns of its row. `queues` is None if it serves all queues, `state` is one
    of the four below."""
    columns["queues"] = None if queues is None else json.dumps(queues, ensure_ascii=False)
    conn.execute(insert(workers).values(state=state, clock_at=datetime.now(UTC), **columns))


def seen(conn: Connection, id: str) -> bool:
    """Write a worker's heartbeat; return whether its row exists. A sweep deletes the row of a worker that
    slept for a day, which then registers again."""
    heartbeat = update(workers).where(workers.c.id == id)
    return conn.execute(heartbeat.values(seen_at=now(), clock_at=datetime.now(UTC))).rowcount == 1


def stand_in(
    conn: Connection, owners: Collection[str], *, lease_ms: int
) -> tuple[set[str], dict[str, dict[Right, bool]]]:
    """Renew all leases of these workers and write their heartbeats, for their supervisor.

    It skips rows that another transaction has locked, so one stuck worker does not block the renewal of other
    leases. Returns the workers whose rows exist, and for each the renewed rights, with whether their cancel
    is requested. Each process makes a new worker id, and none is used twice, so the id suffices as a fence.
    """
    dialect = dialect_of(conn)
    parameters = {"owners": sorted(owners)}
    renewed: dict[str, dict[Right, bool]] = {owner: {} for owner in owners}
    rows = dialect.sql.change(conn, _RENEW, {**parameters, "lease_ms": lease_ms})
    for owner, id, token, cancel_requested_at in rows:
        renewed[owner][id, token] = cancel_requested_at is not None
    clock = {"clock_at": datetime.now(UTC)}
    entered = {row.id for row in dialect.sql.change(conn, _SEEN, {**parameters, **clock})}
    if len(entered) < len(owners):  # the rows of the others are deleted or locked
        entered |= set(conn.scalars(_entered, parameters))
    return entered, renewed


_owners = bindparam("owners", expanding=True, type_=String)
_theirs = (
    select(jobs.c.id)
    .where(IS_RESERVED, jobs.c.reserved_by.in_(_owners))  # guard: renews-its-own
    .order_by(jobs.c.reserved_by, jobs.c.id)
)
_RENEW = Change(
    _theirs,
    {"lease_expires_at": after(bindparam("lease_ms", type_=BigInteger))},
    returning=(jobs.c.reserved_by, jobs.c.id, jobs.c.lease_token, jobs.c.cancel_requested_at),
)
_entered = select(workers.c.id).where(workers.c.id.in_(_owners)).order_by(workers.c.id)
# guard: one-stuck-worker-is-passed-over
_SEEN = Change(
    _entered,
    {"seen_at": now(), "clock_at": bindparam("clock_at", type_=workers.c.clock_at.type)},
    returning=(workers.c.id,),
)


def leave(conn: Connection, id: str) -> None:
    """Delete the row of a worker that ends."""
    conn.execute(delete(workers).where(workers.c.id == id))


def sweep(conn: Connection, *, silent_ms: int) -> None:
    """Delete the rows of workers that were silent for long, after a crash for example."""
    conn.execute(delete(workers).where(workers.c.seen_at < ago(silent_ms)))


def alive(conn: Connection) -> Sequence[Row[Any]]:
    """Return the rows of living workers, the longest running first."""
    return conn.execute(_ENTERED.where(_is_alive)).all()


_is_alive = workers.c.seen_at >= ago(ALIVE_MS)
_ENTERED = select(workers).order_by(workers.c.started_at, workers.c.id)


def served(conn: Connection) -> list[str] | None:
    """Return the queues that living workers serve; None where one of them serves all, or none is alive."""
    texts = conn.scalars(select(workers.c.queues).where(_is_alive).distinct()).all()
    if not texts or None in texts:
        return None
    return sorted({name for text in texts for name in queues_of(text) or ()})


def entered(conn: Connection) -> Sequence[Row[Any]]:
    """Return the rows of all workers that did not sign off, also those silent for up to a day, the longest
    running first."""
    return conn.execute(_ENTERED).all()


def queues_of(text: str | None) -> tuple[str, ...] | None:
    """Return the queues in a worker's row, None for all. It serves none if they are not as a worker writes
    them."""
    if text is None:
        return None
    names = decoded(text)
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return tuple(names) if is_list else ()


class ReservedJob(NamedTuple):
    """A job that a worker holds, from its claim until its outcome is written."""

    id: int
    task: str
    queue: str
    owner: str
    since: datetime


def reserved(conn: Connection) -> list[ReservedJob]:
    """Return every reserved job, the longest held first: at most the workers' slots, and the jobs that they
    start next."""
    query = (
        select(jobs.c.id, jobs.c.task, jobs.c.queue, jobs.c.reserved_by, jobs.c.reserved_at)
        .where(IS_RESERVED)
        .order_by(jobs.c.reserved_at, jobs.c.id)
    )
    return [ReservedJob(*row) for row in conn.execute(query)]


def moment(conn: Connection) -> datetime:
    """Return the time of the database's clock."""
    time: datetime = conn.execute(select(now())).scalar_one()
    return time


STARTING, WORKING, PAUSED, STOPPING = "starting", "working", "paused", "stopping"
"""The states that a worker reports."""
STUCK = "stuck"
"""The state that a supervisor reports of an unresponsive worker."""


class Request(NamedTuple):
    """The requests to a worker: the last one with its time, and the time of the last request to cancel its
    jobs. The times are numbers. Compare them for equality
    only: one request may have waited for another, and have the earlier time."""

    worker: str
    asked: str | None
    asked_at: int | None
    cancels_at: int | None


class Requests(NamedTuple):
    """The requests of operators to workers."""

    requests: tuple[Request, ...] = ()
    all_paused: bool = False
    pause_ms: float | None = None
    """The milliseconds until the next pause ends; None where none has an end."""


def requests_of(requests: str | None, all_paused: bool, pause_ms: float | None) -> Requests:
    """Return the requests that a poll has read."""
    rows = json.loads(requests or "[]")
    return Requests(tuple(Request(*row) for row in rows), bool(all_paused), pause_ms)


def read(conn: Connection, id: str) -> Requests:
    """Return the requests to one worker, and to all."""
    requests = tuple(Request(*row) for row in conn.execute(_REQUEST, {"id": id}))
    pauses = paused(conn)
    return Requests(requests, pauses.all is not None, pauses.next_end_ms)


_REQUEST = select(
    workers.c.id,
    workers.c.asked,
    type_coerce(workers.c.asked_at, BigInteger),
    type_coerce(workers.c.cancels_at, BigInteger),
).where(workers.c.id == bindparam("id"))


def request(conn: Connection, ids: Collection[str], word: str) -> set[str]:
    """Send workers a request: pause, resume, stop or restart. Return those whose rows exist."""
    return _write(conn, ids, asked=word, asked_at=now())


def _write(conn: Connection, ids: Collection[str], *, waits: bool = True, **values: Any) -> set[str]:
    # in one order, so that two operators cannot deadlock
    query = select(workers.c.id).where(workers.c.id.in_(ids)).order_by(workers.c.id)
    change = Change(query, values, returning=(workers.c.id,), waits=waits)
    return {row.id for row in dialect_of(conn).sql.change(conn, change)}


def write_state(conn: Connection, id: str, state: str, *, waits: bool = True) -> None:
    """Write the state of a worker; without `waits`, skip it while another transaction has locked the row."""
    _write(conn, [id], waits=waits, state=state, state_at=now())


def write_start_error(conn: Connection, ids: Collection[str], error: str | None) -> None:
    """Write why the supervisor of these workers cannot start another process; None where it can."""
    _write(conn, ids, waits=False, start_error=error)


def hint_at_cancels(conn: Connection, ids: Sequence[int]) -> None:
    """Have the workers of jobs look for requests to cancel now; otherwise they would see them at their next
    heartbeat."""
    owners = select(jobs.c.reserved_by).where(jobs.c.id.in_(ids), IS_RESERVED).distinct()
    _write(conn, conn.scalars(owners).all(), cancels_at=now())


def cancelled(conn: Connection, owner: str) -> set[Right]:
    """Return the rights of a worker to jobs whose cancel an operator has requested."""
    query = select(*RIGHT).where(IS_RESERVED, jobs.c.reserved_by == owner)
    return rights(conn.execute(query.where(jobs.c.cancel_requested_at.is_not(None))))


# -- pauses of queues ----------------------------------------------------------------------------------------


def paused(conn: Connection) -> Pauses:
    """Return the pauses of queues."""
    rows = conn.execute(_PAUSED).all()
    left = [row.paused_until - row.now for row in rows if row.paused_until is not None]
    named = {row.queue: Pause(row.paused_at, row.paused_until) for row in rows}
    next_end_ms = min(left).total_seconds() * 1000 if left else None
    return Pauses(named.pop(ALL_QUEUES, None), named, next_end_ms)


ALL_QUEUES = ""
"""Stands in sqlq_queues for all queues, those made later included: no queue has this name."""


class Pause(NamedTuple):
    """The time in which workers claim nothing; `until` is None for a pause without end."""

    since: datetime
    until: datetime | None


@dataclass
class Pauses:
    """The queues that are paused, each or all together."""

    all: Pause | None
    """The pause of all queues, those made later included."""
    named: dict[str, Pause]
    next_end_ms: float | None
    """The milliseconds until the first pause ends; None where none has an end."""

    def __contains__(self, queue: object) -> bool:
        return self.all is not None or queue in self.named


_name, _since, _until = queues.c.queue, queues.c.paused_at, queues.c.paused_until
_PAUSED = select(queues, now().label("now")).where(_since.is_not(None)).order_by(_name)


def end_pauses(conn: Connection) -> list[str]:
    """End the pauses whose time is over; return the queues, "" for all."""
    if ended := [name for (name,) in dialect_of(conn).sql.change(conn, _END)]:
        wake_others(conn)
    return ended


_resumed: dict[str, Any] = {"paused_at": null(), "paused_until": null()}
_END = Change(select(_name).where(_until <= now()).order_by(_name), _resumed, returning=(_name,), waits=True)


def pause_queue(conn: Connection, name: str, *, lasting_ms: int | None = None) -> bool:
    """Let no worker claim from a queue until it is resumed, or for `lasting_ms`. Return whether it was not
    paused before. A later call replaces the end.

    The pause of a queue takes effect with the next claim, since the claim statement itself checks it. Each
    worker observes a pause of all queues within two seconds.
    """
    dialect = dialect_of(conn)
    until = null() if lasting_ms is None else after(literal(lasting_ms, BigInteger))
    conn.execute(dialect.sql.upsert(queues, Key(("queue",)), {"queue": name}))
    row = _name == name
    (before,) = dialect.sql.lock(conn, select(_since).where(row), waits=True)
    since = func.coalesce(_since, now())
    conn.execute(update(queues).where(row).values(paused_at=since, paused_until=until))
    return before.paused_at is None


def resume_queue(conn: Connection, name: str) -> bool:
    """Let workers claim from a queue again, and wake the idle ones; return whether it was paused."""
    row = select(_name).where(_name == name, _since.is_not(None))
    change = Change(row, _resumed, returning=(_name,), waits=True)
    if resumed := dialect_of(conn).sql.change(conn, change):
        wake_others(conn)
    return bool(resumed)
