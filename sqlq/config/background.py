"""A part with a thread of its own, which begins when it is needed."""

from __future__ import annotations

import os
import threading
import weakref


class Background:
    """The base of parts that work in a thread. A forked child inherits the object but no thread, so there the
    part begins anew."""

    thread_name: str

    def __init__(self) -> None:
        _PARTS.add(self)
        self.begin_anew()

    def begin_anew(self) -> None:
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def _begin(self) -> None:
        """Begin the thread, unless it has begun; the caller holds the lock. Raises `RuntimeError` where no
        thread is to be had now. Then the next call tries again."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self.thread_name, daemon=True)
            thread.start()  # guard: failed-thread-start-is-repeated
            self._thread = thread

    def _run(self) -> None:
        raise NotImplementedError


_PARTS: weakref.WeakSet[Background] = weakref.WeakSet()


def _forked() -> None:
    for part in _PARTS:
        part.begin_anew()  # a thread that is not in this process may hold its lock


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
