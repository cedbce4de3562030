"""When an idle worker looks for work again: soon after anything happened, then ever more rarely, at least
each second.

A hint from the database only makes the next look come sooner. On PostgreSQL it is a notification that
producers send (sqlq.hints); on SQLite it is `PRAGMA data_version`, which tells, without reading a page, that
a transaction was committed.
"""

from __future__ import annotations

import heapq
import logging
import selectors
import socket
import sqlite3
import threading
import time
from typing import Any

from sqlalchemy import Connection

from sqlq.clock import readable
from sqlq.settings import LISTEN_PING_SECONDS, POLL_MS
from sqlq.store import cluster
from sqlq.store.database import Database
from sqlq.store.postgresql import leads_to_one_server
from sqlq.worker.outage import Outage

log = logging.getLogger("sqlq.worker")

FIRST_LOOK_SECONDS = 0.002
LOOK_AFTER_HINT_SECONDS = 0.02
"""Seldom does a hint overtake the COMMIT it speaks of; what was looked for in vain is looked for again
then."""
POLL_SECONDS = POLL_MS / 1000
STOP_SECONDS = 5.0


class Wake:
    """The waiting of a claim loop; this form knows of no hints and only polls."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._called = threading.Event()
        self._interval = FIRST_LOOK_SECONDS
        self._due: list[float] = []
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin to receive hints."""

    def stop(self) -> None:
        """End receiving hints."""

    def call(self) -> None:
        """End the wait now, from any thread."""
        self._called.set()

    def at(self, moment: float) -> None:
        """Make a wait end at a moment of the monotonic clock, because a job this worker knows of is due
        then."""
        with self._lock:
            heapq.heappush(self._due, moment)
        self._called.set()

    def found_work(self) -> None:
        """Look closely again: where there was work there may be more."""
        self._interval = FIRST_LOOK_SECONDS

    def wait(self, next_due: float = float("inf")) -> bool:
        """Wait for a hint, a known moment, the next look, or the moment at which the last look saw that a job
        will be due; return whether anything happened of late."""
        moment = time.monotonic()
        until, self._interval = moment + self._interval, min(self._interval * 3, POLL_SECONDS)
        until = min(until, next_due)
        with self._lock:
            while self._due and self._due[0] <= moment:
                heapq.heappop(self._due)
            if self._due:
                until = min(until, self._due[0])
        self._wait_until(until)
        called = self._called.is_set()
        self._called.clear()
        return called or self._interval < POLL_SECONDS or time.monotonic() >= next_due

    def _wait_until(self, moment: float) -> None:
        self._called.wait(max(0.0, moment - time.monotonic()))


class NotifiedWake(Wake):
    """Woken by LISTEN, on a connection and in a thread of its own. While that is down, polling goes on.

    A connection can die without a sign. So a silent one is asked every few seconds whether it still listens,
    and replaced when the answer does not come; then the worker looks at once, since it cannot know what it
    was not told meanwhile.
    """

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="sqlq-listen", daemon=True)

    def start(self) -> None:
        self._bell, self._ring = socket.socketpair()
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._ring.close()  # which the selector takes for readable
        if self._thread.is_alive():
            self._thread.join(STOP_SECONDS)
        self._bell.close()

    def _listen(self) -> None:
        outage = Outage("listening for notifications")
        listening: Database | None = None
        while not self._stopping.is_set():
            try:
                # made here: which schema to listen for may have to be asked of the database
                listening = listening or self._database.for_listening()
                with listening.patience, listening.connect(isolation_level="AUTOCOMMIT") as conn:
                    try:
                        if not self._can_listen(conn):
                            break
                        cluster.listen(conn)
                        outage.over()
                        self._hinted()
                        self._receive(conn)
                        break
                    finally:
                        conn.invalidate()  # a listening connection must not return to the pool
            # also the driver's own, since SQLAlchemy is not in between when hints are read
            except Exception as error:
                self._stopping.wait(outage.met(error))
        if listening is not None:
            listening.close()

    def _can_listen(self, conn: Connection) -> bool:
        """Whether the driver passes on notifications, and the session is this connection's own, as far as can
        be told.

        A pooler gives out a session's number of its own. A URL that is named for it is trusted to carry
        LISTEN.
        """
        driver: Any = conn.connection.driver_connection
        if not callable(getattr(driver, "notifies", None)):
            return False  # psycopg2: polling suffices
        named = self._database.address is not None and self._database.address.listen_url is not None
        if named or leads_to_one_server(driver):
            return True
        log.info(
            "the connection leads through a pooler, which may not carry LISTEN: looking for new jobs each "
            "%s; "
            "to be told of them at once, name a direct connection in SQLQ_LISTEN_URL",
            readable(POLL_MS),
            extra={"event": "polling"},
        )
        return False

    def _receive(self, conn: Connection) -> None:
        """Pass on hints until stopped, or LISTEN proves to be of no use; raises when the connection breaks or
        does not answer."""
        driver: Any = conn.connection.driver_connection
        with selectors.DefaultSelector() as selector:
            selector.register(driver.fileno(), selectors.EVENT_READ)
            selector.register(self._bell, selectors.EVENT_READ)
            ping_at = time.monotonic() + LISTEN_PING_SECONDS
            while True:
                selector.select(max(0.0, ping_at - time.monotonic()))
                if self._stopping.is_set():
                    return
                if time.monotonic() >= ping_at:  # guard: listen-is-pinged
                    if not cluster.listens(conn):
                        log.warning(
                            "the URL to listen at leads through a pooler that does not carry LISTEN: "
                            "looking for new jobs each %s; "
                            "name a direct connection in SQLQ_LISTEN_URL",
                            readable(POLL_MS),
                            extra={"event": "polling"},
                        )
                        return
                    self.call()  # a hint that came with the answer may have been passed over
                    ping_at = time.monotonic() + LISTEN_PING_SECONDS
                if any(True for _ in driver.notifies(timeout=0)):
                    self._hinted()

    def _hinted(self) -> None:
        self._interval = min(self._interval, LOOK_AFTER_HINT_SECONDS)
        self._called.set()


class WatchingWake(Wake):
    """Woken by SQLite's data_version, looked at more and more rarely while nothing happens.

    It changes when something is committed, never before; so one look at the tables suffices each time.
    """

    SHORTEST_SECONDS, LONGEST_SECONDS = 0.001, 0.05

    _pause = SHORTEST_SECONDS

    def found_work(self) -> None:
        self._pause = self.SHORTEST_SECONDS

    def start(self) -> None:
        self._connection = sqlite3.connect(
            self._database.engine.url.database or "",
            check_same_thread=False,
            isolation_level=None,
            uri=self._is_uri(),
        )
        self._version = self._data_version()

    def stop(self) -> None:
        self._connection.close()

    def _is_uri(self) -> bool:
        return (self._database.engine.url.database or "").startswith("file:")

    def _data_version(self) -> int:
        return int(self._connection.execute("PRAGMA data_version").fetchone()[0])

    def _wait_until(self, moment: float) -> None:
        while (left := moment - time.monotonic()) > 0:
            if self._called.wait(min(self._pause, left)):
                return
            version = self._data_version()
            if version != self._version:
                self._version = version
                self._called.set()
                return
            self._pause = min(self._pause * 1.05, self.LONGEST_SECONDS)


def wake_for(database: Database) -> Wake:
    """Return the waiting that suits a database."""
    return {"postgresql": NotifiedWake, "sqlite": WatchingWake}.get(database.engine.dialect.name, Wake)(
        database
    )
