"""The pool of an engine: raw statements on its connections, and the replacement of those that died."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from sqlalchemy import Engine, event
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import DBAPIError, DisconnectionError
from sqlalchemy.pool import ConnectionPoolEntry, QueuePool

from sqlq.database.dialect import Driver
from sqlq.database.timeouts import AnswerTimeout, T
from sqlq.database.values import Execute, RawRows

IDLE_SINCE = "sqlq_rests_since"
"""The key under which a pooled connection keeps the time since when it rests, for the next thread."""
TAKEN_SECONDS = 0.05
"""A connection serves one statement after the other for this long. Then it returns to the pool, which may
find it too old or broken."""

IDLE_SECONDS = 10.0
"""After this long a ping checks an idle connection before its use."""


class RawConnections:
    """An engine's driver, used without SQLAlchemy, which would take half as long again as a statement.

    Taking a connection from the pool and returning it costs a tenth of a statement. So between two close
    statements a connection rests here, unless the pool has no other.
    """

    def __init__(self, engine: Engine, driver: Driver) -> None:
        self._engine = engine
        self._known: Any = engine.dialect
        self._driver = driver
        # guard: pool-of-one-has-no-resting-connection
        self._may_rest = isinstance(engine.pool, QueuePool) and engine.pool.size() > 1
        self._resting: dict[str, tuple[Any, float]] = {}
        """At most one, under one key: `setdefault` and `pop` are atomic, while another thread might hold a
        lock at a fork. Two resting connections could be all that a small pool has."""

    def run(self, work: Callable[[Execute], T]) -> T:
        """Do `work` on a connection, each statement a transaction, and return its result.

        An error is raised as SQLAlchemy raises it. If the connection is useless after it, it is closed,
        together with those that rest.
        """
        pool = self._engine.pool
        pooled: Any = None
        statement = parameters = None
        taken_at = 0.0

        def execute(text: str, values: Any) -> RawRows:
            nonlocal statement, parameters
            statement, parameters = text, values
            return self._driver.run(pooled.dbapi_connection, text, values)

        try:
            pooled, taken_at = self._take()
            result = work(execute)
        except BaseException as error:
            is_invalidated = pooled is not None and self._broken_off(pooled, error)
            kind = self._known.loaded_dbapi.Error
            if not isinstance(error, kind):
                raise
            raise DBAPIError.instance(
                statement,
                parameters,
                error,
                kind,
                connection_invalidated=is_invalidated,
                dialect=self._known,
            ) from error
        # guard: disposed-pool-has-no-resting-connection
        may_rest = self._may_rest and self._engine.pool is pool
        if not may_rest or self._resting.setdefault(_ONE, (pooled, taken_at))[0] is not pooled:
            pooled.close()
        return result

    def close(self) -> None:
        """Return the resting connection to the pool."""
        with suppress(KeyError):
            self._return(*self._resting.pop(_ONE))

    def forget(self) -> None:
        """Leave the resting connection as it is, since it belongs to another process."""
        _FORGOTTEN.append(self._resting)
        self._resting = {}

    def _take(self) -> tuple[Any, float]:
        """Return a connection, and the time when it was taken from the pool."""
        now = time.monotonic()
        try:
            pooled, taken_at = self._resting.pop(_ONE)
        except KeyError:
            return self._engine.raw_connection(), now
        may_stay = now - taken_at < TAKEN_SECONDS
        # guard: resting-connection-is-checked
        if may_stay and self._driver.is_sound(self._engine, pooled.dbapi_connection, pings=False):
            return pooled, taken_at
        self._return(pooled, taken_at)
        return self._engine.raw_connection(), now

    def _return(self, pooled: Any, taken_at: float) -> None:
        pooled.info[IDLE_SINCE] = taken_at  # guard: returned-connection-keeps-its-idle-time
        pooled.close()

    def _broken_off(self, pooled: Any, error: BaseException) -> bool:
        """Return the connection of interrupted work to the pool; return whether the connection was
        useless."""
        useless = self._driver.problem(error).is_useless or bool(
            self._known.is_disconnect(error, pooled.dbapi_connection, None)
        )
        if useless:
            pooled.invalidate()
            self.close()  # guard: useless-connection-drops-resting-ones
            dispose(self._engine)
        else:
            try:
                # guard: interrupted-transaction-is-rolled-back
                pooled.rollback()  # a transaction may be open, and a caller's pool may leave it so
            except self._known.loaded_dbapi.Error:  # guard: failed-rollback-drops-the-connection
                pooled.invalidate()
        pooled.close()
        return useless


def dispose(engine: Engine) -> None:
    """Close the connections of an engine. One that a thread still uses is closed when it comes back."""
    pool: Any = engine.pool
    # no event: a thread may be going through the listeners, and the next pool would inherit this one
    returned = pool._do_return_conn  # noqa: SLF001 - every kind of pool has its own

    def close(record: ConnectionPoolEntry) -> None:
        record.close()
        returned(record)  # its place is free for a thread that waits

    # guard: late-connection-is-closed
    pool._do_return_conn = close  # noqa: SLF001 - as above
    engine.dispose()


_ONE = "one"
_FORGOTTEN: list[Any] = []
"""Kept, since the destructor of a forgotten connection may close it."""


def look_at_idle(driver: Driver, engine: Engine) -> None:
    """Replace a pooled connection that died while idle when it is taken from the pool.

    A close by a server or a proxy shows without a query. Only after a longer rest a ping checks it, at the
    cost of a round trip: a firewall may have forgotten the connection.
    """

    @event.listens_for(engine, "checkin")
    def _returned(dbapi_connection: Any, record: ConnectionPoolEntry) -> None:
        record.info.setdefault(IDLE_SINCE, time.monotonic())  # guard: idle-time-starts-at-the-first-return

    @event.listens_for(engine, "checkout")
    def _wakes(dbapi_connection: Any, record: ConnectionPoolEntry, proxy: Any) -> None:
        since = record.info.pop(IDLE_SINCE, None)
        if since is None:
            return
        try:
            rested = time.monotonic() - since >= IDLE_SECONDS
            is_sound = driver.is_sound(engine, dbapi_connection, pings=rested)
        except Exception as error:  # the driver's, whose class depends on it
            raise DisconnectionError from error
        if not is_sound:
            raise DisconnectionError


def look_at_errors(driver: Driver, engine: Engine, timeout: AnswerTimeout) -> None:
    """Give up each connection of an engine that an error has made useless."""

    @event.listens_for(engine, "handle_error")
    def _failed(context: ExceptionContext) -> None:
        if context.connection is None:
            timeout.start_over()
        elif driver.problem(context.original_exception).is_useless:
            context.is_disconnect = True


def raise_sqlalchemys_errors(engine: Engine) -> None:
    """Raise errors on an engine of sqlq's own as SQLAlchemy's, since their class and code decide the
    handling.

    A host's hook for `handle_error` on the class Engine may raise anything in their place, and applies to
    every engine.
    """
    event.listen(engine, "handle_error", lambda context: None)  # gives the engine its own list
    dispatch: Any = engine.dialect.dispatch
    dispatch.handle_error.parent_listeners = ()  # guard: errors-are-sqlalchemys


def is_in_transaction(driver: Any) -> bool:
    """Whether a transaction is open on a connection of psycopg, psycopg2 or asyncpg, from any thread; False
    if unknown."""
    try:
        return bool(driver.info.transaction_status if hasattr(driver, "info") else driver.is_in_transaction())
    except Exception:  # closed meanwhile, or another driver's
        return False


def is_readable(file: int) -> bool:
    """Whether something has come on a socket. No answer is due on an idle one, so it is a close."""
    looker = select.poll()
    looker.register(file, select.POLLIN)
    return bool(looker.poll(0))
