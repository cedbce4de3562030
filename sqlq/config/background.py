"""A part with a thread of its own, which begins when it is needed."""

from __future__ import annotations

import os
import threading


class Background:
    """The base of parts that work in a thread. A forked child inherits the object but no thread, so there the
    part begins anew."""

    thread_name: str

    def __init__(self) -> None:
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def _lock(self) -> threading.Condition:
        """Return the lock of this process."""
        if self._pid != os.getpid():
            self._begin_anew()
        return self._changed

    def _begin(self) -> None:
        """Begin the thread, unless it has begun; the caller holds the lock. Raises `RuntimeError` where no
        thread is to be had now. Then the next call tries again."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self.thread_name, daemon=True)
            thread.start()  # guard: threads-begin-again
            self._thread = thread

    def _run(self) -> None:
        raise NotImplementedError
