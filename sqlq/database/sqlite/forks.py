"""Forks of a process that uses SQLite files.

SQLite counts its locks by process. A child that inherits an open file takes the locks of its parent for its
own. Then the parent may remove the log to which the child writes. A mutex that another thread held stays
locked in the child, which then waits for ever. So files are closed before a fork.
https://www.sqlite.org/howtocorrupt.html#_carrying_an_open_database_across_a_fork_
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress

from sqlq.database.timeouts import AnswerTimeout

FORK_SECONDS = 10.0
"""How long a fork waits for transactions of other threads. SQLite waits as long for a lock."""


class Gate:
    """Lets threads use files, or one fork."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._users = 0
        self._forks = False
        self._thread = threading.local()

    def enter(self) -> None:
        """Wait for the end of a fork, unless the thread is inside already: the fork waits for that."""
        depth = getattr(self._thread, "depth", 0)
        if not depth:
            with self._changed:
                while self._forks:  # guard: users-let-a-fork-through
                    self._changed.wait()
                self._users += 1
        self._thread.depth = depth + 1

    def leave(self) -> None:
        self._thread.depth -= 1
        if not self._thread.depth:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()

    def begin_fork(self) -> None:
        """Wait until no other thread is inside, and hold the lock."""
        self._changed.acquire()
        self._forks = True
        here = min(getattr(self._thread, "depth", 0), 1)
        # guard: fork-waits-for-transactions
        self._changed.wait_for(lambda: self._users <= here, FORK_SECONDS)

    def end_fork(self) -> None:
        """Let the threads in again, in the parent or, where this thread is the only one, in the child."""
        self._forks = False
        self._changed.notify_all()
        self._changed.release()


gate = Gate()


class FileUse(AnswerTimeout):
    """The block in which a thread uses a file."""

    def __enter__(self) -> None:
        gate.enter()
        super().__enter__()

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        gate.leave()


def is_open(file: str) -> bool:
    """Whether this process has a file open; False where the system does not show it."""
    with suppress(OSError):
        here = os.stat(file)  # noqa: PTH116 - beside fstat
        for fd in os.listdir("/dev/fd"):  # noqa: PTH208 - numbers, not paths
            with suppress(OSError):  # that of the directory itself is closed by now
                if os.path.samestat(os.fstat(int(fd)), here):
                    return True
    return False
