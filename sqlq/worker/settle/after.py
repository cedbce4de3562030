"""Unblocks, after each settle's commit, the steps that wait for the jobs that have ended there.

Its thread begins with the first step that this worker ends: a worker without flows has none. While one
unblock is under way the next jobs gather."""

from __future__ import annotations

from collections.abc import Collection
from time import monotonic

from sqlalchemy.exc import DBAPIError

from sqlq.config.constants import POLL_MS
from sqlq.database.database import Database
from sqlq.errors import MissingFileError
from sqlq.store.flows import unblock
from sqlq.store.limits import admit
from sqlq.store.workers import notify
from sqlq.worker.run.signals import Signals
from sqlq.worker.threads.log import log
from sqlq.worker.threads.loop import IDLE_SECONDS, Loop, Outage, passing_over

LARGEST_BATCH = 1_000


class Unblocker(Loop):
    """Unblocks for one worker."""

    def __init__(self, database: Database, signals: Signals) -> None:
        super().__init__("sqlq-unblock", Outage("unblocking jobs", database.for_claims))
        self._database, self._notifying = database.for_claims, database
        self._signals = signals
        self._ids: list[int] = []

    def ended(self, ids: Collection[int]) -> None:
        """Take jobs that have ended, and whose ends are committed; returns at once. A sweep handles jobs for
        which no thread can start, and those left at the end."""
        if self.begin():
            with self._lock:
                self._ids += ids
            self.wake()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to look at, so that a claim sees all that this worker has unblocked."""
        return not self._ids

    def _turn(self) -> float:
        if ids := self._ids[:LARGEST_BATCH]:
            if unblock.after(self._database, ids).free:
                self._signals.work_freed()
                tell_idle(self._notifying)
            with self._lock:
                del self._ids[: len(ids)]
            self._outage.over()
            if self.is_idle:
                self._signals.followed()
        return 0.0 if self._ids else IDLE_SECONDS


def tell_idle(database: Database) -> None:
    """Have idle workers look at once. Without this they would within a second."""
    if database.dialect.notifies:
        with passing_over("a hint to idle workers was not sent"):
            notify.notify(database)


POLL_SECONDS = POLL_MS / 1000
LOOK_SECONDS = 0.02
"""The shortest time between two looks at wakes that only a notification caused."""


class Admissions(Loop):
    """Admits for one worker, by the keys of released slots and by wakes."""

    _hinted = _busy = False
    _look_at = _looked_at = float("-inf")
    """When to look at wakes, and when the last look began."""

    def __init__(self, database: Database, signals: Signals, *, in_use: bool) -> None:
        """`in_use` is True where limits are known to exist."""
        super().__init__("sqlq-admit", Outage("admitting jobs", database.for_claims))
        self._database, self._notifying = database.for_claims, database
        self._signals = signals
        self._in_use = in_use
        self._served = admit.Served(POLL_SECONDS)
        self._keys: list[str] = []

    def start(self) -> None:
        if self._in_use:
            self.begin()  # or later, where no thread can start now

    def ended(self, keys: Collection[str]) -> None:
        """Take keys of which a slot was released, in a transaction that is committed. Returns at once."""
        with self._lock:
            self._in_use = True
            self._keys += keys
        self.begin()
        self.wake()

    def look(self) -> None:
        """Look at wakes soon, since something happened; returns at once."""
        # guard: admission-thread-start-is-retried
        if self._in_use and not self._hinted and self.begin():
            self._hinted = True
            self.wake()

    def look_now(self) -> bool:
        """Admit by all wakes that are due, for a worker that is about to leave. Return whether a job was
        admitted, or may be, since the database is away."""
        admitted = False
        more: set[str] = set()
        try:
            while True:
                # guard: drain-awaits-admissions
                done = admit.look(self._database, more, served=self._served)
                admitted = admitted or done.number > 0
                more = done.more
                if not (more or done.more_wakes):
                    return admitted
        except MissingFileError:
            return True
        except DBAPIError as error:
            dialect = self._database.dialect
            if dialect.driver.trouble(error).passes:
                log.debug("admitting jobs failed: %s", error)
                return True
            log.warning("it was not seen whether jobs wait in the lines of limits: %s", error.orig)
            return False

    @property
    def is_idle(self) -> bool:
        """Whether no key is left to look at, so that a claim sees all that this worker has admitted."""
        return not (self._keys or self._busy)

    # -- the thread ------------------------------------------------------------------------------------------

    def _turn(self) -> float:
        if self._hinted:
            self._hinted = False
            self._look_at = min(self._look_at, max(monotonic(), self._looked_at + LOOK_SECONDS))
        if self._keys or monotonic() >= self._look_at:
            self._busy = True
            try:
                self._admit()
            finally:
                self._busy = False
            self._outage.over()
            if self.is_idle:
                self._signals.followed()
        return 0.0 if self._keys else min(max(0.0, self._look_at - monotonic()), POLL_SECONDS)

    def _admit(self) -> None:
        now, keys = monotonic(), self._keys[: admit.KEYS_AT_ONCE]
        done = admit.look(self._database, sorted({*keys}), served=self._served)
        with self._lock:
            self._keys[: len(keys)] = done.more
        self._looked_at = now
        if done.number:
            for ms in done.starts_ms or [0.0]:  # when those start that do not start at once
                self._signals.due_at(now + ms / 1000)
            tell_idle(self._notifying)
        if done.more_wakes:
            self._look_at = now
        elif not self._keys:
            due_ms = admit.next_wake_ms(self._database)
            wait = POLL_SECONDS if due_ms is None else min(max(0.0, due_ms) / 1000, POLL_SECONDS)
            self._look_at = monotonic() + wait
