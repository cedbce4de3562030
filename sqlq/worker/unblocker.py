"""Unblocks, after each settle's commit, what waits for the jobs that have ended there.

In a thread of its own, which is started by the first step that this worker ends: a worker that meets no flow
has none, and sends nothing. While one unblock is under way the next jobs gather.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from sqlq.store import cluster, unblock
from sqlq.store.database import Database
from sqlq.worker.gather import Gatherer

log = logging.getLogger("sqlq.worker")


class Unblocker(Gatherer[int]):
    """Unblocks for one worker."""

    def __init__(self, database: Database, freed: Callable[[], None], done: Callable[[], None]) -> None:
        """`freed` is called when steps have become available, `done` when nothing is left to look at."""
        super().__init__("sqlq-unblock", "unblocking jobs", database.for_claims)
        self._notifying = database
        self._freed = freed
        self._done = done
        self._owed = 0
        """How many jobs have been handed in and not been looked after."""
        self._pending: list[int] = []

    def ended(self, ids: Iterable[int]) -> None:
        """Take jobs that have ended, and whose ends are committed; returns at once. Where no thread is to be
        had, and of what is left at the end, a sweep takes care."""
        ids = list(ids)
        with self._changed:
            if not self._begin():
                return
            self._owed += len(ids)
        for id in ids:
            self._items.put(id)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to look at, so that a claim sees all that this worker has unblocked."""
        return self._owed == 0

    def _add(self, item: int) -> None:
        self._pending.append(item)

    def _write(self) -> None:
        if unblock.after(self._database, self._pending).free:
            self._freed()
            tell_idle(self._notifying)
        with self._changed:
            self._owed -= len(self._pending)
        self._pending.clear()
        if self._owed == 0:
            self._done()


def tell_idle(database: Database) -> None:
    """Have idle workers look at once; by themselves they would within a second."""
    if database.dialect.notifies:
        try:
            cluster.notify(database)
        except Exception as error:
            log.debug("a hint to idle workers was not sent: %s", error)
