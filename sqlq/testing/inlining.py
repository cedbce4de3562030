"""Inline mode: a job runs where it is enqueued, or when the caller's transaction commits, and nothing is
written."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import sys
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from sqlalchemy.util import await_only, concurrency

from sqlq.app import App
from sqlq.endings import follow_up
from sqlq.enqueue import check_new
from sqlq.errors import ConfigurationError
from sqlq.job import ClaimedJob, Completed, Failed, Job, NewJob, State
from sqlq.retry import Cancel, Retry, Snooze, describe
from sqlq.session import asynchronous, connection_of, connection_to_write, itself, note_write
from sqlq.settings import MAX_ATTEMPTS
from sqlq.task import Task
from sqlq.testing.commits import Commits
from sqlq.testing.database import current
from sqlq.worker.execute import Run, acall_handler, call_handler
from sqlq.worker.running import RunningJob

if TYPE_CHECKING:
    from sqlalchemy.orm import scoped_session


@dataclass
class InlineJob:
    """A job of an inline block: what it was, and what became of it.

    With `at="commit"` its state is `available` until its transaction commits. When it has `failed`, `error`
    is the exception that reaches the test.
    """

    id: int
    new: NewJob
    state: State = State.AVAILABLE
    attempts: int = 0
    result: Any = None
    error: BaseException | None = None


class Inline:
    """The jobs of an `inline` block, in the order in which they were enqueued; without those whose
    transaction was rolled back."""

    def __init__(self) -> None:
        self.jobs: list[InlineJob] = []


@contextmanager
def inline(
    app: App, *, at: Literal["enqueue", "commit"] = "enqueue", lifespan: Any = None
) -> Iterator[Inline]:
    """Run this App's jobs in the test itself while the block runs, whatever `App.use` says meanwhile; nothing
    is written, and no database is needed.

    `enqueue` runs a `def` handler in the caller's thread and an `async def` one on an event loop of its own
    (in a thread, when the caller is on a loop already); `aenqueue` awaits `async def` handlers on the
    caller's loop and runs the others in a thread. Handlers get their arguments by way of JSON,
    `sqlq.current_job()` works, and what they enqueue runs inline too, as does what follows a job by
    `on_success` and `on_failure`. What `App.around` has registered
    surrounds them; the App's lifespan is not entered, and `current_job().lifespan` is what you give as
    `lifespan`. An exception comes out of `enqueue`, at the first attempt: no retry hides it from the test.
    Delays, priorities, queues and timeouts do not matter; a unique key holds while its job runs. The signals:

    - `Retry`: the next attempt follows at once; when it was the last, the Retry, or its cause, is raised.
    - `Snooze`: the job is left alone, with state `scheduled`: what it waits for will not happen meanwhile.
    - `Cancel`: the job ends with state `cancelled`.

    By default a job runs where it is enqueued, so before the caller's transaction has ended: on a connection
    of its own the handler does not see what that transaction wrote (and on SQLite waits for its lock), and it
    has run even if the caller then rolls back.

    With `at="commit"` a job that is enqueued through a session runs when the session's transaction has
    committed, in the order enqueued. The session is of any kind that `enqueue` or `aenqueue` takes, and has
    to be able to connect. The job does not run after a rollback of the transaction or of its savepoint, nor
    when the transaction is still open as the block ends. Through the caller's scoped_session the handler
    reaches a session of its own, as it does in a worker. Its exception does not come out of the commit, which
    has succeeded: the other jobs run, and the first exception is raised when the block ends. A job that is
    enqueued without a session runs at once, and its exception comes out of `enqueue`.

    >>> with sqlq.testing.inline(app, at="commit") as ran:  # doctest: +SKIP
    ...     place_order(session, ...)  # enqueues, and commits
    >>> assert [job.state for job in ran.jobs] == ["finished"]  # doctest: +SKIP
    """
    if at not in ("enqueue", "commit"):
        raise ConfigurationError(f'inline(at={at!r}) is not known: at is "enqueue" or "commit"')
    enqueuer = InlineEnqueuer(app, at_commit=at == "commit", lifespan=lifespan)
    before, app.stand_in = app.stand_in, enqueuer
    try:
        with current(app), enqueuer.failing():
            yield enqueuer.ran
    finally:
        app.stand_in = before
        enqueuer.close()


class _Kept(NamedTuple):
    """A job that waits for a commit, and the scoped_session through which it was enqueued, if it was."""

    job: InlineJob
    scope: scoped_session[Any] | None


class InlineEnqueuer:
    """Takes the place of what writes an App's jobs: what goes in is run."""

    def __init__(self, app: App, *, at_commit: bool, lifespan: Any) -> None:
        self._tasks = app.tasks
        self._lifespan = lifespan
        self._ids = itertools.count(1)
        self._commits = Commits(self._committed, self._undone) if at_commit else None
        self._failed: list[Exception] = []
        """Exceptions of jobs that ran when a transaction had committed; the commit is not to raise them."""
        self.ran = Inline()

    def enqueue(self, new: Sequence[NewJob], session: Any = None) -> list[Job]:
        self._check(new)
        if hasattr(session, "run_sync"):
            connection_of(session)  # refuses it, and says what to write
        if session is not None and self._commits is not None:
            return self._keep(new, session, self._commits)
        done = []
        for job in new:
            found, created = self._take(job)
            if created:
                self._run(found)
            done.append(_answer(found, created))
        return done

    async def aenqueue(self, new: Sequence[NewJob], session: Any = None) -> list[Job]:
        self._check(new)
        if session is not None and self._commits is not None:
            kept: list[Job] = await asynchronous(session).run_sync(lambda sync: self.enqueue(new, sync))
            return kept
        done = []
        for job in new:
            found, created = self._take(job)
            if created:
                await self._arun(found)
            done.append(_answer(found, created))
        return done

    def close(self) -> None:
        """Run nothing any more of what waits for a commit."""
        if self._commits is not None:
            self._commits.close()

    def _check(self, new: Sequence[NewJob]) -> None:
        check_new(new)
        for job in new:
            self._tasks.find(job.task)

    def _take(self, new: NewJob) -> tuple[InlineJob, bool]:
        """Return a job for this one, and whether it is new: the one there is with the same unique key is
        not."""
        live = self._live(new)
        if live is not None:
            return live, False
        if new.max_attempts is None:
            new = replace(new, max_attempts=self._tasks.find(new.task).max_attempts)
        job = InlineJob(next(self._ids), new)
        self.ran.jobs.append(job)
        return job, True

    def _live(self, new: NewJob) -> InlineJob | None:
        """The job that holds the same unique key: until "start", none that runs holds it."""
        if new.unique_key is None:
            return None
        for job in self.ran.jobs:
            live = job.state is State.AVAILABLE or (
                job.state is State.RUNNING and job.new.unique_until == "finish"
            )
            if live and (job.new.queue, job.new.unique_key) == (new.queue, new.unique_key):
                return job
        return None

    def _run(self, job: InlineJob, run: Run | None = None) -> None:
        task = self._tasks.find(job.new.task)
        job.state = State.RUNNING
        try:
            while job.state is State.RUNNING:
                with _Ending(job):
                    # in a copy of the context, so that the handler's current_job() is not the caller's
                    attempt = contextvars.copy_context().run
                    job.result = attempt(self._attempt, task, job, run or _on_a_loop_of_its_own)
                    job.state = State.FINISHED
        finally:
            if (follower := self._follower(job)) is not None:
                self._run(follower, run)

    async def _arun(self, job: InlineJob) -> None:
        task = self._tasks.find(job.new.task)
        if not task.is_async:
            loop = asyncio.get_running_loop()
            await asyncio.to_thread(
                self._run, job, lambda work: asyncio.run_coroutine_threadsafe(work, loop).result()
            )
            return
        job.state = State.RUNNING
        try:
            while job.state is State.RUNNING:
                with _Ending(job):
                    # a task of its own, whose context ends with it
                    job.result = await asyncio.create_task(self._aattempt(task, job))
                    job.state = State.FINISHED
        finally:
            if (follower := self._follower(job)) is not None:
                await self._arun(follower)

    def _attempt(self, task: Task[..., Any], job: InlineJob, run: Run) -> Any:
        running = self._begun(task, job)
        return run(acall_handler(running)) if task.is_async else call_handler(running, run)

    async def _aattempt(self, task: Task[..., Any], job: InlineJob) -> Any:
        return await acall_handler(self._begun(task, job))

    def _begun(self, task: Task[..., Any], job: InlineJob) -> RunningJob:
        """Begin an attempt in this context."""
        running = RunningJob(_claimed(job), task, float("inf"))
        running.lifespan = self._lifespan
        running.arguments = task.arguments(job.new.payload)
        running.begin()
        return running

    def _follower(self, job: InlineJob) -> InlineJob | None:
        """Return the job that follows one that has ended, if one does."""
        if job.state is State.FAILED and job.error is not None:
            new = follow_up(_claimed(job), Failed("error", describe(job.error)))
        else:
            new = follow_up(_claimed(job), Completed()) if job.state is State.FINISHED else None
        return None if new is None else self._take(new)[0]

    # -- at a commit -----------------------------------------------------------------------------------------

    def _keep(self, new: Sequence[NewJob], session: Any, commits: Commits[_Kept]) -> list[Job]:
        connection_to_write(session)
        scope = session if hasattr(session, "registry") else None
        owner = itself(session)
        done = []
        for job in new:
            found, created = self._take(job)
            if created:
                commits.add(owner, _Kept(found, scope))
            done.append(_answer(found, created))
        note_write(session)
        return done

    def _undone(self, kept: list[_Kept]) -> None:
        undone = [job for job, _ in kept]
        self.ran.jobs[:] = [job for job in self.ran.jobs if job not in undone]

    def _committed(self, kept: list[_Kept]) -> None:
        if _in_greenlet():  # an asynchronous session's commit, on the caller's loop
            await_only(self._arun_committed(kept))
        else:
            for job, scope in kept:
                with self._failing_later(job), _session_of_its_own(scope):
                    self._run(job)

    async def _arun_committed(self, kept: list[_Kept]) -> None:
        for job, _ in kept:
            with self._failing_later(job):
                await self._arun(job)

    @contextmanager
    def _failing_later(self, job: InlineJob) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # guard: a-commit-raises-nothing
            error.add_note(f"raised by job {job.id}, {job.new.task}, which ran inline after a commit")
            self._failed.append(error)

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Raise at the end of the block what failed after commits in it; beside an exception of its own, name
        it in a note."""
        try:
            yield
        except BaseException as error:
            _note(error, self._failed)
            raise
        if self._failed:
            first, *others = self._failed
            _note(first, others)
            raise first


@contextmanager
def _session_of_its_own(scope: scoped_session[Any] | None) -> Iterator[None]:
    """Give the handler a session of its own in the caller's scoped_session, as it has in a worker's thread.

    The caller's own is still inside its `with session.begin()`, perhaps, and goes on with what it has loaded.
    """
    if scope is None:
        yield
        return
    callers = scope.registry()
    scope.registry.clear()
    try:
        yield
    finally:
        scope.remove()
        scope.registry.set(callers)


def _note(error: BaseException, failed: list[Exception]) -> None:
    for other in failed:
        error.add_note(f"a job that ran inline failed, too: {type(other).__name__}: {other}")


def _in_greenlet() -> bool:
    return "greenlet" in sys.modules and concurrency.in_greenlet()


class _Ending:
    """Gives an attempt that ended by an exception its state, or lets the exception through."""

    def __init__(self, job: InlineJob) -> None:
        self._job = job

    def __enter__(self) -> None:
        self._job.attempts += 1

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        match error:
            case None:
                return True
            case Cancel():
                self._job.state = State.CANCELLED
            case Snooze():
                self._job.state = State.SCHEDULED
            case Retry() if self._job.attempts < (self._job.new.max_attempts or MAX_ATTEMPTS):
                pass
            case Retry(__cause__=BaseException() as cause):
                self._job.state, self._job.error = State.FAILED, cause
                raise cause
            case _:
                self._job.state, self._job.error = State.FAILED, error
                return False
        return True


def _on_a_loop_of_its_own(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine on an event loop of its own: in a thread, where the caller is on a loop, which stands
    still meanwhile, as it would in any other call."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1, "sqlq-inline") as thread:
        return thread.submit(contextvars.copy_context().run, asyncio.run, work).result()


def _claimed(job: InlineJob) -> ClaimedJob:
    new = job.new
    return ClaimedJob(
        id=job.id,
        lease_token=job.attempts,
        queue=new.queue,
        task=new.task,
        payload=new.payload,
        attempts=job.attempts,
        max_attempts=new.max_attempts or MAX_ATTEMPTS,
        on_success=new.on_success,
        on_failure=new.on_failure,
        label=new.label,
        headers=new.headers_text,
    )


def _answer(job: InlineJob, created: bool) -> Job:
    return Job(id=job.id, queue=job.new.queue, task=job.new.task, state=job.state, created=created)
