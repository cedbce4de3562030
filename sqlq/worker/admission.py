"""Admits, for one worker, jobs that wait in the lines of limits: after each settle that gave a slot back, and
when a wake is due.

In a thread of its own, which is started by the first sign that there are limits: one that the App
declares, or a job that is under one. A worker that meets none has no such thread, and sends nothing. While
one admission is under way the next keys gather.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection

from sqlalchemy.exc import DBAPIError

from sqlq.settings import POLL_MS
from sqlq.store import limits
from sqlq.store.database import Database, MissingFileError
from sqlq.worker.gather import FAILED_SECONDS, Threaded
from sqlq.worker.outage import AWAY, Outage
from sqlq.worker.unblocker import tell_idle

log = logging.getLogger("sqlq.worker")

POLL_SECONDS = POLL_MS / 1000
LOOK_SECONDS = 0.02
"""So far apart are two looks at wakes that nothing but a hint asks for."""


class Admissions(Threaded):
    """Admits for one worker."""

    def __init__(
        self,
        database: Database,
        freed: Callable[[list[float]], None],
        done: Callable[[], None],
        *,
        in_use: bool,
    ) -> None:
        """`freed` is called when jobs have been admitted, with the moments of the monotonic clock at which
        they may start, where that is not at once; `done` when nothing is left to look at. `in_use` where it
        is known that there are limits."""
        super().__init__("sqlq-admit")
        self._database = database.for_claims
        self._outage = Outage("admitting jobs", database)
        self._notifying = database
        self._freed = freed
        self._done = done
        self._in_use = in_use
        self._served = limits.Served(POLL_SECONDS)
        self._keys: set[str] = set()
        self._hinted = in_use
        self._busy = False
        self._closing = False
        self._look_at = float("-inf")
        """When to look at wakes."""
        self._looked_at = float("-inf")

    def start(self) -> None:
        if self._in_use:
            with self._changed:
                self._begin()  # or later, where no thread is to be had now

    def ended(self, keys: Collection[str]) -> None:
        """Take the keys of which a slot was given back, and that is committed; returns at once."""
        with self._changed:
            self._in_use = True
            self._keys.update(keys)
            self._changed.notify_all()
            self._begin()

    def look(self) -> None:
        """Look at wakes soon, since something happened; returns at once."""
        if self._in_use and not (self._hinted and self._thread):
            with self._changed:
                self._hinted = True
                self._changed.notify_all()
                self._begin()  # guard: admissions-begin-when-they-can

    def look_now(self) -> bool:
        """Admit what may run by all wakes that are due, for a worker that is about to leave; return whether
        anything was, or may be, since the database is away."""
        admitted = False
        more: set[str] = set()
        try:
            while True:
                # guard: drain-awaits-admissions
                done = limits.look(self._database, more, served=self._served)
                admitted = admitted or done.number > 0
                more = done.more
                if not (more or done.more_wakes):
                    return admitted
        except MissingFileError:
            return True
        except DBAPIError as error:
            dialect = self._database.dialect
            if dialect.is_away(error) or dialect.rolled_back(error):
                log.debug("admitting jobs failed: %s", error)
                return True
            log.warning("it was not seen whether jobs wait in the lines of limits: %s", error.orig)
            return False

    @property
    def is_idle(self) -> bool:
        """Whether no key is left to look at, so that a claim sees all that this worker has admitted."""
        return not (self._keys or self._busy)

    # -- the thread ------------------------------------------------------------------------------------------

    def _begin(self) -> bool:
        return not self._closing and super()._begin()

    def _close(self) -> None:
        self._closing = True
        super()._close()

    def _run(self) -> None:
        keys: set[str] = set()
        while not self._abandoned.is_set():
            if not self._gather(keys):
                return
            try:
                self._admit(keys)
                self._outage.over()
            except AWAY as error:
                self._abandoned.wait(self._outage.met(error))
            except Exception:
                log.exception("admitting jobs failed; trying again")
                self._abandoned.wait(FAILED_SECONDS)

    def _gather(self, keys: set[str]) -> bool:
        """Add the keys that have come, waiting until there is one, or until wakes are to be looked at; return
        False when there is nothing left to do."""
        with self._changed:
            self._busy = bool(keys)
            if not keys and not self._keys:
                self._done()
            while not (keys or self._keys):
                if self._closing:
                    return False
                moment = time.monotonic()
                if self._hinted:
                    self._look_at = min(self._look_at, max(moment, self._looked_at + LOOK_SECONDS))
                if moment >= self._look_at:
                    break
                self._changed.wait(min(self._look_at - moment, POLL_SECONDS))
            for key in sorted(self._keys)[: max(0, limits.KEYS_AT_ONCE - len(keys))]:
                self._keys.discard(key)
                keys.add(key)
            self._hinted = False
            self._busy = True
            return True

    def _admit(self, keys: set[str]) -> None:
        moment = time.monotonic()
        done = limits.look(self._database, keys, served=self._served)
        keys.clear()
        keys.update(done.more)
        self._looked_at = moment
        if done.number:
            self._freed([moment + ms / 1000 for ms in done.starts_ms])
            tell_idle(self._notifying)
        if done.more_wakes:
            self._look_at = moment
        elif not (keys or self._keys):
            due_ms = limits.next_wake_ms(self._database)
            wait = POLL_SECONDS if due_ms is None else min(max(0.0, due_ms) / 1000, POLL_SECONDS)
            self._look_at = time.monotonic() + wait
