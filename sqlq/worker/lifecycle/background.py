"""A worker in a thread of a program of one's own: start it, wait until it works, stop it."""

from __future__ import annotations

import threading
from typing import Self

from sqlq.config.durations import Duration, milliseconds, readable
from sqlq.errors import ConfigurationError
from sqlq.worker.settle.settle import Counts

STARTED_BEFORE = "this worker has been started before: make another one by app.worker()"


class Background:
    """The methods of a worker beside `run`, which blocks."""

    _thread: threading.Thread | None = None
    _has_run = False
    _failure: BaseException | None = None

    def __init__(self) -> None:
        self._is_ready = threading.Event()

    def run(self) -> Counts:
        """Work until stopped."""
        raise NotImplementedError

    def stop(self) -> None:
        """Stop in good order."""
        raise NotImplementedError

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
