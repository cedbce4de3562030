"""Listens to the notifications that an enqueue sends to idle workers."""

from __future__ import annotations

from typing import Any

from sqlalchemy import text

import sqlq
from sqlq.store.workers import notify as notifys


class Listener:
    """An idle worker's ear."""

    def __init__(self, app: sqlq.App) -> None:
        self._app = app
        self._conn = app.database.connect(isolation_level="AUTOCOMMIT")
        notifys.listen(self._conn)

    def hears_one(self) -> bool:
        return self.hears_within(10)

    def hears_within(self, seconds: float) -> bool:
        driver: Any = self._conn.connection.dbapi_connection
        return bool(list(driver.notifies(timeout=seconds, stop_after=1)))

    def hears_no_more(self) -> bool:
        """Return whether nothing comes before a last message, which is sent after all of the App's."""
        self._app._connected.enqueuer.close()
        with self._app.database.begin() as conn:
            conn.execute(
                text("SELECT pg_notify(:channel, 'last')"),
                {"channel": notifys.channel(self._app.database.schema)},
            )
        driver: Any = self._conn.connection.dbapi_connection
        return [heard.payload for heard in driver.notifies(timeout=10, stop_after=1)] == ["last"]

    def close(self) -> None:
        self._conn.invalidate()
        self._conn.close()
