"""Pauses and resumes queues and tasks.

A claim leaves out a paused queue. A worker that claims a job of a paused task blocks it, see
`store.jobs.paused`.
"""

from __future__ import annotations

from collections.abc import Set
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import (
    BigInteger,
    Connection,
    Table,
    func,
    literal,
    literal_column,
    null,
    select,
    type_coerce,
    union_all,
    update,
)

from sqlq.database.batch import Change, Key, inserted
from sqlq.database.dialects import dialect_of
from sqlq.schema.tables import queues, tasks
from sqlq.schema.types import Moment, after, now
from sqlq.store.workers.notify import wake_others


def paused(conn: Connection) -> Pauses:
    """Return the pauses of queues and tasks."""
    return read(conn)[0]


def read(conn: Connection) -> tuple[Pauses, float | None]:
    """Return the pauses, and the milliseconds until the first of them ends; None where none has an end."""
    rows = sorted(conn.execute(_PAUSED).all())
    of_queues, of_tasks = (
        {row.name: Pause(row.paused_at, row.paused_until) for row in rows if row.place == place}
        for place in range(2)
    )
    left = [row.paused_until - row.now for row in rows if row.paused_until is not None]
    return Pauses(of_queues, of_tasks), min(left).total_seconds() * 1000 if left else None


ALL = ""
"""Stands in sqlq_queues for all queues, those made later included: no queue has this name."""


class Pause(NamedTuple):
    """The time in which workers claim nothing, or start no job of a task; `until` is None for a pause without
    end."""

    since: datetime
    until: datetime | None


class Pauses:
    """The queues that are paused, each or all together, and the tasks."""

    def __init__(self, found: dict[str, Pause], of_tasks: dict[str, Pause]) -> None:
        self.all = found.pop(ALL, None)
        """The pause of all queues, those made later included."""
        self.named = found
        self.tasks = of_tasks
        """The pauses of tasks, by their names."""

    def __contains__(self, queue: object) -> bool:
        return self.all is not None or queue in self.named

    def keys(self) -> Set[str]:
        """Return the names of the queues that are paused by name."""
        return self.named.keys()


_PAUSED = union_all(
    *(
        select(
            literal_column(str(place)).label("place"),
            next(iter(table.primary_key)).label("name"),
            table.c.paused_at,
            table.c.paused_until,
            type_coerce(now(), Moment).label("now"),
        ).where(table.c.paused_at.is_not(None))
        for place, table in enumerate((queues, tasks))
    )
)


def end_pauses(conn: Connection) -> tuple[list[str], list[str]]:
    """End the pauses whose time is over; return the queues, "" for all, and the tasks, whose jobs are to be
    freed."""
    dialect = dialect_of(conn)
    of_queues, of_tasks = ([name for (name,) in dialect.change(conn, end)] for end in _ENDS)
    if of_queues:
        wake_others(conn)
    return of_queues, of_tasks


_resumed: dict[str, Any] = {"paused_at": null(), "paused_until": null()}
_ENDS = tuple(
    Change(table, table.c.paused_until <= now(), _resumed, returning=(*table.primary_key,))
    for table in (queues, tasks)
)


# -- pausing -------------------------------------------------------------------------------------------------


def pause(conn: Connection, name: str, *, lasting_ms: int | None = None, of: Table = queues) -> bool:
    """Let no worker claim from a queue, or start a job of a task, until it is resumed, or for `lasting_ms`.
    Return whether it was not paused before. A later call replaces the end.

    The pause of a queue takes effect with the next claim, since the claim statement itself checks it. Each
    worker observes a pause of all queues, or of a task, within two seconds.
    """
    dialect, (key,) = dialect_of(conn), of.primary_key
    until = null() if lasting_ms is None else after(literal(lasting_ms, BigInteger))
    values = {key.name: name, "paused_at": now(), "paused_until": until}
    if inserted(conn, dialect.upsert(of, Key((key.name,)), values, returning=(key,))):
        return True
    row = key == name
    before = next(iter(dialect.lock(conn, select(of.c.paused_at).where(row), waits=True)), None)
    if before is None:  # somebody has deleted the row since the INSERT met it
        return pause(conn, name, lasting_ms=lasting_ms, of=of)
    since = func.coalesce(of.c.paused_at, now())
    conn.execute(update(of).where(row).values(paused_at=since, paused_until=until))
    return before.paused_at is None


def resume(conn: Connection, name: str, *, of: Table = queues) -> bool:
    """Let workers claim from a queue, or start jobs of a task, again, and wake the idle ones; return whether
    it was paused. The jobs of a task are still to be freed."""
    (key,) = of.primary_key
    again = update(of).where(key == name, of.c.paused_at.is_not(None))
    resumed = conn.execute(again.values(_resumed)).rowcount == 1
    if resumed:
        wake_others(conn)
    return resumed
