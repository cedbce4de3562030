"""How long a worker may go on after a request to stop: its running jobs, their outcomes, and user code."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from queue import SimpleQueue
from time import monotonic
from typing import Any

from sqlq.config.durations import readable
from sqlq.errors import ConfigurationError
from sqlq.worker.attempt.lifespan import Lifespan
from sqlq.worker.ipc.pipe import handle_here
from sqlq.worker.options import readable_bytes
from sqlq.worker.run.executor import Executor
from sqlq.worker.run.isolated import IsolatedProcesses
from sqlq.worker.threads.log import log
from sqlq.worker.threads.loop import begins

LAST_SETTLES_SECONDS = 4.0
"""How long after the grace time outcomes may still be written."""
LAST_STATEMENTS_SECONDS = 1.0
"""How long after that threads may take, all together, to come back from the database."""
STATEMENT_SECONDS = 5.0
"""How long one of them may, where nothing presses."""
LAST_MOMENT_SECONDS = 2.0
"""How long a lifespan and listeners may take to end at the least, when the grace time is spent."""

DEFAULTS: dict[int, Any] = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
"""The handlers of a program that has set none."""


@contextmanager
def stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Have SIGTERM and Ctrl-C call `stop` within the block, which runs in the main thread. Handlers of the
    program's own stay."""
    requests: SimpleQueue[int] = SimpleQueue()
    replaced: list[int] = []

    def serve() -> None:
        while requests.get():
            stop()

    def note(number: int, frame: Any) -> None:
        # `stop` takes locks that the interrupted thread may hold; `put` of this queue takes none
        requests.put(number)

    if threading.current_thread() is threading.main_thread() and begins(
        threading.Thread(target=serve, name="sqlq-signals", daemon=True)
    ):
        # guard: handlers-of-the-program-stay
        replaced = [number for number, default in DEFAULTS.items() if signal.getsignal(number) == default]
    for number in replaced:
        handle_here(number, note)  # guard: forked-children-take-signals-here
    try:
        yield
    finally:
        for number in replaced:
            signal.signal(number, DEFAULTS[number])
        requests.put(0)


class Grace:
    """The grace time of one worker. It begins with the first request to stop; at the second the worker leaves
    at once. A worker that retires by itself has no such time, and no deadline."""

    _until = inf

    leaves_now = False
    """Whether nothing is to be waited for any more."""

    def __init__(self, ms: int, pulse: Callable[[], None]) -> None:
        """The worker calls `pulse` while it waits, to show that the process is alive."""
        self._ms = ms
        self.pulse = pulse
        self.stopping = threading.Event()
        """Set when the worker is to stop."""

    def stop(self, grace_ms: int | None) -> None:
        """Begin the grace time, or end it at the second call; with `grace_ms` it is no longer than that."""
        if grace_ms is not None:
            self._ms = min(grace_ms, self._ms)
        elif self.stopping.is_set():
            self.leaves_now = True
            self._until = min(self._until, monotonic() - LAST_SETTLES_SECONDS)
        self._until = min(self._until, monotonic() + self._ms / 1000)
        self.stopping.set()

    def lasts(self) -> bool:
        """Return whether the worker may still wait for its start."""
        return not self.leaves_now and monotonic() < self._until

    def last_wait(self) -> Callable[[], bool]:
        """Return a function that returns whether user code may still take time at the end. It may for the
        rest of the grace time, and for `LAST_MOMENT_SECONDS` at least."""
        began = monotonic()

        def may_wait() -> bool:
            self.pulse()
            graceful_until = min(began + self._ms / 1000, self._until)
            until = max(began + LAST_MOMENT_SECONDS, graceful_until)
            return not self.leaves_now and monotonic() < until

        return may_wait

    def patience(self) -> float:
        """Return for how many more seconds outcomes may wait to be written. They may until soon after the
        grace time, and without end in a process that retires by itself."""
        until = self._until + LAST_SETTLES_SECONDS  # guard: outcomes-have-no-deadline
        return max(0.0, until - monotonic())  # guard: stop-wait-is-bounded

    def last_statement(self) -> float:
        """Return how many seconds to wait for a thread that executes its last statement."""
        until = self._until + LAST_SETTLES_SECONDS + LAST_STATEMENTS_SECONDS
        return max(0.0, min(STATEMENT_SECONDS, until - monotonic()))

    def await_running(self, executors: Executor) -> None:
        """Wait for running jobs. After a stop it waits for the grace time at most. Without one it waits as
        long as they take, but not for handlers past their timeouts, which cannot be stopped."""
        running = executors.load().running
        is_told = False
        while self.lasts():
            self.pulse()
            if self.stopping.is_set() and running and not is_told:
                is_told = True
                grace = readable(self._ms)
                log.info("waiting up to %s for what runs (%d)", grace, running, event="stopping")
            if executors.wait_idle(min(self._until - monotonic(), 0.1)):
                return
            if not self.stopping.is_set() and all(job.timed_out for job in executors.running()):
                return


MEASURE_SECONDS = 1.0
_STATM = Path("/proc/self/statm")


def resident_bytes() -> int:
    """Return how much memory this process has; where the system does not report it, the most it ever had."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024


class Bounds:
    """Measures by which a worker may end: its memory, and the time without work."""

    _measured_at = -inf
    _resident = 0
    _worked_at: float | None = None  # guard: idleness-begins-with-a-look
    """When there was work last, or the first look found none; None while that is unknown."""

    def __init__(self, max_rss: int | None) -> None:
        self._max_rss = max_rss

    def begin(self) -> None:
        """Begin to count. Raises `ConfigurationError` where the process is too large before its first job: it
        would be replaced for ever."""
        if self._max_rss is not None and (size := resident_bytes()) >= self._max_rss:
            raise ConfigurationError(
                f"max_rss is {readable_bytes(self._max_rss)}: this process has {readable_bytes(size)} before "
                "its first job; give more than that, and room for what jobs need"
            )

    def works(self) -> None:
        """Note that there is work, or that nothing is to be done for now."""
        self._worked_at = monotonic()

    def looked(self) -> None:
        """Note that the database has answered whether there is work."""
        if self._worked_at is None:
            self._worked_at = monotonic()

    def cannot_look(self) -> None:
        """Note that the database does not answer. Jobs may wait in it, so no time counts as idle."""
        self._worked_at = None

    def idle_ms(self) -> float:
        """Return for how long there has been no work."""
        return 0.0 if self._worked_at is None else (monotonic() - self._worked_at) * 1000

    def resident(self) -> int:
        """Return how much memory the process has, as measured within the last second; 0 without a bound."""
        if self._max_rss is not None and monotonic() >= self._measured_at + MEASURE_SECONDS:
            self._measured_at, self._resident = monotonic(), resident_bytes()
        return self._resident


@contextmanager
def lifespans(lifespan: Lifespan, isolates: IsolatedProcesses | None, grace: Grace) -> Iterator[bool]:
    """Enter the App's lifespan, and leave it after the block, here and in processes of single jobs. One that
    does not end within the rest of the grace time is left behind. Yields False when the worker was stopped
    before it was entered."""
    try:
        yield lifespan.enter(grace.lasts)
    finally:
        may_wait = grace.last_wait()
        if isolates is not None:
            # guard: isolates-leave-their-lifespan
            isolates.leave(fresh=lifespan.exists)
        # guard: a-lifespan-does-not-outlive-the-grace
        has_left = lifespan.leave(may_wait)
        if not has_left:
            log.error("the lifespan %s does not end, and is left behind", lifespan.name)
        if isolates is not None:
            isolates.await_left(may_wait)
