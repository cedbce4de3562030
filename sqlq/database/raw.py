"""Past SQLAlchemy: statements that a caller waits for are handed to the driver itself, on connections of an
engine's own pool."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import QueuePool

from sqlq.database.dialect import Ask, Dialect

T = TypeVar("T")

RESTS_SINCE = "sqlq_rests_since"
"""Where a pooled connection keeps the moment since when it rests, for the thread that takes it next."""
TAKEN_SECONDS = 0.05
"""For so long a connection serves one statement after the other. Then the pool is asked again, which may find
that it has grown too old, or is not what it was any more."""


class Driver:
    """An engine's driver, asked without SQLAlchemy, which would take half as long again as a statement.

    To take a connection from the pool and to give it back costs a tenth of a statement. So between two
    statements that follow each other closely one rests here, unless the pool has no other.
    """

    def __init__(self, engine: Engine, dialect: Dialect) -> None:
        self._engine = engine
        self._known: Any = engine.dialect
        self._dialect = dialect
        self._may_rest = isinstance(engine.pool, QueuePool) and engine.pool.size() > 1  # guard: pool-of-one
        self._resting: dict[str, tuple[Any, float]] = {}
        """At most one, under one key: `setdefault` and `pop` are atomic, and a lock might be held by another
        thread at a fork. Two that rested could be all that a small pool has."""

    def run(self, work: Callable[[Ask], T]) -> T:
        """Do `work` by asking a connection, each statement a transaction, and return what it returns.

        An error is raised as SQLAlchemy raises it, and a connection that is of no use after it is given up
        likewise, together with those that rest beside it.
        """
        pooled: Any = None
        taken_at = 0.0
        statement: str | None = None
        parameters: Any = None

        def ask(what: str, given: Any) -> list[Sequence[Any]]:
            nonlocal statement, parameters
            statement, parameters = what, given
            return self._dialect.run(pooled.dbapi_connection, what, given)

        try:
            pooled, taken_at = self._take()
            result = work(ask)
        except BaseException as error:
            given_up = pooled is not None and self._broken_off(pooled, error)
            if not isinstance(error, self._known.loaded_dbapi.Error):
                raise
            raise DBAPIError.instance(
                statement,
                parameters,
                error,
                self._known.loaded_dbapi.Error,
                connection_invalidated=given_up,
                dialect=self._known,
            ) from error
        if not self._may_rest or self._resting.setdefault(_ONE, (pooled, taken_at))[0] is not pooled:
            pooled.close()
        return result

    def close(self) -> None:
        """Give the pool back what rests here."""
        with suppress(KeyError):
            self._return(*self._resting.pop(_ONE))

    def forget(self) -> None:
        """Leave what rests here as it is, for it is another process's."""
        _FORGOTTEN.append(self._resting)
        self._resting = {}

    def _take(self) -> tuple[Any, float]:
        """Return a connection, and when it was taken from the pool."""
        moment = time.monotonic()
        try:
            pooled, taken_at = self._resting.pop(_ONE)
        except KeyError:
            return self._engine.raw_connection(), moment
        # guard: resting-connection
        if moment - taken_at < TAKEN_SECONDS and not self._dialect.is_cut_off(pooled.dbapi_connection):
            return pooled, taken_at
        self._return(pooled, taken_at)
        return self._engine.raw_connection(), moment

    def _return(self, pooled: Any, taken_at: float) -> None:
        pooled.info[RESTS_SINCE] = taken_at  # guard: rest-counts
        pooled.close()

    def _broken_off(self, pooled: Any, error: BaseException) -> bool:
        """Give back what work was broken off on; return whether it was of no use any more."""
        useless = self._dialect.trouble(error).is_useless or bool(
            self._known.is_disconnect(error, pooled.dbapi_connection, None)
        )
        if useless:
            pooled.invalidate()
            self.close()  # guard: resting-go-too
            self._engine.dispose()
        else:
            try:
                # guard: broken-off-is-rolled-back
                pooled.rollback()  # a transaction may be open, and a caller's kind of pool may leave it so
            except self._known.loaded_dbapi.Error:  # guard: no-rollback-no-use
                pooled.invalidate()
        pooled.close()
        return useless


_ONE = "one"
_FORGOTTEN: list[Any] = []
"""Kept, since a connection that is forgotten altogether may be ended by its destructor."""
