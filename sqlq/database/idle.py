"""Replaces pooled connections that died: while idle, before their use, and by an error."""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import Engine, event
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import DisconnectionError
from sqlalchemy.pool import ConnectionPoolEntry

from sqlq.database.driver import Driver
from sqlq.database.raw import RESTS_SINCE
from sqlq.database.timeouts import Patience

IDLE_SECONDS = 10.0
"""After this long a ping checks an idle connection before its use."""


def look_at_idle(driver: Driver, engine: Engine) -> None:
    """Replace a pooled connection that died while idle when it is taken from the pool.

    A close by a server or a proxy shows without a query. Only after a longer rest a ping checks it, at the
    cost of a round trip: a firewall may have forgotten the connection.
    """

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
            sound = driver.is_sound(engine, dbapi_connection, asks=not fresh)
        except Exception as error:  # the driver's, whose class depends on it
            raise DisconnectionError from error
        if not sound:
            raise DisconnectionError


def look_at_errors(driver: Driver, engine: Engine, patience: Patience) -> None:
    """Give up each connection of an engine that an error has made useless."""

    @event.listens_for(engine, "handle_error")
    def _failed(context: ExceptionContext) -> None:
        if context.connection is None:
            patience.start_over()
        elif driver.trouble(context.original_exception).is_useless:
            context.is_disconnect = True


def raise_what_sqlalchemy_raises(engine: Engine) -> None:
    """Raise errors on an engine of sqlq's own as SQLAlchemy's, since their class and code decide the
    handling.

    A host's hook for `handle_error` on the class Engine may raise anything in their place, and applies to
    every engine.
    """
    event.listen(engine, "handle_error", lambda context: None)  # gives the engine its own list
    hooks: Any = engine.dialect.dispatch.handle_error
    hooks.parent_listeners = ()  # guard: errors-are-sqlalchemys
