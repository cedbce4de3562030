"""Inline mode: a job runs where it is enqueued, or when the caller's transaction commits, and nothing is
written."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from sqlalchemy.util import await_only, concurrency

from sqlq.app import App
from sqlq.borrowed import Borrowed
from sqlq.drivers import DriverConnection
from sqlq.eager import FlowHere, Here, JobHere
from sqlq.errors import ConfigurationError
from sqlq.flow import EnqueuedFlow, Plan
from sqlq.job import ClaimedJob, Job, NewJob, State
from sqlq.retry import Cancel, Retry, Snooze
from sqlq.session import asynchronous, connection_of, connection_to_write, itself, note_write
from sqlq.store.results import Seen
from sqlq.testing.commits import Commits
from sqlq.testing.database import current

if TYPE_CHECKING:
    from sqlalchemy.orm import scoped_session


@dataclass
class InlineJob(JobHere):
    """A job of an inline block: what it was, and what became of it.

    With `at="commit"` its state is `available` until its transaction commits. When it has `failed`, `error`
    is the exception that reaches the test.
    """


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
    """A job or flow that waits for a commit, and the scoped_session through which it was enqueued, if it
    was."""

    what: InlineJob | FlowHere
    scope: scoped_session[Any] | None

    @property
    def jobs(self) -> Sequence[JobHere]:
        return self.what.jobs if isinstance(self.what, FlowHere) else [self.what]


class InlineEnqueuer(Here):
    """Takes the place of what writes an App's jobs: what goes in is run."""

    def __init__(self, app: App, *, at_commit: bool, lifespan: Any) -> None:
        super().__init__(app.tasks, lifespan)
        self._ids, self._flow_ids = itertools.count(1), itertools.count(1)
        self._commits = Commits(self._committed, self._undone) if at_commit else None
        self._failed: list[Exception] = []
        """Exceptions of jobs that ran when a transaction had committed; the commit is not to raise them."""
        self.ran = Inline()

    def enqueue(self, new: Sequence[NewJob], session: Any = None) -> list[Job]:
        self.check(new)
        if hasattr(session, "run_sync"):
            connection_of(session)  # refuses it, and says what to write
        if session is not None and self._commits is not None:
            return self._keep(new, session, self._commits)
        done = []
        for job in new:
            found, created = self._take(job)
            if created:
                self.run(found)
            done.append(found.answer(created=created))
        return done

    async def aenqueue(self, new: Sequence[NewJob], session: Any = None) -> list[Job]:
        self.check(new)
        if session is not None and self._commits is not None:
            kept: list[Job] = await asynchronous(session).run_sync(lambda sync: self.enqueue(new, sync))
            return kept
        done = []
        for job in new:
            found, created = self._take(job)
            if created:
                await self.arun(found)
            done.append(found.answer(created=created))
        return done

    def seen(self, id: int) -> Seen | None:
        """Return what became of a job of the block; None for what is none."""
        return next((job.seen() for job in self.ran.jobs if job.id == id), None)

    def close(self) -> None:
        """Run nothing any more of what waits for a commit."""
        if self._commits is not None:
            self._commits.close()

    def _take(self, new: NewJob) -> tuple[InlineJob, bool]:
        """Return a job for this one, and whether it is new: the one there is with the same unique key is
        not."""
        live = self._live(new)
        if live is not None:
            live.replaced = new.on_conflict != "keep" and live.state is State.AVAILABLE
            if live.replaced:
                live.new = self._completed(new)
            return live, False
        job = InlineJob(next(self._ids), self._completed(new))
        self.ran.jobs.append(job)
        return job, True

    def _completed(self, new: NewJob) -> NewJob:
        """Return a job with what its task says where the job does not, as a claim writes it into a row."""
        task = self._tasks.find(new.task)
        unsaid = [name for name in ("max_attempts", "on_success", "on_failure") if getattr(new, name) is None]
        return replace(new, **{name: getattr(task, name) for name in unsaid}) if unsaid else new

    def _live(self, new: NewJob) -> InlineJob | None:
        """The job that holds the same unique key: until "start", none that runs holds it."""
        if new.unique_key is None:
            return None
        for job in self.ran.jobs:
            live = job.state is State.AVAILABLE or (
                job.state is State.RUNNING and job.new.unique_until != "start"
            )
            live = live or "pruned" in (job.new.unique_until, new.unique_until)
            if live and (job.new.queue, job.new.unique_key) == (new.queue, new.unique_key):
                return job
        return None

    def after(self, job: JobHere, claimed: ClaimedJob, error: BaseException) -> BaseException | None:
        match error:
            case Cancel():
                job.state = State.CANCELLED
                return None
            case Snooze():
                job.state = State.SCHEDULED
                return None
            case Retry() if claimed.attempts < claimed.max_attempts:
                return None
        job.state = State.FAILED
        job.error = error.__cause__ if isinstance(error, Retry) and error.__cause__ else error
        return job.error

    def follow(self, new: NewJob) -> JobHere:
        return self._take(new)[0]

    def step(self, new: NewJob) -> JobHere:
        return self._take(new)[0]

    # -- flows -----------------------------------------------------------------------------------------------

    def enqueue_flow(self, plan: Plan, session: Any = None) -> EnqueuedFlow:
        self.check(plan.jobs)
        if hasattr(session, "run_sync"):
            connection_of(session)  # refuses it, and says what to write
        flow = FlowHere.of(plan, next(self._flow_ids), self.step)
        if session is not None and self._commits is not None:
            self._keep_flow(flow, session, self._commits)
        else:
            self.run_flow(flow)
        return flow.answer()

    async def aenqueue_flow(self, plan: Plan, session: Any = None) -> EnqueuedFlow:
        self.check(plan.jobs)
        if session is not None and self._commits is not None:
            kept: EnqueuedFlow = await asynchronous(session).run_sync(
                lambda sync: self.enqueue_flow(plan, sync)
            )
            return kept
        flow = FlowHere.of(plan, next(self._flow_ids), self.step)
        await self.arun_flow(flow)
        return flow.answer()

    def _keep_flow(self, flow: FlowHere, session: Any, commits: Commits[_Kept]) -> None:
        conn = connection_to_write(session)
        if isinstance(conn, Borrowed):
            self._keep_for_driver([_Kept(flow, None)], conn.driver)
            return
        commits.add(itself(session), _Kept(flow, session if hasattr(session, "registry") else None))
        note_write(session)

    # -- at a commit -----------------------------------------------------------------------------------------

    def _keep(self, new: Sequence[NewJob], session: Any, commits: Commits[_Kept]) -> list[Job]:
        conn = connection_to_write(session)
        if isinstance(conn, Borrowed):
            taken = [self._take(job) for job in new]
            self._keep_for_driver([_Kept(job, None) for job, created in taken if created], conn.driver)
            return [job.answer(created=created) for job, created in taken]
        scope = session if hasattr(session, "registry") else None
        owner = itself(session)
        done = []
        for job in new:
            found, created = self._take(job)
            if created:
                commits.add(owner, _Kept(found, scope))
            done.append(found.answer(created=created))
        note_write(session)
        return done

    def _keep_for_driver(self, kept: list[_Kept], driver: DriverConnection) -> None:
        """Keep jobs for the commit on a driver's connection, where its library tells of that."""
        if driver.commits_at_once():
            self._committed(kept)
        elif not driver.on_commit(lambda: self._committed(kept)):
            self._undone(kept)
            raise ConfigurationError(
                f"nobody tells of a commit on a connection of {driver.driver}: use inline(app), without "
                'at="commit", where the job runs at once'
            )

    def _undone(self, kept: list[_Kept]) -> None:
        undone = [job for each in kept for job in each.jobs]
        self.ran.jobs[:] = [job for job in self.ran.jobs if job not in undone]

    def _committed(self, kept: list[_Kept]) -> None:
        if _in_greenlet():  # an asynchronous session's commit, on the caller's loop
            await_only(self._arun_committed(kept))
        else:
            for each in kept:
                with self._failing_later(each), _session_of_its_own(each.scope):
                    if isinstance(each.what, FlowHere):
                        self.run_flow(each.what)
                    else:
                        self.run(each.what)

    async def _arun_committed(self, kept: list[_Kept]) -> None:
        for each in kept:
            with self._failing_later(each):
                await (self.arun_flow(each.what) if isinstance(each.what, FlowHere) else self.arun(each.what))

    @contextmanager
    def _failing_later(self, kept: _Kept) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # guard: a-commit-raises-nothing
            job = next((job for job in kept.jobs if job.error is error), kept.jobs[0])
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
