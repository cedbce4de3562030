"""Replaces pooled connections that died while idle, before their use."""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import Engine, event
from sqlalchemy.exc import DisconnectionError
from sqlalchemy.pool import ConnectionPoolEntry

from sqlq.database.dialect import Dialect
from sqlq.database.raw import RESTS_SINCE

IDLE_SECONDS = 10.0
"""After this long a ping checks an idle connection before its use."""


def look_at_idle(dialect: Dialect, engine: Engine) -> None:
    """Check each pooled connection of an engine when it is taken from the pool."""

    @event.listens_for(engine, "checkin")
    def _rests(dbapi_connection: Any, record: ConnectionPoolEntry) -> None:
        record.info.setdefault(RESTS_SINCE, time.monotonic())  # guard: rest-since-the-first

    @event.listens_for(engine, "checkout")
    def _wakes(dbapi_connection: Any, record: ConnectionPoolEntry, proxy: Any) -> None:
        since = record.info.pop(RESTS_SINCE, None)
        if since is None:
            return
        try:
            fresh = time.monotonic() - since < IDLE_SECONDS
            sound = not dialect.is_cut_off(dbapi_connection) and (
                fresh or dialect.is_sound(engine, dbapi_connection)
            )
        except Exception as error:  # the driver's, whose class depends on it
            raise DisconnectionError from error
        if not sound:
            raise DisconnectionError
