"""Pauses and resumes queues."""

from __future__ import annotations

from collections.abc import Set
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import BigInteger, Connection, func, literal, null, select, type_coerce, update

from sqlq.database.batch import Change, Key, inserted
from sqlq.database.dialects import dialect_of
from sqlq.schema.tables import queues
from sqlq.schema.types import Moment, after, now
from sqlq.store.workers.notify import wake_others


def paused(conn: Connection) -> Pauses:
    """Return the pauses of queues."""
    query = select(queues.c.queue, queues.c.paused_at, queues.c.paused_until)
    rows = conn.execute(query.where(queues.c.paused_at.is_not(None)).order_by(queues.c.queue))
    return Pauses({row.queue: Pause(row.paused_at, row.paused_until) for row in rows})


ALL = ""
"""Stands in sqlq_queues for all queues, those made later included: no queue has this name."""


class Pause(NamedTuple):
    """The time in which workers claim nothing; `until` is None for a pause without end."""

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


_PAUSED = select(queues.c.queue, queues.c.paused_until, type_coerce(now(), Moment).label("now")).where(
    queues.c.paused_at.is_not(None)
)


def end_pauses(conn: Connection) -> list[str]:
    """End the pauses whose time is over; return the queues, "" for all."""
    return [row.queue for row in dialect_of(conn).change(conn, _END)]


_resumed: dict[str, Any] = {"paused_at": null(), "paused_until": null()}
_END = Change(queues, queues.c.paused_until <= now(), _resumed, returning=(queues.c.queue,))


def next_end(conn: Connection) -> float | None:
    """Return the milliseconds until the next pause ends; None where none has an end."""
    row = conn.execute(select(func.min(queues.c.paused_until), type_coerce(now(), Moment))).one()
    until, moment = row
    return None if until is None else float((until - moment).total_seconds() * 1000)


# -- pausing -------------------------------------------------------------------------------------------------


def pause(conn: Connection, name: str, *, lasting_ms: int | None = None) -> bool:
    """Let no worker claim from a queue until it is resumed, or for `lasting_ms`; return whether it was not
    paused before. A later call replaces the end.

    It takes effect with the next claim, since the claim statement itself checks the pause. Each worker
    observes a pause of all queues within two seconds.
    """
    dialect = dialect_of(conn)
    until = null() if lasting_ms is None else after(literal(lasting_ms, BigInteger))
    values = {"queue": name, "paused_at": now(), "paused_until": until}
    if inserted(conn, dialect.upsert(queues, Key(("queue",)), values, returning=(queues.c.queue,))):
        return True
    row = queues.c.queue == name
    before = next(iter(dialect.lock(conn, select(queues.c.paused_at).where(row), waits=True)), None)
    if before is None:  # somebody has deleted the row since the INSERT met it
        return pause(conn, name, lasting_ms=lasting_ms)
    since = func.coalesce(queues.c.paused_at, now())
    conn.execute(update(queues).where(row).values(paused_at=since, paused_until=until))
    return before.paused_at is None


def resume(conn: Connection, name: str) -> bool:
    """Let workers claim from a queue again, and wake the idle ones; return whether it was paused."""
    paused = queues.c.paused_at.is_not(None)
    again = update(queues).where(queues.c.queue == name, paused)
    resumed = conn.execute(again.values(_resumed)).rowcount == 1
    if resumed:
        wake_others(conn)
    return resumed
