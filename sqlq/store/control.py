"""What operators ask of workers, and what a worker says that it is at: in its row of sqlq_workers.

Nothing here is asked by a statement of its own while nobody asks for anything. On PostgreSQL it comes with
the look that each host makes about once a second; on SQLite it is read when something was committed.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence, Set
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import BigInteger, Connection, bindparam, func, null, select, type_coerce, update

from sqlq.schema.moments import Moment, now
from sqlq.schema.tables import jobs, queues, workers
from sqlq.store.dialect import Right

STARTING, WORKING, PAUSED, STOPPING = "starting", "working", "paused", "stopping"
"""What a worker says that it is at."""
STUCK = "stuck"
"""What its supervisor says of one that gives no sign of life."""
ALL = ""
"""Stands in sqlq_queues for all queues, those made later included: no queue has this name."""


class Request(NamedTuple):
    """What a worker is asked: a word and its moment, and the moment of the last request to cancel a job it
    runs. Moments are numbers that are compared with none but each other."""

    worker: str
    asked: str | None
    asked_at: int | None
    cancels_at: int | None


class Wanted(NamedTuple):
    """What operators want of workers."""

    requests: tuple[Request, ...] = ()
    all_paused: bool = False
    pause_ms: float | None = None
    """In how many milliseconds the next pause of a queue, or of all, is over; None where none has an end."""


class Pause(NamedTuple):
    """Since when, and until when, nothing is claimed; `until` None for without an end."""

    since: datetime
    until: datetime | None


class Pauses:
    """The queues that are paused, each or all together."""

    def __init__(self, found: dict[str, Pause]) -> None:
        self.all = found.pop(ALL, None)
        """The pause of all queues, those made later included."""
        self.named = found

    def __contains__(self, queue: object) -> bool:
        return self.all is not None or queue in self.named

    def keys(self) -> Set[str]:
        """Return the names of the queues that are paused by name."""
        return self.named.keys()


def wanted(requests: str | None, all_paused: bool, pause_ms: float | None) -> Wanted:
    """Return what a look has seen."""
    found = () if requests is None else tuple(Request(*each) for each in json.loads(requests))
    return Wanted(found, bool(all_paused), pause_ms)


def read(conn: Connection, id: str) -> Wanted:
    """Return what is wanted of one worker, and of all."""
    asked = conn.execute(_ASKED, {"id": id}).one_or_none()
    paused = conn.execute(_PAUSED).all()
    ends = [row.paused_until for row in paused if row.paused_until is not None]
    return Wanted(
        () if asked is None else (Request(*asked),),
        any(row.queue == ALL for row in paused),
        (min(ends) - paused[0].now).total_seconds() * 1000 if ends else None,
    )


_ASKED = select(
    workers.c.id,
    workers.c.asked,
    type_coerce(workers.c.asked_at, BigInteger),
    type_coerce(workers.c.cancels_at, BigInteger),
).where(workers.c.id == bindparam("id"))
_PAUSED = select(queues.c.queue, queues.c.paused_until, type_coerce(now(), Moment).label("now")).where(
    queues.c.paused_at.is_not(None)
)


def ask(conn: Connection, ids: Collection[str], word: str) -> set[str]:
    """Ask workers for something: pause, resume, stop or restart; return those that are still entered."""
    return _write(conn, ids, asked=word, asked_at=now())


def _write(conn: Connection, ids: Collection[str], **values: Any) -> set[str]:
    # in one order, so that two operators cannot deadlock
    chosen = select(workers.c.id).where(workers.c.id.in_(ids)).order_by(workers.c.id).with_for_update()
    found = set(conn.scalars(chosen))
    conn.execute(update(workers).where(workers.c.id.in_(found)).values(values))
    return found


def say(conn: Connection, id: str, state: str, *, waits: bool = True) -> None:
    """Note what a worker is at; unless it `waits`, not while another transaction has locked its row."""
    this = select(workers.c.id).where(workers.c.id == id).with_for_update(skip_locked=not waits)
    conn.execute(update(workers).where(workers.c.id.in_(this)).values(state=state, state_at=now()))


def end_pauses(conn: Connection) -> list[str]:
    """Resume what was paused until a moment that has come; return the queues, "" for all."""
    over = update(queues).where(queues.c.paused_until <= now())
    return list(conn.scalars(over.values(paused_at=null(), paused_until=null()).returning(queues.c.queue)))


def next_end(conn: Connection) -> float | None:
    """Return in how many milliseconds the next pause is over; None where none has an end."""
    row = conn.execute(select(func.min(queues.c.paused_until), type_coerce(now(), Moment))).one()
    until, moment = row
    return None if until is None else float((until - moment).total_seconds() * 1000)


def hint_at_cancels(conn: Connection, owners: Collection[str]) -> None:
    """Have workers look whether jobs that they run are to be cancelled, which else they would see at their
    next heartbeat."""
    _write(conn, owners, cancels_at=now())


def cancelled(conn: Connection, owner: str) -> set[Right]:
    """Return the rights of a worker whose end an operator has asked for."""
    query = select(jobs.c.id, jobs.c.lease_token).where(
        jobs.c.reserved_at.is_not(None), jobs.c.reserved_by == owner, jobs.c.cancel_requested_at.is_not(None)
    )
    return {(id, token) for id, token in conn.execute(query)}


def running_of(conn: Connection, ids: Sequence[int]) -> set[str]:
    """Return the workers that hold these jobs."""
    held = jobs.c.reserved_at.is_not(None)
    return set(conn.scalars(select(jobs.c.reserved_by).where(jobs.c.id.in_(ids), held).distinct()))
