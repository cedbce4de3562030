"""Sends and receives notifications, by which workers wake one another. No guarantee depends on them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, text

from sqlq.database.database import Database
from sqlq.database.dialects import dialect_of
from sqlq.database.doorbell import ring
from sqlq.database.schemas import schema_of
from sqlq.schema.qualify import in_catalog


def notify(database: Database) -> None:
    """Wake the idle workers now, on a database without notifications those of this machine alone."""
    if database.dialect.notifies:
        # No notification outlives the server, so waiting for the disk would save nothing. Its subject was
        # committed before.
        # guard: hint-alone-is-asynchronous
        database.run_statement(
            "SELECT pg_catalog.pg_notify(%(channel)s, ''), "
            "pg_catalog.set_config('synchronous_commit', 'off', true)",
            {"channel": channel(database.schema)},
        )
    else:
        ring(database.engine.url)


def notifying_statement(
    statement: str, parameters: Mapping[str, Any], schema: str | None
) -> tuple[str, dict[str, Any]]:
    """Return a statement that is a transaction by itself and notifies idle workers at its commit
    (PostgreSQL)."""
    return (
        f"WITH done AS ({statement}) SELECT done.*, pg_catalog.pg_notify(%(channel)s, '') FROM done",
        {**parameters, "channel": channel(schema)},
    )


def wake_others(conn: Connection) -> None:
    """Wake idle workers when this transaction commits, where they do not see commits by themselves."""
    if dialect_of(conn).notifies:
        conn.execute(text("SELECT pg_catalog.pg_notify(:channel, '')"), {"channel": _channel_of(conn)})


def listen(conn: Connection) -> None:
    """Subscribe this connection to the notifications that `notify` sends (PostgreSQL)."""
    conn.exec_driver_sql(f'LISTEN "{_channel_of(conn)}"')


def listens(conn: Connection) -> bool:
    """Whether the session that answers now is the one that LISTENs; also a sign of life (PostgreSQL)."""
    query = text(in_catalog("SELECT :channel = ANY (SELECT pg_listening_channels())"))
    return bool(conn.scalar(query, {"channel": _channel_of(conn)}))


def channel(schema: str | None) -> str:
    """The name of the channel: one for each schema, and short enough for PostgreSQL with any schema."""
    return "sqlq_" + hashlib.sha256(str(schema).encode()).hexdigest()[:16]


def _channel_of(conn: Connection) -> str:
    return channel(schema_of(conn))
