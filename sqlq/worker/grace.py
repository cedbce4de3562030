"""How long a worker that was told to stop may go on: what runs, what it has written of it, and user code."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from sqlq.clock import readable
from sqlq.worker.executors import Executors

log = logging.getLogger("sqlq.worker")

LAST_SETTLES_SECONDS = 4.0
"""How long after the grace time outcomes may still be written."""
LAST_STATEMENTS_SECONDS = 1.0
"""How long after that threads may take, all together, to come back from the database."""
STATEMENT_SECONDS = 5.0
"""How long one of them may, where nothing presses."""
LAST_MOMENT_SECONDS = 2.0
"""How long a lifespan and listeners may take to end at the least, when the grace time is spent."""


class Grace:
    """The grace time of one worker. It begins when the worker is told to stop; told once more, it leaves at
    once. A worker that retires by itself has no such time, and no deadline."""

    def __init__(self, ms: int, pulse: Callable[[], None]) -> None:
        """`pulse` is called while something is waited for, to say that the process is alive."""
        self._ms = ms
        self._until = float("inf")
        self.pulse = pulse
        self.stopping = threading.Event()
        """Set when the worker is to stop."""
        self.leaving_now = threading.Event()
        """Set when nothing is to be waited for any more."""

    def stop(self, grace_ms: int | None) -> None:
        """Begin the grace time, or end it at the second call; with `grace_ms` it is no longer than that."""
        if grace_ms is not None:
            self._ms = min(grace_ms, self._ms)
        elif self.stopping.is_set():
            self.leaving_now.set()
            self._until = min(self._until, time.monotonic() - LAST_SETTLES_SECONDS)
        self._until = min(self._until, time.monotonic() + self._ms / 1000)
        self.stopping.set()

    def lasts(self) -> bool:
        """Say whether the worker may still wait for what it needs to begin."""
        return not self.leaving_now.is_set() and time.monotonic() < self._until

    def last_wait(self) -> Callable[[], bool]:
        """Return what says how long user code may still take at the end: what is left of the grace time, and
        a moment at least."""
        began = time.monotonic()

        def may_wait() -> bool:
            self.pulse()
            graceful_until = min(began + self._ms / 1000, self._until)
            until = max(began + LAST_MOMENT_SECONDS, graceful_until)
            return not self.leaving_now.is_set() and time.monotonic() < until

        return may_wait

    def patience(self) -> float:
        """Return for how many more seconds outcomes may wait to be written: until a moment soon after the
        grace time; without end for a process that retires by itself."""
        until = self._until + LAST_SETTLES_SECONDS  # guard: outcomes-have-no-deadline
        return max(0.0, until - time.monotonic())  # guard: a-stop-has-an-end

    def last_statement(self) -> float:
        """Return for how many seconds a thread may be waited for that comes back from the database, and asks
        it nothing more."""
        until = self._until + LAST_SETTLES_SECONDS + LAST_STATEMENTS_SECONDS
        return max(0.0, min(STATEMENT_SECONDS, until - time.monotonic()))

    def await_running(self, executors: Executors) -> None:
        """Wait for what runs: when told to stop for the grace time, when retiring for as long as it takes,
        but for handlers that do not stop."""
        running, _ = executors.load()
        until = float("inf")
        while not self.leaving_now.is_set() and time.monotonic() < until:
            self.pulse()
            if self.stopping.is_set() and until == float("inf"):
                until = self._until
                if running:
                    grace = readable(self._ms)
                    log.info(
                        "waiting up to %s for what runs (%d)", grace, running, extra={"event": "stopping"}
                    )
            if executors.wait_idle(
                0.1 if until == float("inf") else max(0.0, min(until - time.monotonic(), 0.1))
            ):
                return
            if not self.stopping.is_set() and all(job.timed_out for job in executors.running()):
                return
