"""Notifies idle workers that there may be work. A notification is never a promise.

Polling alone is enough for everything but latency, so a notification may be lost, late or early. But it must
not cost the producers. A NOTIFY in the caller's transaction makes commits wait for each other and forbids
two-phase commit. So a thread of its own sends it, on a connection of its own, when a transaction that
enqueued has committed. One notification stands for all commits of the last few milliseconds.

Nothing reports the commit of a transaction on a driver's own connection. The same thread looks at the
connection's state, without a round trip to the server, until the transaction is over. It gives up once an
idle worker has polled by itself.

One kind of job takes its notification along. It is enqueued in a transaction of sqlq's own, a while after the
last notification. Then there are no other commits that would wait.
"""

from __future__ import annotations

import atexit
import time
import weakref
from contextlib import suppress
from typing import Any

from sqlq.config.background import Background
from sqlq.database.database import Database
from sqlq.database.pool import is_in_transaction
from sqlq.store.workers import notify

DEBOUNCE_SECONDS, STREAM_DEBOUNCE_SECONDS = 0.005, 0.04
"""The shortest time between two notifications, alone and in a stream: workers that find jobs look again by
themselves."""
STREAM_JOBS, STREAM_PER_SECOND = 5, 250
"""A stream begins with STREAM_JOBS jobs between two notifications, and ends with fewer than
STREAM_PER_SECOND."""
QUIET_SECONDS = 3 * DEBOUNCE_SECONDS
"""After this time without a job enqueued alone, the next takes its notification along."""
WATCH_SECONDS, FIRST_WATCH_SECONDS, MAX_WATCH_SECONDS = 1.0, 0.001, 0.02
"""For how long a driver's connection is looked at, until its transaction is over, and with which pauses.
After that the workers' own looks have to do, which are as far apart."""
LAST_WORDS_SECONDS = 0.5
"""How long a process that ends waits for its last notification to leave."""


class Notifier(Background):
    """Notifies the workers of a database. It does nothing where workers see commits by themselves (SQLite),
    and reaches only those of this machine where the database sends no notifications (MariaDB)."""

    thread_name = "sqlq-notify"

    def __init__(self, database: Database) -> None:
        self._database = database.for_loops
        self.notifies = database.dialect.notifies
        """Whether the database sends notifications."""
        self.are_needed = not database.dialect.in_a_file
        """Whether workers do not see commits by themselves."""
        super().__init__()
        if self.are_needed:
            atexit.register(_finish, weakref.ref(self))

    def begin_anew(self) -> None:
        super().begin_anew()
        self._requests = 0
        """For how many transactions a notification is still to be sent."""
        self._resting = False
        """Whether the thread pauses, and will see by itself that a notification is wanted."""
        self._watched: dict[int, tuple[Any, float]] = {}
        """The connections of drivers on which a job waits for the commit, and until when to look at them."""
        self._pause = FIRST_WATCH_SECONDS
        self._last_at = float("-inf")

    def connect(self) -> None:
        """Begin the thread, which takes a connection, before there is anything to send."""
        if self._thread is None:
            with self._changed:
                self._begin()

    def at_the_end_of(self, driver: Any) -> None:
        """Notify when the transaction that is open on a driver's connection is over, whether it was committed
        or not."""
        if not self.are_needed:
            return
        with self._changed:
            known = bool(self._watched)
            self._watched[id(driver)] = (driver, time.monotonic() + WATCH_SECONDS)
            self._pause = FIRST_WATCH_SECONDS
            self._begin()
            if not known:  # else it looks by itself, soon
                self._changed.notify_all()

    def takes_along(self) -> bool:
        """Whether the transaction about to begin should notify by itself, since there was no notification for
        a while."""
        last_at, self._last_at = self._last_at, time.monotonic()
        return self._last_at - last_at > QUIET_SECONDS

    def send(self) -> None:
        """Notify soon, from the notifier's thread; returns at once."""
        with self._changed:
            known = self._requests or self._resting
            self._requests += 1
            if self._thread is None:
                self._begin()
            # to wake the thread for each of many commits would cost the producers more than their
            # notifications
            if not known:
                self._changed.notify_all()

    def _begin(self) -> None:
        with suppress(RuntimeError):  # workers look for themselves
            super()._begin()

    def _run(self) -> None:
        rest = DEBOUNCE_SECONDS
        if self.notifies:
            with suppress(Exception), self._database.read():
                pass  # but connect, which takes ten times as long as a NOTIFY
        while True:
            with self._changed:
                while not self._requests and not self._closing:
                    self._changed.wait(self._pause if self._watched else None)
                    self._look()
                if not self._requests:
                    self._thread = None
                    return
                self._requests = 0
            with suppress(Exception):  # the jobs are committed, and workers look for themselves
                notify.notify(self._database)
            with self._changed:
                self._resting = True
                self._changed.wait_for(lambda: self._closing, rest)
                self._resting = False
                streams = self._requests >= max(STREAM_JOBS, rest * STREAM_PER_SECOND)
                rest = STREAM_DEBOUNCE_SECONDS if streams else DEBOUNCE_SECONDS

    def _look(self) -> None:
        """Request a notification for each watched connection whose transaction is over."""
        now = time.monotonic()
        for key, (driver, until) in list(self._watched.items()):
            over = not is_in_transaction(driver)
            if over or now > until:
                del self._watched[key]
                self._requests += over
        self._pause = min(self._pause * 1.5, MAX_WATCH_SECONDS)


def _finish(reference: weakref.ref[Notifier]) -> None:
    notifier = reference()
    if notifier is not None:
        notifier.close(LAST_WORDS_SECONDS)
