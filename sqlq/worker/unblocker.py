"""Unblocks, after each settle's commit, what waits for the jobs that have ended there.

In a thread of its own, which is started by the first step that this worker ends: a worker that meets no flow
has none, and sends nothing. While one unblock is under way the next jobs gather.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue

from sqlq.store import cluster, unblock
from sqlq.store.database import Database
from sqlq.worker.grace import ended
from sqlq.worker.outage import AWAY, Outage, begins

log = logging.getLogger("sqlq.worker")

LARGEST_BATCH = 1_000
FAILED_SECONDS = 1.0


class Unblocker:
    """Unblocks for one worker."""

    def __init__(self, database: Database, freed: Callable[[], None], done: Callable[[], None]) -> None:
        """`freed` is called when steps have become available, `done` when nothing is left to look at."""
        self._database = database.for_claims
        self._notifying = database
        self._freed = freed
        self._done = done
        self._ended: SimpleQueue[int | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._owed = 0
        """How many jobs have been handed in and not been looked after."""
        self._thread: threading.Thread | None = None
        self._abandoned = threading.Event()

    def ended(self, ids: Iterable[int]) -> None:
        """Take jobs that have ended, and whose ends are committed; returns at once."""
        ids = list(ids)
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="sqlq-unblock", daemon=True)
                if not begins(thread):
                    return  # a sweep does it, and the next call tries again
                self._thread = thread
            self._owed += len(ids)
        for id in ids:
            self._ended.put(id)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to look at, so that a claim sees all that this worker has unblocked."""
        return self._owed == 0

    def finish(self, patience: Callable[[], float]) -> None:
        """Look at what there is and end, while there is `patience`, in seconds; what is left is for a
        sweep."""
        if self._thread is None:
            return
        self._ended.put(None)
        ended(self._thread, patience)

    def abandon(self, seconds: float) -> None:
        """Leave what is left to a sweep, and end, within so many seconds."""
        self._abandoned.set()
        self.finish(lambda: 0.0)
        if self._thread is not None:
            self._thread.join(seconds)

    # -- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        outage = Outage("unblocking jobs", self._database)
        waiting: list[int] = []
        gathering = True
        while (gathering or waiting) and not self._abandoned.is_set():
            if gathering:
                gathering = self._gather(waiting)
            if not waiting:
                continue
            try:
                self._unblock(waiting)
                outage.over()
            except AWAY as error:
                self._abandoned.wait(outage.met(error))
                continue
            except Exception:
                log.exception("unblocking failed; trying again")
                self._abandoned.wait(FAILED_SECONDS)
                continue
            with self._lock:
                self._owed -= len(waiting)
            waiting.clear()
            if self._owed == 0:
                self._done()

    def _gather(self, waiting: list[int]) -> bool:
        """Add the jobs that have come, waiting for one where there is none; return False when no more will
        come."""
        try:
            while len(waiting) < LARGEST_BATCH:
                id = self._ended.get(block=not waiting)
                if id is None:
                    return False
                waiting.append(id)
        except Empty:
            pass
        return True

    def _unblock(self, ended: list[int]) -> None:
        done = unblock.after(self._database, ended)
        if done.free:
            self._freed()
            tell_idle(self._notifying)


def tell_idle(database: Database) -> None:
    """Have idle workers look at once; by themselves they would within a second."""
    if database.dialect.notifies:
        try:
            cluster.notify(database)
        except Exception as error:
            log.debug("a hint to idle workers was not sent: %s", error)
