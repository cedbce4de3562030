"""Inline mode: a job runs where it is enqueued, or when the caller's transaction commits, and nothing is
written."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from math import inf
from typing import Any, Literal

from sqlq.app.app import App
from sqlq.app.here import InlineJob, Wait
from sqlq.app.inline import WAIT, Calls, Here, at_once
from sqlq.config.durations import Duration, milliseconds
from sqlq.database.caller.session import transaction_to_write
from sqlq.errors import JobTimeoutError
from sqlq.model.checks import checked_word
from sqlq.model.job import State
from sqlq.model.retry import Retry, Snooze, WaitFor
from sqlq.testing.database import current

When = Literal["enqueue", "commit"]


class Inline:
    """The jobs of an `inline` block, in the order in which they were enqueued; without those whose
    transaction was rolled back."""

    def __init__(self, app: App, enqueuer: InlineEnqueuer) -> None:
        self._enqueuer = enqueuer
        self.signal = app.signal
        """Sends a signal, as `App.signal` does in the block, and runs what waits for it."""

    @property
    def jobs(self) -> list[InlineJob]:
        return self._enqueuer.jobs

    def travel(self, time: Duration) -> None:
        """Let that time pass for the timeouts of waits, and run what follows.

        >>> ran.travel("3d")  # doctest: +SKIP
        """
        self._enqueuer.now_ms += milliseconds(time, "time")
        self._enqueuer.resume()


@contextmanager
def inline(app: App, *, at: When = "enqueue", lifespan: Any = None) -> Iterator[Inline]:
    """Run this App's jobs in the test itself while the block runs, whatever `App.use` is given meanwhile;
    nothing is written, and no database is needed.

    `enqueue` runs a `def` handler in the caller's thread, and an `async def` one on a new event loop.
    `aenqueue` awaits `async def` handlers on the caller's loop and runs the others in a thread. Handlers get
    their arguments by way of JSON, and `sqlq.current_job()` works. Jobs that they enqueue run inline, too,
    and so do callbacks (`on_success`, `on_failure`). Middleware of `App.middleware` runs around them. The
    App's lifespan is not entered: `current_job().lifespan` is the `lifespan` that you give. An exception
    comes out of `enqueue`, at the first attempt: no retry hides it from the test. Delays, priorities, queues
    and timeouts do not matter; a unique key holds while its job runs. The signals:

    - `Retry`: the next attempt follows at once; when it was the last, the Retry, or its cause, is raised.
    - `WaitFor`: the job runs again when its signal comes, by `app.signal`, or `travel` ends its timeout.
    - `Snooze`, `SlowDown`: the job is left alone, with state `scheduled`: what it waits for will not happen
      meanwhile.
    - `Cancel`: the job ends with state `cancelled`.

    By default a job runs where it is enqueued, before the caller's transaction has ended. On another
    connection the handler does not see the writes of that transaction (and on SQLite waits for its lock). It
    has run even if the caller then rolls back.

    With `at="commit"` a job that is enqueued through a session runs when the session's transaction has
    committed, in the order enqueued. The session is of any kind that `enqueue` or `aenqueue` takes, and has
    to be able to connect. The job does not run after a rollback of the transaction or its savepoint. It does
    not run either if the transaction is still open at the end of the block. Through the caller's
    scoped_session the handler reaches a session of its own, as it does in a worker. Its exception does not
    come out of the commit, which has succeeded. The other jobs run, and the block raises the first exception
    at its end. A job that is enqueued without a session runs at once, and its exception comes out of
    `enqueue`.

    >>> with sqlq.testing.inline(app, at="commit") as ran:  # doctest: +SKIP
    ...     place_order(session, ...)  # enqueues, and commits
    >>> assert [job.state for job in ran.jobs] == ["finished"]  # doctest: +SKIP
    """
    checked_word(at, "at", choice=When)
    enqueuer = InlineEnqueuer(app, at_commit=at == "commit", lifespan=lifespan)
    before, app._stand_in = app._stand_in, enqueuer
    try:
        with current(app):
            yield Inline(app, enqueuer)
    except BaseException as error:
        _note(error, enqueuer.errors)
        raise
    finally:
        app._stand_in = before
        enqueuer.is_closed = True
    if enqueuer.errors:
        first, *others = enqueuer.errors
        _note(first, others)
        raise first


class InlineEnqueuer(Here):
    """Takes the place of what writes an App's jobs: what goes in is run."""

    def __init__(self, app: App, *, at_commit: bool, lifespan: Any) -> None:
        super().__init__(app.tasks, {}, at_commit=at_commit, lifespan=lifespan)
        self.new_id = itertools.count(1).__next__
        self.errors: list[Exception] = []
        """Exceptions of jobs that ran when a transaction had committed; the commit is not to raise them."""
        self.signals: dict[str, str | None] = {}
        self.now_ms = 0
        """How far `travel` has moved the clock."""
        self._runs: list[list[InlineJob]] = []

    async def _run_all(self, jobs: list[InlineJob], call: Calls) -> None:
        if jobs not in self._runs:
            self._runs.append(jobs)
        await super()._run_all(jobs, call)

    def signal(self, name: str, value: str | None, keep_ms: int, session: Any = None) -> bool:
        """Keep a signal, and run what waits for it: now, or when the transaction commits that it joins."""
        if name in self.signals:
            return False
        if session is None or not self._at_commit:
            self.signals[name] = value
            self.resume()
        else:
            transaction_to_write(session).when_over(partial(self.signal, name, value, keep_ms), lambda: None)
        return True

    def resume(self) -> None:
        """Run the jobs that wait no longer."""
        for jobs in [*self._runs]:
            at_once(self._run_all(jobs, self._call_here))

    def answer(self, job: InlineJob) -> None:
        assert job.signal is not None
        if job.until_ms is None:
            job.until_ms = self.now_ms + (inf if job.timeout_ms is None else job.timeout_ms)
        came = job.signal in self.signals
        if not came and job.until_ms > self.now_ms:
            job.state = State.BLOCKED
            return
        job.wait = Wait(job.signal, "signal" if came else "timeout", self.signals.get(job.signal))
        job.signal = None
        if job.task is WAIT:
            job.state = State.FINISHED if came else State.FAILED
            job.result = job.wait.value and json.loads(job.wait.value)
            job.error = JobTimeoutError(f"no signal {job.wait.name} came in time")

    def continues(self, job: InlineJob, error: BaseException) -> bool:
        if isinstance(error, WaitFor):
            job.signal, job.timeout_ms, job.until_ms = error.signal, error.timeout_ms, None
            job.attempts -= 1
            self.answer(job)
            return True
        if isinstance(error, Snooze):
            job.state = State.SCHEDULED
            return True
        return isinstance(error, Retry) and job.attempts < job.claimed().max_attempts

    def failed(self, job: InlineJob, error: Exception) -> None:
        error.add_note(f"raised by job {job.id}, {job.new.task}, which ran inline after a commit")
        self.errors.append(error)


def _note(error: BaseException, others: list[Exception]) -> None:
    for other in others:
        error.add_note(f"a job that ran inline failed, too: {type(other).__name__}: {other}")
