"""How a worker starts in a thread of a program, and how long it may go on after a request to stop."""

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
from time import monotonic
from typing import Any, Self

from sqlq.config.durations import Duration, milliseconds, readable
from sqlq.errors import ConfigurationError
from sqlq.worker.attempt.lifespan import Lifespan
from sqlq.worker.ipc.pipe import serve_signals
from sqlq.worker.options import readable_bytes
from sqlq.worker.run.executor import Executor
from sqlq.worker.run.isolated import IsolatedProcesses
from sqlq.worker.settle.settle import Counts
from sqlq.worker.threads.log import log

LAST_SETTLES_SECONDS = 4.0
"""How long after the grace time outcomes may still be written."""
LAST_STATEMENTS_SECONDS = 1.0
"""How long after that threads may take, all together, to come back from the database."""
STATEMENT_SECONDS = 5.0
"""How long one of them may, where nothing presses."""
MIN_END_SECONDS = 2.0
"""How long a lifespan and listeners may take to end at the least, when the grace time is spent."""

DEFAULTS: dict[int, Any] = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
"""The handlers of a program that has set none."""


@contextmanager
def stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Have SIGTERM and Ctrl-C call `stop` within the block, which runs in the main thread. Handlers of the
    program's own stay."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # guard: handlers-of-the-program-stay
    replaced = [number for number, default in DEFAULTS.items() if signal.getsignal(number) == default]
    received = serve_signals(replaced, lambda number: stop())
    try:
        yield
    finally:
        for number in replaced:
            signal.signal(number, DEFAULTS[number])
        received.put(0)


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
        rest of the grace time, and for `MIN_END_SECONDS` at least."""
        began = monotonic()

        def may_wait() -> bool:
            self.pulse()
            until = max(began + MIN_END_SECONDS, min(began + self._ms / 1000, self._until))
            return not self.leaves_now and monotonic() < until

        return may_wait

    def time_left(self) -> float:
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
        is_logged = False
        while self.lasts():
            self.pulse()
            if self.stopping.is_set() and running and not is_logged:
                is_logged = True
                log.info("waiting up to %s for what runs (%d)", readable(self._ms), running, event="stopping")
            if executors.wait_idle(min(self._until - monotonic(), 0.1)):
                return
            if not self.stopping.is_set() and all(job.timed_out for job in executors.running()):
                return


MEASURE_SECONDS = 1.0


def resident_bytes() -> int:
    """Return how much memory this process has; where the system does not report it, the peak it ever had."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


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

    def note_poll(self) -> None:
        """Note that the database has answered whether there is work."""
        self._worked_at = self._worked_at or monotonic()

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
            isolates.leave()
        # guard: a-lifespan-does-not-outlive-the-grace
        lifespan.leave(may_wait)
        if isolates is not None:
            isolates.await_left(may_wait)


STARTED_BEFORE = "this worker has been started before: make another one by app.worker()"


class Background:
    """The methods of a worker beside `run`, which blocks."""

    run: Callable[[], Counts]
    stop: Callable[[], None]
    _thread: threading.Thread | None = None
    _has_run = False
    _failure: BaseException | None = None

    def __init__(self) -> None:
        self._is_ready = threading.Event()

    def start(self) -> Self:
        """Work in a thread of this process, and return at once. Raises `ConfigurationError` for a worker that
        has been started before.

        >>> worker = app.worker().start()  # doctest: +SKIP
        >>> worker.wait_until_ready()  # doctest: +SKIP
        """
        if self._thread is not None or self._has_run:
            raise ConfigurationError(STARTED_BEFORE)
        self._thread = threading.Thread(target=self._run_here, name="sqlq-worker", daemon=True)
        self._thread.start()
        return self

    def wait_until_ready(self, timeout: Duration = "30s") -> None:
        """Wait until the worker is entered in the database, has entered the App's lifespan, and claims.

        Raises the error that prevented it, `TimeoutError` when it takes longer, and `ConfigurationError` for
        a worker that was not started.
        """
        if self._thread is None:
            raise ConfigurationError("this worker was not started: call start() before wait_until_ready()")
        ms = milliseconds(timeout, "timeout")
        if not self._is_ready.wait(ms / 1000):
            raise TimeoutError(f"the worker was not ready within {readable(ms)}")
        if self._failure is not None:
            raise self._failure

    def join(self, timeout: Duration | None = None) -> bool:
        """Wait until the worker has ended, after `stop` or by itself; return whether it has. Raises the
        exception that ended it, if any."""
        if self._thread is not None:
            self._thread.join(None if timeout is None else milliseconds(timeout, "timeout") / 1000)
            if self._thread.is_alive():
                return False
        if self._failure is not None:
            raise self._failure
        return True

    def _run_here(self) -> None:
        try:
            self.run()
        except BaseException as error:
            self._failure = error
        finally:
            self._is_ready.set()

    def __enter__(self) -> Self:
        """Start, and wait until the worker is ready."""
        self.start()
        try:
            self.wait_until_ready()
        except TimeoutError:
            self.stop()
            raise
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        """Stop, and wait until all jobs have ended, or the grace time is over."""
        self.stop()
        if error is None:
            self.join()
        elif self._thread is not None:
            self._thread.join()
