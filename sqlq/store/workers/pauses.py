"""Pauses and resumes queues. A claim leaves out a paused queue."""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import BigInteger, Connection, func, literal, null, select, update

from sqlq.database.batch import Change, Key
from sqlq.database.dialects import dialect_of
from sqlq.schema.tables import queues
from sqlq.schema.types import after, now
from sqlq.store.workers.notify import wake_others


def paused(conn: Connection) -> Pauses:
    """Return the pauses of queues."""
    rows = conn.execute(_PAUSED).all()
    left = [row.paused_until - row.now for row in rows if row.paused_until is not None]
    pauses = Pauses({row.queue: Pause(row.paused_at, row.paused_until) for row in rows})
    pauses.next_end_ms = min(left).total_seconds() * 1000 if left else None
    return pauses


ALL = ""
"""Stands in sqlq_queues for all queues, those made later included: no queue has this name."""


class Pause(NamedTuple):
    """The time in which workers claim nothing; `until` is None for a pause without end."""

    since: datetime
    until: datetime | None


class Pauses:
    """The queues that are paused, each or all together."""

    next_end_ms: float | None = None
    """The milliseconds until the first pause ends; None where none has an end."""

    def __init__(self, rows: dict[str, Pause]) -> None:
        self.all = rows.pop(ALL, None)
        """The pause of all queues, those made later included."""
        self.named = rows

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


# -- pausing -------------------------------------------------------------------------------------------------


def pause(conn: Connection, name: str, *, lasting_ms: int | None = None) -> bool:
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


def resume(conn: Connection, name: str) -> bool:
    """Let workers claim from a queue again, and wake the idle ones; return whether it was paused."""
    row = select(_name).where(_name == name, _since.is_not(None))
    again = Change(row, _resumed, returning=(_name,), waits=True)
    if resumed := dialect_of(conn).sql.change(conn, again):
        wake_others(conn)
    return bool(resumed)
