"""The record of what operators did."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import datetime

from sqlalchemy import Connection, case, select, update

from sqlq.config.json_text import AsJson
from sqlq.database.batch import Change, insert_returning
from sqlq.database.dialects import dialect_of
from sqlq.schema.tables import audit
from sqlq.schema.types import ago, now

BATCH = 1_000
SILENT_MS = 60_000
"""An action that has written nothing for this time is not running any more."""


@dataclass(frozen=True, slots=True)
class Action(AsJson):
    """An action of an operator. `target` is the command that does the same. `number` is the number of rows
    that it changed until now, None before its first batch. `state` is running, stopping, stopped, ended or
    interrupted: without a sign for a minute. `database_user` is the user of the database connection, as the
    database has it; None on SQLite."""

    COLUMNS = (
        *("id", "when=at", "who=actor", "database user=database_user"),
        *("state", "number", "command=target"),
    )
    id: int
    at: datetime
    actor: str
    action: str
    target: str
    number: int | None
    database_user: str | None
    ended_at: datetime | None
    state: str


_STATE = case(
    (audit.c.ended_at.is_not(None) & audit.c.stopped_at.is_(None), "ended"),
    (audit.c.ended_at.is_not(None), "stopped"),
    (audit.c.seen_at < ago(SILENT_MS), "interrupted"),
    (audit.c.stopped_at.is_not(None), "stopping"),
    else_="running",
)


def begin(conn: Connection, actor: str, action: str, target: str) -> int:
    """Record that an action begins; return its id."""
    values = {"actor": actor, "action": action, "target": target}
    return int(conn.execute(insert_returning(audit, values, audit.c.id)).scalar_one())


def end(conn: Connection, id: int, number: int) -> bool:
    """Record that an action has ended."""
    row = update(audit).where(audit.c.id == id)
    return conn.execute(row.values(number=number, ended_at=now())).rowcount > 0


def advance(conn: Connection, id: int, number: int) -> bool:
    """Record how many rows an action has changed by now. Return False for one that is to stop."""
    row = update(audit).where(audit.c.id == id, audit.c.stopped_at.is_(None))  # guard: actions-can-be-stopped
    return conn.execute(row.values(number=number, seen_at=now())).rowcount > 0


def stop(conn: Connection, id: int) -> bool:
    """Have an action stop after its batch; return False for one that has ended."""
    row = update(audit).where(audit.c.id == id, audit.c.ended_at.is_(None), audit.c.stopped_at.is_(None))
    return conn.execute(row.values(stopped_at=now())).rowcount > 0


def listing(
    conn: Connection, *, limit: int, before: int | None, actor: str | None, action: str | None
) -> list[Action]:
    """Return the newest actions, at most `limit`, with ids below `before`, of one actor or action."""
    columns = (_STATE if each.name == "state" else audit.c[each.name] for each in fields(Action))
    query = select(*columns).order_by(audit.c.id.desc()).limit(limit)
    if before is not None:
        query = query.where(audit.c.id < before)
    for name, value in (("actor", actor), ("action", action)):
        query = query if value is None else query.where(audit.c[name] == value)
    return [Action(*row) for row in conn.execute(query)]


def prune(conn: Connection, older_than_ms: int) -> int:
    """Delete a batch of actions that began longer ago than that; return how many."""
    old = select(audit.c.id).where(audit.c.at < ago(older_than_ms)).order_by(audit.c.id).limit(BATCH)
    return len(dialect_of(conn).sql.change(conn, Change(old, returning=(audit.c.id,))))
