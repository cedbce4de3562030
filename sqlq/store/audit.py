"""The record of what operators did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar

from sqlalchemy import Connection, select, update

from sqlq.config.json_text import AsJson
from sqlq.database.batch import Change, insert_returning
from sqlq.database.dialects import dialect_of
from sqlq.schema.tables import audit
from sqlq.schema.types import ago

BATCH = 1_000


@dataclass(frozen=True, slots=True)
class Action(AsJson):
    """An action of an operator. `target` is the command that does the same. `number` is the number of rows
    that it changed; None for an action that has not ended, or was interrupted. `database_user` is the user
    of the database connection, as the database has it; None on SQLite."""

    COLUMNS: ClassVar = (
        *("id", "when=at", "who=actor", "database user=database_user"),
        *("number", "command=target"),
    )
    id: int
    at: datetime
    actor: str
    action: str
    target: str
    number: int | None
    database_user: str | None


def begin(conn: Connection, actor: str, action: str, target: str) -> int:
    """Record that an action begins; return its id."""
    values = {"actor": actor, "action": action, "target": target}
    return int(conn.execute(insert_returning(audit, values, audit.c.id)).scalar_one())


def end(conn: Connection, id: int | None, number: int) -> int | None:
    """Record that an action has ended; None for one that could not be recorded."""
    if id is None:
        return None
    conn.execute(update(audit).where(audit.c.id == id).values(number=number))
    return id


def listing(
    conn: Connection, *, limit: int, before: int | None, actor: str | None, action: str | None
) -> Sequence[Action]:
    """Return the newest actions, at most `limit`, with ids below `before`, of one actor or action."""
    query = select(audit).order_by(audit.c.id.desc()).limit(limit)
    if before is not None:
        query = query.where(audit.c.id < before)
    values = {"actor": actor, "action": action}
    query = query.filter_by(**{name: value for name, value in values.items() if value is not None})
    return [Action(*row) for row in conn.execute(query)]


def prune(conn: Connection, older_than_ms: int) -> int:
    """Delete a batch of actions that began longer ago than that; return how many."""
    old = select(audit.c.id).where(audit.c.at < ago(older_than_ms)).order_by(audit.c.id).limit(BATCH)
    return len(dialect_of(conn).sql.change(conn, Change(old, returning=(audit.c.id,))))
