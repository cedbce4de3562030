"""Frees, after each settle's commit, the jobs that wait for what has ended there.

Each reason to wait has a thread, which begins with the first job that others may wait for. A worker without
flows and limits has none. While one batch is freed the next keys gather."""

from __future__ import annotations

import threading
from collections.abc import Collection
from time import monotonic
from typing import Any

from sqlq.config.constants import POLL_MS
from sqlq.database.database import Database
from sqlq.errors import MissingFileError
from sqlq.model.job import ClaimedJob
from sqlq.store.blockers import Blocker
from sqlq.store.workers import notify
from sqlq.worker.decide import Signals
from sqlq.worker.threads.log import log
from sqlq.worker.threads.loop import AWAY, IDLE_SECONDS, Loop, Outage, passing_over

KEYS_AT_ONCE = 500
LOOK_SECONDS = 0.02
"""The shortest time between two looks at wakes that only a notification caused."""


class Unblocker(Loop):
    """Frees for one worker the jobs that wait for one reason, by keys and by wakes."""

    _hinted = False
    _look_at = _look_began_at = float("-inf")
    """When to look at wakes, and when the last look began."""

    def __init__(self, blocker: Blocker, database: Database, signals: Signals, *, in_use: bool) -> None:
        """`in_use` is True where the App declares that jobs wait for this reason."""
        activity = f"freeing jobs blocked by their {blocker.name}"
        super().__init__(f"sqlq-{blocker.name}", Outage(activity, database.for_claims))
        self.blocker, self._activity = blocker, activity
        fields = ClaimedJob._fields
        self.waited_for = None if blocker.waited_for is None else fields.index(blocker.waited_for)
        self.key, self.until_end = fields.index(blocker.key), blocker.until_end
        self._database, self._notifying = database.for_claims, database
        self._signals = signals
        self._has_wakes = in_use and blocker.has_wakes
        """Whether wakes are known to exist."""
        self._keys: list[Any] = []
        self._looking = threading.Lock()

    def start(self) -> None:
        if self._has_wakes:
            self.begin()  # or later, where no thread can start now

    def ended(self, keys: Collection[Any]) -> None:
        """Take keys of jobs whose outcomes are committed; returns at once. A sweep handles those for which no
        thread can start, and those left at the end."""
        self._has_wakes = self.blocker.has_wakes
        if self.begin():
            with self._lock:
                self._keys += keys
            self.wake()

    def look(self) -> None:
        """Look at wakes soon, since something happened; returns at once."""
        # guard: admission-thread-start-is-retried
        if self._has_wakes and not self._hinted and self.begin():
            self._hinted = True
            self.wake()

    def look_now(self) -> bool:
        """Free jobs by all wakes that are due, for a worker that is about to leave. Return whether a job was
        freed, or may be, since the database is away."""
        freed = False
        try:
            while self.blocker.has_wakes:
                # it would skip what the thread has locked, and a claim not see it yet
                with self._looking:  # guard: a-last-look-awaits-the-thread
                    # guard: drain-awaits-admissions
                    done = self.blocker.free(self._database, ())
                freed = freed or done.number > 0
                if not done.has_more:
                    break
        except AWAY as error:
            if isinstance(error, MissingFileError) or self._database.dialect.driver.problem(error).passes:
                return True
            log.warning("%s failed, and some may be left: %s", self._activity, error.orig)
        return freed

    @property
    def is_idle(self) -> bool:
        """Whether no key is left to look at, so that a claim sees all that this worker has freed."""
        return not (self._keys or self._looking.locked())

    # -- the thread ------------------------------------------------------------------------------------------

    def _turn(self) -> float:
        if self._hinted:
            self._hinted = False
            self._look_at = min(self._look_at, max(monotonic(), self._look_began_at + LOOK_SECONDS))
        if self._keys or monotonic() >= self._look_at:
            with self._looking:
                self._free()
            self._outage.over()
            if self.is_idle:
                self._signals.settled()
        return 0.0 if self._keys else min(max(0.0, self._look_at - monotonic()), IDLE_SECONDS)

    def _free(self) -> None:
        now, keys = monotonic(), self._keys[:KEYS_AT_ONCE]
        done = self.blocker.free(self._database, sorted({*keys}))
        with self._lock:
            del self._keys[: len(keys)]
        self._look_began_at = now
        if done.number:
            for ms in done.starts_ms or [0.0]:  # when those start that do not start at once
                self._signals.due_at(now + ms / 1000)
            notify_idle(self._notifying)
        if done.has_more:
            self._look_at = now
        elif not self.blocker.has_wakes:
            self._look_at = float("inf")
        elif not self._keys:
            wait_ms = POLL_MS if done.next_ms is None else min(max(0.0, done.next_ms), POLL_MS)
            self._look_at = monotonic() + wait_ms / 1000


def notify_idle(database: Database) -> None:
    """Have idle workers look at once. Without this they would within a second."""
    if database.dialect.notifies:
        with passing_over("a hint to idle workers was not sent"):
            notify.notify(database)
