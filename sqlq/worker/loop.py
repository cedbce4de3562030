"""Threads of a worker. Each takes turns, when they are due or when it is woken; some write in batches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sized
from queue import Empty, SimpleQueue
from typing import ClassVar, Generic, TypeVar

from sqlq.database.database import Database
from sqlq.worker.outage import AWAY, Outage, begins

LOOK_SECONDS = 0.1
STOP_SECONDS = 5.0
T = TypeVar("T")


class Loop:
    """A part of a worker with a thread, which begins when it is needed. An exception of a turn is logged, and
    never ends the thread."""

    _away: tuple[type[Exception], ...] = AWAY
    """The errors of a database that does not answer."""

    _thread: threading.Thread | None = None

    def __init__(self, name: str, outage: Outage) -> None:
        self._name = name
        self._outage = outage
        self._lock = threading.Lock()
        self._woken = threading.Event()
        self._closed = threading.Event()

    def start(self) -> None:
        """Begin the thread now. Raises `RuntimeError` where it cannot start."""
        if not self.begin():
            raise RuntimeError(f"the thread {self._name} cannot be started")

    def begin(self) -> bool:
        """Begin the thread, unless it has begun. Return False where it cannot start now; the next call tries
        again."""
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                if not begins(thread):
                    return False
                self._thread = thread
            return True

    def wake(self) -> None:
        """Have the next turn begin now; any thread may call this."""
        self._woken.set()

    def end(self) -> None:
        """Begin no other turn."""
        self._closed.set()
        self.wake()

    def close(self, seconds: float = STOP_SECONDS) -> None:
        """End the thread, whatever is left, and wait for its last turn, at most so long."""
        self.end()
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        wait = 0.0
        while True:
            self._woken.wait(wait)
            self._woken.clear()
            if self._is_over():
                return
            try:
                wait = self._turn()
            except Exception as error:
                wait = self._failed(error)

    def _is_over(self) -> bool:
        return self._closed.is_set()

    def _turn(self) -> float:
        """Do what is to be done now; return in how many seconds the next turn is due."""
        raise NotImplementedError

    def _failed(self, error: Exception) -> float:
        """Note that a turn has failed; return in how many seconds to try again."""
        if isinstance(error, self._away):
            return self._outage.met(error)
        return self._outage.failed(error)  # guard: a-poller-tells-its-mistakes


class Gatherer(Loop, Generic[T]):
    """Writes items in batches: while one batch is written the next one gathers."""

    LARGEST_BATCH: ClassVar = 1_000
    _pending: Sized

    def __init__(self, name: str, doing: str, database: Database | None = None) -> None:
        super().__init__(name, Outage(doing, database))
        self._items: SimpleQueue[T | None] = SimpleQueue()

    def wake(self) -> None:
        """Notify the thread that no more items will come."""
        self._items.put(None)

    def finish(self, patience: Callable[[], float]) -> bool:
        """Let the thread finish its work and end. Return whether it has, before `patience` returned 0
        seconds."""
        thread = self._thread
        if thread is None:
            return True
        self.wake()
        while thread.is_alive() and (seconds := patience()) > 0:
            thread.join(min(seconds, LOOK_SECONDS))
        return not thread.is_alive()

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

    def _run(self) -> None:
        gathering = True
        while (gathering or self._pending) and not self._closed.is_set():
            if gathering:
                gathering = self._gather()
            if not self._is_due():
                continue
            try:
                self._write()
                self._outage.over()
            except Exception as error:
                self._closed.wait(self._failed(error))

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
