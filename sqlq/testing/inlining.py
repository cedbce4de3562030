"""Inline mode: a job runs where it is enqueued, or when the caller's transaction commits, and nothing is
written."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from sqlq.app.app import App
from sqlq.app.here import InlineJob
from sqlq.app.inline import Here
from sqlq.model.checks import checked_word
from sqlq.model.job import State
from sqlq.model.retry import Retry, Snooze
from sqlq.testing.database import current

When = Literal["enqueue", "commit"]


class Inline:
    """The jobs of an `inline` block, in the order in which they were enqueued; without those whose
    transaction was rolled back."""

    def __init__(self, enqueuer: InlineEnqueuer) -> None:
        self._enqueuer = enqueuer

    @property
    def jobs(self) -> list[InlineJob]:
        return self._enqueuer.jobs


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
            yield Inline(enqueuer)
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

    def continues(self, job: InlineJob, error: BaseException) -> bool:
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
