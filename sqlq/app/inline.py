"""Jobs that run where they are enqueued, or when the caller's transaction commits. They are those of an App
in eager mode, and of `sqlq.testing.inline`.

A job takes the same way as in a worker, by JSON, the handler's annotations and the middleware of attempts.
But it runs in the caller's own thread, or on the caller's own event loop, and nothing is written.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import secrets
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from sqlalchemy import Connection
from sqlalchemy.util import await_only, concurrency

from sqlq.app.here import InlineFlow, InlineJob, claimed_here, judged
from sqlq.database.caller.adapter import Adapter
from sqlq.database.caller.session import asynchronous, connection_of, connection_to_write, itself, note_write
from sqlq.database.caller.transactions import Commits, at_the_end_of, session_of_its_own
from sqlq.enqueue.enqueue import check_new
from sqlq.errors import ConfigurationError, NoResultError, SqlqError
from sqlq.model.callbacks import follow_up
from sqlq.model.checks import UniqueUntil
from sqlq.model.flow import EnqueuedFlow, Plan
from sqlq.model.job import ClaimedJob, Job, NewJob, State
from sqlq.model.outcome import Cancelled, Completed, Failed, Outcome, Retried
from sqlq.model.retry import Cancel, Retry, Snooze, decide, describe
from sqlq.model.task import Registry, Task
from sqlq.store.flows.flows import Before, with_results
from sqlq.worker.attempt.attempt import Attempt, Target
from sqlq.worker.attempt.call import UNWRITTEN_GROWTH, Run, acall_handler, call_handler
from sqlq.worker.attempt.context import begin
from sqlq.worker.attempt.own_row import completion

if TYPE_CHECKING:
    from sqlalchemy.orm import scoped_session

log = logging.getLogger("sqlq")

REMEMBERED = 1_000
"""How many jobs that an App has run eagerly it remembers, with their states and results."""
_LARGEST_STORED_ID = 4_000_000_000_000_000_000


class _Kept(NamedTuple):
    """A job or flow that waits for a commit, and the scoped_session through which it was enqueued, if it
    was."""

    what: InlineJob | InlineFlow
    scope: scoped_session[Any] | None

    @property
    def jobs(self) -> Sequence[InlineJob]:
        return self.what.jobs if isinstance(self.what, InlineFlow) else [self.what]


class Here:
    """Takes the place of the part that writes an App's jobs, and runs them. Jobs run at once, or with
    `at_commit` when the transaction that they join has committed."""

    new_id: Callable[[], int]
    new_flow_id: Callable[[], int]
    otherwise: str
    """The advice for a connection that does not report commits."""

    def __init__(
        self, tasks: Registry, *, at_commit: bool, lifespan: Any = None, run: Run | None = None
    ) -> None:
        """`run` runs the coroutine of an `async def` handler for a caller that cannot await it."""
        self._tasks = tasks
        self._lifespan = lifespan
        self._run_coroutine = run
        self._taking = threading.Lock()
        self._commits = Commits[_Kept](self._committed, self._undone) if at_commit else None

    def enqueue(self, new: Sequence[NewJob], session: Any = None) -> list[Job]:
        self._check(new)
        conn, done = self._joined(session), []
        if conn is not None:
            taken = [self._take(job) for job in new]
            self._keep(conn, session, [job for job, created in taken if created])
            return [job.answer(created=created) for job, created in taken]
        for each in new:
            job, created = self._take(each)
            if created:
                self.run(job, self._run_coroutine)
            done.append(job.answer(created=created))
        return done

    async def aenqueue(self, new: Sequence[NewJob], session: Any = None) -> list[Job]:
        if session is not None and self._commits is not None:
            return await asynchronous(session).run_sync(partial(self.enqueue, new))
        self._check(new)
        done = []
        for each in new:
            job, created = self._take(each)
            if created:
                await self.arun(job)
            done.append(job.answer(created=created))
        return done

    def enqueue_flow(self, plan: Plan, session: Any = None) -> EnqueuedFlow:
        self._check(plan.jobs)
        conn = self._joined(session)
        flow = InlineFlow.of(plan, self.new_flow_id(), self._next)
        if conn is None:
            self.run(flow, self._run_coroutine)
        else:
            self._keep(conn, session, [flow])
        return flow.answer()

    async def aenqueue_flow(self, plan: Plan, session: Any = None) -> EnqueuedFlow:
        if session is not None and self._commits is not None:
            return await asynchronous(session).run_sync(partial(self.enqueue_flow, plan))
        self._check(plan.jobs)
        flow = InlineFlow.of(plan, self.new_flow_id(), self._next)
        await self.arun(flow)
        return flow.answer()

    def find(self, id: int) -> InlineJob | None:
        """Return a job that ran here, or will; None for an unknown id, or a job that is forgotten."""
        return next((job for job in self.jobs if job.id == id), None)

    # -- the known jobs --------------------------------------------------------------------------------------

    @property
    def jobs(self) -> Sequence[InlineJob]:
        """The jobs that are known."""
        raise NotImplementedError

    def add(self, job: InlineJob) -> None:
        """Know a job."""
        raise NotImplementedError

    def forget(self, jobs: Sequence[InlineJob]) -> None:
        """Know jobs no more, whose transaction was rolled back."""
        raise NotImplementedError

    def begun(self, job: InlineJob) -> None:
        """Called when an attempt begins."""

    def failed(self, job: InlineJob, error: Exception) -> None:
        """Called with the exception of a job that ran after a commit. The commit has succeeded, and raises
        nothing."""
        raise NotImplementedError

    def _check(self, new: Sequence[NewJob]) -> None:
        """Raise `EnqueueError` for anything that is no job, and for a job whose handler is not here."""
        check_new(new)
        for job in new:
            self._tasks.find(job.task)

    def _take(self, new: NewJob) -> tuple[InlineJob, bool]:
        """Return a job for this one, and whether it is new: an existing one with the same unique key is
        not."""
        with self._taking:
            live = (
                None if new.unique_key is None else self.holder(new.queue, new.unique_key, new.unique_until)
            )
            if live is not None:
                live.replaced = new.on_conflict != "keep" and live.state is State.AVAILABLE
                if live.replaced:
                    live.new = self._completed(new)
                return live, False
            job = InlineJob(self.new_id(), self._completed(new))
            self.add(job)
            return job, True

    def _next(self, new: NewJob) -> InlineJob:
        """Return a job for a step of a flow, or for the callback of another job."""
        return self._take(new)[0]

    def _completed(self, new: NewJob) -> NewJob:
        """Return a job with the options of its task where it has none, as a claim writes them into a row."""
        task = self._tasks.find(new.task)
        unsaid = [name for name in ("max_attempts", "on_success", "on_failure") if getattr(new, name) is None]
        return replace(new, **{name: getattr(task, name) for name in unsaid}) if unsaid else new

    def holder(self, queue: str, key: str, until: UniqueUntil = "finish") -> InlineJob | None:
        """Return the job that holds a unique key: until "start", none that runs holds it."""
        for job in self.jobs:
            live = job.state is State.AVAILABLE or (
                job.state is State.RUNNING and job.new.unique_until != "start"
            )
            live = live or "pruned" in (job.new.unique_until, until)
            if live and (job.new.queue, job.new.unique_key) == (queue, key):
                return job
        return None

    # -- at a commit -----------------------------------------------------------------------------------------

    def _joined(self, session: Any) -> Any:
        """Return the connection for whose commit jobs wait; None where they run at once."""
        if hasattr(session, "run_sync"):
            connection_of(session)  # refuses it, with advice
        return None if session is None or self._commits is None else connection_to_write(session)

    def _keep(self, conn: Any, session: Any, what: Sequence[InlineJob | InlineFlow]) -> None:
        """Keep jobs or a flow for the commit."""
        kept = [_Kept(each, session if hasattr(session, "registry") else None) for each in what]
        if not isinstance(conn, Adapter):
            assert self._commits is not None
            for each in kept:
                self._commits.add(itself(session), each)
            note_write(session)
            return
        if conn.driver.commits_at_once():
            self._committed(kept)
        elif not conn.driver.on_commit(lambda: self._committed(kept)):
            self._undone(kept)
            raise ConfigurationError(
                f"nobody tells of a commit on a connection of {conn.driver.driver}: {self.otherwise}, where "
                "the job runs at once"
            )

    def _undone(self, kept: list[_Kept]) -> None:
        self.forget([job for each in kept for job in each.jobs])

    def _committed(self, kept: list[_Kept]) -> None:
        if _in_greenlet():  # an asynchronous session's commit, on the caller's loop
            await_only(self._arun_committed(kept))
        else:
            for each in kept:
                with self._failing_later(each), session_of_its_own(each.scope):
                    self.run(each.what, self._run_coroutine)

    async def _arun_committed(self, kept: list[_Kept]) -> None:
        for each in kept:
            with self._failing_later(each):
                await self.arun(each.what)

    @contextmanager
    def _failing_later(self, kept: _Kept) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # guard: a-commit-raises-nothing
            self.failed(next((job for job in kept.jobs if job.error is error), kept.jobs[0]), error)

    # -- running ---------------------------------------------------------------------------------------------

    def after(self, job: InlineJob, claimed: ClaimedJob, error: BaseException) -> BaseException | None:
        """Give a job its state after an attempt that raised. Return the exception for the caller, if any.
        Where the state stays `running`, the next attempt follows at once."""
        raise NotImplementedError

    def _run_flow(self, flow: InlineFlow, run: Run | None = None) -> None:
        """Run the steps of a flow, each when those before it have ended as it wants. Steps that wait for the
        success of a failed one stay blocked. The first exception is raised at the end."""
        raised: BaseException | None = None
        for job in self._in_turn(flow):
            try:
                self.run(job, run)
            except Exception as error:
                raised = raised or error
        if raised is not None:
            raise raised

    async def _arun_flow(self, flow: InlineFlow) -> None:
        """The same on this event loop."""
        raised: BaseException | None = None
        for job in self._in_turn(flow):
            try:
                await self.arun(job)
            except Exception as error:
                raised = raised or error
        if raised is not None:
            raise raised

    def _in_turn(self, flow: InlineFlow) -> Iterator[InlineJob]:
        """Yield the jobs to run, and give the others their state; also those that a job adds meanwhile."""
        turn = 0
        while turn < len(flow.jobs):
            job, edges = flow.jobs[turn], flow.edges[turn]
            turn += 1
            job.state = judged(edges)
            if job.state is State.AVAILABLE:
                job.before = [self._before(before) for before, _ in edges]
                payload, why = with_results(job.new.payload, job.before)
                job.new = replace(job.new, payload=payload)
                if why is not None:
                    job.unmet = f"{job.new.task} takes a result that is not there: {why}"
                yield job
                if job.grown is not None:
                    flow.extend(job.grown.plan(), self._next, job)

    def _before(self, job: InlineJob) -> Before:
        if job.state is not State.FINISHED:
            return Before(job.id, job.new.task, None, f"job {job.id} ({job.new.task}) is {job.state}")
        task = self._tasks.find(job.new.task)
        done = completion(job.result, claimed_here(job, task), task)
        return Before(job.id, job.new.task, done.result, done.note)

    def run(self, job: InlineJob | InlineFlow, run: Run | None = None) -> None:
        """Run a job, or a flow, to its end in this thread; `run` runs the coroutine of an `async def`
        handler."""
        if isinstance(job, InlineFlow):
            return self._run_flow(job, run)
        task = job.known = self._tasks.find(job.new.task)
        job.state = State.RUNNING
        try:
            while job.state is State.RUNNING:
                with self._attempting(job, task) as claimed:
                    # in a copy of the context, so that the handler's current_job() is not the caller's
                    attempt = contextvars.copy_context().run
                    job.result = attempt(self._attempt, job, task, claimed, run or on_a_loop_of_its_own)
        finally:
            if (follower := self._follower(job, task)) is not None:
                self.run(follower, run)

    async def arun(self, job: InlineJob | InlineFlow) -> None:
        """Run a job, or a flow, to its end on this event loop, the handler of a `def` task in a thread."""
        if isinstance(job, InlineFlow):
            await self._arun_flow(job)
            return
        task = job.known = self._tasks.find(job.new.task)
        if not task.is_async:
            loop = asyncio.get_running_loop()
            await asyncio.to_thread(
                self._run_in_thread, job, lambda work: asyncio.run_coroutine_threadsafe(work, loop).result()
            )
            return
        job.state = State.RUNNING
        try:
            while job.state is State.RUNNING:
                with self._attempting(job, task) as claimed:
                    # a task of its own, whose context ends with it
                    job.result = await asyncio.create_task(self._aattempt(job, task, claimed))
        finally:
            if (follower := self._follower(job, task)) is not None:
                await self.arun(follower)

    def _run_in_thread(self, job: InlineJob, run: Run) -> None:
        """Run a job for a caller on an event loop. No future takes a StopIteration there, so the caller gets
        a RuntimeError, as from a coroutine."""
        try:
            self.run(job, run)
        except StopIteration as error:  # guard: a-stop-iteration-keeps-nobody-waiting
            raise RuntimeError(f"{job.new.task} raised StopIteration") from error

    @contextmanager
    def _attempting(self, job: InlineJob, task: Task[..., Any]) -> Iterator[ClaimedJob]:
        """Count an attempt that the block makes, and give the job its state afterwards."""
        job.attempts += 1
        claimed, reaching = claimed_here(job, task), None
        try:
            yield claimed
            job.state = State.FINISHED
        except BaseException as error:
            reaching = self.after(job, claimed, error)
            if reaching is error:
                raise
        if reaching is not None:
            raise reaching

    def _follower(self, job: InlineJob, task: Task[..., Any]) -> InlineJob | None:
        """Return the job that follows one that has ended; None without one."""
        job.ended_at = datetime.now(UTC)
        outcomes: dict[State, Outcome] = {State.FINISHED: Completed(), State.CANCELLED: Cancelled()}
        if job.error is not None:
            outcomes[State.FAILED] = Failed("error", describe(job.error))
        outcome = outcomes.get(job.state)
        new = None if outcome is None else follow_up(claimed_here(job, task), outcome)
        return None if new is None else self._next(new)

    def _attempt(self, job: InlineJob, task: Task[..., Any], claimed: ClaimedJob, run: Run) -> Any:
        running = self._begun(job, task, claimed)
        result = run(acall_handler(running)) if task.is_async else call_handler(running, run)
        return self._ended(job, running, result)

    async def _aattempt(self, job: InlineJob, task: Task[..., Any], claimed: ClaimedJob) -> Any:
        running = self._begun(job, task, claimed)
        return self._ended(job, running, await acall_handler(running))

    def _ended(self, job: InlineJob, running: Attempt, result: Any) -> Any:
        """Return the result of an attempt that has not raised."""
        if running.growth is None or not running.growth.steps:
            return result
        if not running.completed:
            raise SqlqError(UNWRITTEN_GROWTH)
        job.grown = running.growth
        return result

    def _begun(self, job: InlineJob, task: Task[..., Any], claimed: ClaimedJob) -> Attempt:
        """Begin an attempt in this context."""
        running = Attempt(claimed, task, float("inf"), Target(tasks=self._tasks))
        running.lifespan = self._lifespan
        running.on_saved = partial(self._saved, job)
        job.attempted_at.append(datetime.now(UTC))
        self.begun(job)
        running.before = job.before
        if job.unmet is not None:  # guard: an-unmet-step-fails-alone
            raise NoResultError(job.unmet)
        running.arguments = task.arguments(claimed.payload)
        begin(running)
        return running

    def _saved(self, job: InlineJob, conn: Connection, cursor: str) -> None:
        """Let the next attempt begin at a cursor if the transaction that saved it commits."""
        keep = partial(setattr, job, "cursor", cursor)
        if not isinstance(conn, Adapter):
            at_the_end_of(conn, committed=keep)
        elif not conn.driver.on_commit(keep):  # this driver does not report commits
            keep()


def is_on_a_loop() -> bool:
    """Whether the caller runs on an event loop."""
    try:
        return asyncio.get_running_loop() is not None
    except RuntimeError:
        return False


def on_a_loop_of_its_own(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine on an event loop of its own, but below `run_sync` on the caller's. If the caller is
    otherwise on a loop, it runs in a thread, and that loop stands still meanwhile, as in any call."""
    if not is_on_a_loop():
        return asyncio.run(work)
    if _in_greenlet():  # below `run_sync`, whose caller's loop can run it
        task = asyncio.get_running_loop().create_task(work, context=contextvars.copy_context())
        return await_only(task)
    with ThreadPoolExecutor(1, "sqlq-inline") as thread:
        return thread.submit(contextvars.copy_context().run, asyncio.run, work).result()


class EagerEnqueuer(Here):
    """Runs the jobs of an App, or of a call, that is eager. A job is run until it has finished, or has failed
    for good. A job that is enqueued with a session waits for its commit."""

    otherwise = "enqueue after the commit, without a session"

    def __init__(self, tasks: Registry, run: Run | None = None) -> None:
        super().__init__(tasks, at_commit=True, run=run)
        self._known: weakref.WeakValueDictionary[int, InlineJob] = weakref.WeakValueDictionary()
        """Weak references: a job that waits for a commit is kept as long as its session, and no longer."""
        self._last: deque[InlineJob] = deque(maxlen=REMEMBERED)
        self.new_id = self.new_flow_id = _new_id

    @property
    def jobs(self) -> Sequence[InlineJob]:
        return [job for known in self._known.valuerefs() if (job := known()) is not None]

    def add(self, job: InlineJob) -> None:
        self._known[job.id] = job

    def forget(self, jobs: Sequence[InlineJob]) -> None:
        for job in jobs:
            self._known.pop(job.id, None)

    def failed(self, job: InlineJob, error: Exception) -> None:
        log.error(
            "%s, run eagerly when its transaction had committed, failed in attempt %d of %d",
            *(job.new.task, job.attempts, job.new.max_attempts),
            exc_info=error,
            extra=_about(job, "failed"),
        )

    def begun(self, job: InlineJob) -> None:
        self._last.append(job)

    def after(self, job: InlineJob, claimed: ClaimedJob, error: BaseException) -> BaseException | None:
        if isinstance(error, Cancel):
            job.state = State.CANCELLED
            return None
        if isinstance(error, Snooze):
            # Nothing is written, so the job cannot run later. To return would lose it silently.
            error.add_note(f"{claimed.task} ran eagerly, and cannot be run again later")
        elif isinstance(error, Exception):
            outcome = decide(claimed, error, self._tasks.find(claimed.task).retry)
            if isinstance(outcome, Retried):
                log.warning(
                    "%s, run eagerly, failed in attempt %d of %d, and is tried again at once: %s",
                    *(claimed.task, claimed.attempts, claimed.max_attempts, outcome.error.message),
                    extra=_about(job, "retried"),
                )
                return None
        job.state = State.FAILED
        job.error = error.__cause__ if isinstance(error, Retry) and error.__cause__ else error
        return job.error


def _about(job: InlineJob, event: str) -> dict[str, Any]:
    return {"job_id": job.id, "task": job.new.task, "queue": job.new.queue, "event": event}


def _new_id() -> int:
    """Return an id that no job in a database has, since handlers make idempotency keys of it."""
    return _LARGEST_STORED_ID + 1 + secrets.randbits(61)


def _in_greenlet() -> bool:
    return "greenlet" in sys.modules and concurrency.in_greenlet()
