"""A part with a thread of its own, which begins when it is needed, and what a forked child begins anew."""

from __future__ import annotations

import threading
import weakref
from typing import Any

CLOSE_SECONDS = 5.0


class Background:
    """The base of parts that work in a thread. A forked child inherits the object but no thread, so there the
    part begins anew."""

    thread_name: str

    def __init__(self) -> None:
        FORKABLE.add(self)
        self.begin_anew()

    def begin_anew(self) -> None:
        self._changed = threading.Condition()  # a thread that is not in this process may hold the old lock
        self._thread: threading.Thread | None = None
        self._closing = False

    def _begin(self) -> None:
        """Begin the thread, unless it has begun; the caller holds the lock. Raises `RuntimeError` where no
        thread is to be had now. Then the next call tries again."""
        if self._thread is None:
            self._closing = False
            thread = threading.Thread(target=self._run, name=self.thread_name, daemon=True)
            thread.start()  # guard: failed-thread-start-is-repeated
            self._thread = thread

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """End the thread, and wait for that, at most that time. The next use begins another one."""
        with self._changed:
            thread, self._closing = self._thread, True
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(seconds)

    def _run(self) -> None:
        raise NotImplementedError


FORKABLE: weakref.WeakSet[Any] = weakref.WeakSet()
"""The objects of which a forked child calls `begin_anew`."""
