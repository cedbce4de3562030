"""When an idle worker looks for work again: soon after anything happened, then ever more rarely, at least
each second.

A notification only makes the next look come sooner. On PostgreSQL a producer sends it (sqlq.enqueue.notify),
and the poller passes it on. On SQLite it is `PRAGMA data_version`, which shows a commit without reading a
page."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from math import inf
from time import monotonic
from typing import Any

from sqlq.config.constants import POLL_MS
from sqlq.database.database import Database
from sqlq.errors import MissingFileError

FIRST_LOOK_SECONDS = 0.002
LOOK_AFTER_HINT_SECONDS = 0.02
"""A notification seldom overtakes the COMMIT that it announces. A look that found nothing is repeated after
this time."""
POLL_SECONDS = POLL_MS / 1000
CLOSE_SECONDS = 0.05
"""A worker with a poller rests when it has waited for this time in vain."""


class Wake:
    """The waiting of a claim loop. A poller wakes it, and also looks while nothing happens. Without these
    looks the worker polls."""

    def __init__(self, database: Database, is_watched: Callable[[], bool] = lambda: False) -> None:
        """`is_watched` returns whether a poller looks."""
        self._database = database
        self._is_watched = is_watched
        self._interval = self._waited = FIRST_LOOK_SECONDS
        self._called = threading.Event()
        self._due_at = inf
        """When the next job that this worker knows is due. After it a look sees the others."""
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin to watch for commits, where no poller does."""

    def stop(self) -> None:
        """Watch no more."""

    def call(self) -> None:
        """End the wait now, from any thread."""
        self._called.set()

    def hinted(self) -> None:
        """End the wait now: there may be work, or will be soon."""
        self._interval = min(self._interval, LOOK_AFTER_HINT_SECONDS)
        self._called.set()

    def at(self, due_at: float) -> None:
        """End a wait at a time of the monotonic clock, because a job that this worker knows is due then."""
        with self._lock:
            self._due_at = min(self._due_at, due_at)
        self._called.set()

    def note_work(self) -> None:
        """Look closely again: where there was work there may be more."""
        self._interval = FIRST_LOOK_SECONDS

    def wait(self, next_due: float = inf) -> bool:
        """Wait for a notification, a known time, the next look, or the time at which the last look saw a job
        due. Return whether anything happened of late."""
        now = monotonic()
        self._waited = self._interval
        with self._lock:
            if self._due_at <= now:
                self._due_at = inf
            until = min(now + self._interval, next_due, self._due_at)
        self._interval = min(self._interval * 3, POLL_SECONDS)
        self._wait_until(until)
        called = self._called.is_set()
        if called:  # a call that comes only now is for the next wait; guard: wake-during-a-wait-is-kept
            self._called.clear()
        max_wait = CLOSE_SECONDS if self._is_watched() else POLL_SECONDS
        return called or self._interval < max_wait or monotonic() >= next_due

    def commits(self) -> int | None:
        """Return a number that changes with each commit of other connections; None where a poller finds such
        commits. For the thread that waits."""
        return None

    @property
    def is_resting(self) -> bool:
        """Whether nothing has happened of late, and a poller calls when something does."""
        return self._waited >= CLOSE_SECONDS and self._is_watched()

    def _wait_until(self, end: float) -> None:
        self._called.wait(max(0.0, end - monotonic()))


class WatchingWake(Wake):
    """Woken by SQLite's data_version, looked at more and more rarely while nothing happens.

    It changes when something is committed, never before; so one look at the tables suffices each time.
    """

    MIN_WAIT_SECONDS, MAX_WAIT_SECONDS = 0.001, 0.05

    _pause = MIN_WAIT_SECONDS
    max_wait_seconds = MAX_WAIT_SECONDS
    _connection: sqlite3.Connection | None = None
    _version = 0

    def note_work(self) -> None:
        self._pause = self.MIN_WAIT_SECONDS

    def start(self) -> None:
        self._version = self._data_version()

    def stop(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def commits(self) -> int | None:
        return self._data_version()

    def _data_version(self) -> int:
        """Return the current number, or the last one where the database does not answer. Then the look at the
        tables, once a second, decides."""
        try:
            self._database.mind_the_file()
            if self._connection is None:
                engine = self._database.engine
                (file,), arguments = engine.dialect.create_connect_args(engine.url)
                options: dict[str, Any] = {**arguments, "check_same_thread": False, "isolation_level": None}
                self._connection = sqlite3.connect(file, **options)
            return int(self._connection.execute("PRAGMA data_version").fetchone()[0])
        except (sqlite3.Error, MissingFileError):  # guard: wait-survives-a-disk-error
            return self._version

    def _wait_until(self, end: float) -> None:
        while (left := end - monotonic()) > 0:
            if self._called.wait(min(self._pause, left)):
                return
            version = self._data_version()
            if version != self._version:
                self._version = version
                self._called.set()
                return
            self._pause = min(self._pause * 1.05, self.max_wait_seconds)


def wake_for(database: Database, is_watched: Callable[[], bool], poll_ms: int | None = None) -> Wake:
    """Return the waiting that suits a database. `is_watched` returns whether a poller looks."""
    if not database.dialect.in_a_file:
        return Wake(database, is_watched)
    wake = WatchingWake(database)
    if poll_ms is not None:
        wake.max_wait_seconds = poll_ms / 1000
    return wake
