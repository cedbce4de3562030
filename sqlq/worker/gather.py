"""Threads of a worker that begin when they are needed, and those of them that write in batches."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sized
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from sqlq.database.database import Database
from sqlq.worker.outage import AWAY, Outage, begins

log = logging.getLogger("sqlq.worker")

LOOK_SECONDS = 0.1
STOP_SECONDS = 5.0
T = TypeVar("T")


class Threaded:
    """A part of a worker with a thread, which begins when it is needed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._abandoned = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin the thread now. Raises `RuntimeError` where it cannot start."""
        with self._changed:
            if not self._begin():
                raise RuntimeError(f"the thread {self._name} cannot be started")

    def finish(self, patience: Callable[[], float]) -> bool:
        """Let the thread finish its work and end. Return whether it has, before `patience` returned 0
        seconds."""
        thread = self._thread
        if thread is None:
            return True
        self._close()
        while thread.is_alive() and (seconds := patience()) > 0:
            thread.join(min(seconds, LOOK_SECONDS))
        return not thread.is_alive()

    def abandon(self, seconds: float = STOP_SECONDS) -> None:
        """End the thread within so many seconds, whatever is left."""
        self._abandoned.set()
        if self._thread is not None:
            self._close()
            self._thread.join(seconds)

    def _begin(self) -> bool:
        """Begin the thread. Return False where it cannot start now; the next call tries again. Call this with
        the lock."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            if not begins(thread):
                return False
            self._thread = thread
        return True

    def _close(self) -> None:
        """Notify the thread that no more will come, or that it is abandoned."""
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        raise NotImplementedError


class Gatherer(Threaded, Generic[T]):
    """Writes items in batches: while one batch is written the next one gathers."""

    LARGEST_BATCH = 1_000
    _pending: Sized
    _database: Database

    def __init__(self, name: str, doing: str, database: Database | None) -> None:
        super().__init__(name)
        self._doing = doing
        if database is not None:
            self._database = database
        self._outage = Outage(doing, database)
        self._items: SimpleQueue[T | None] = SimpleQueue()

    def _close(self) -> None:
        self._items.put(None)

    def _add(self, items: list[T]) -> None:
        """Add items to the pending ones."""
        raise NotImplementedError

    def _write(self) -> None:
        """Write the pending items, and take out those that need no other try."""
        raise NotImplementedError

    def _is_due(self) -> bool:
        """Whether there is something to write now."""
        return bool(self._pending)

    def _patience(self) -> float | None:
        """Return for how many seconds to wait for an item; None for as long as it takes."""
        return None

    def _failed(self, error: Exception) -> float:
        """Note that a batch could not be written; return in how many seconds to try again."""
        if isinstance(error, AWAY):
            return self._outage.met(error)
        return self._outage.failed(error)

    def _run(self) -> None:
        gathering = True
        while (gathering or self._pending) and not self._abandoned.is_set():
            if gathering:
                gathering = self._gather()
            if not self._is_due():
                continue
            try:
                self._write()
                self._outage.over()
            except Exception as error:
                self._abandoned.wait(self._failed(error))

    def _gather(self) -> bool:
        """Add the items that have come, waiting for one where none is pending; return False when no more will
        come."""
        items: list[T] = []
        room = self.LARGEST_BATCH - len(self._pending)
        try:
            while len(items) < room:
                waits = not (items or self._pending)
                item = self._items.get(waits, self._patience() if waits else None)
                if item is None:
                    return False
                items.append(item)
        except Empty:
            pass
        finally:
            self._add(items)
        return True
