"""Jobs that run where they are enqueued, or when the caller's transaction commits. They are those of an App
in eager mode, and of `sqlq.testing.inline`.

A job takes the same way as in a worker, by JSON, the handler's annotations and the middleware of attempts.
But it runs in the caller's own thread, or on the caller's own event loop, and nothing is written. One
coroutine serves both callers: for a synchronous one it waits for nothing, so `at_once` runs it.
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
from collections.abc import Callable, Coroutine, Iterator, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from sqlalchemy.util import await_only, concurrency

from sqlq.app.here import InlineJob, judged, steps_of
from sqlq.config.constants import WAIT_TASK
from sqlq.database.caller.session import (
    CallersTransaction,
    asynchronous,
    connection_of,
    transaction_to_write,
)
from sqlq.database.caller.transactions import session_of_its_own
from sqlq.enqueue.enqueue import Batch
from sqlq.errors import ConfigurationError, NoResultError, SqlqError
from sqlq.model.flow import Plan, plan_of
from sqlq.model.flow_parts import EnqueuedFlow
from sqlq.model.job import NewJob, State
from sqlq.model.outcome import NOT_NEEDED, Cancelled, Failed, Finished, Outcome, Retried, follow_up
from sqlq.model.retry import Cancel, Retry, Snooze, decide, describe
from sqlq.model.task import AnyTask, Registry, make_task
from sqlq.store.flows.flows import with_results
from sqlq.worker.attempt.attempt import Attempt, Target
from sqlq.worker.attempt.call import UNWRITTEN_GROWTH, Run, acall_handler, call_handler
from sqlq.worker.attempt.context import begin

if TYPE_CHECKING:
    from sqlalchemy.orm import scoped_session

log = logging.getLogger("sqlq")

REMEMBERED = 1_000
"""How many jobs that an App has run eagerly it remembers, with their states and results."""
_LARGEST_STORED_ID = 4_000_000_000_000_000_000

Calls = Callable[[contextvars.Context, Attempt], Coroutine[Any, Any, Any]]
"""Calls the handler of an attempt in a context, and returns its result."""


WAIT: AnyTask = make_task(print, name=WAIT_TASK)
"""The task of a step that waits for a signal."""


class Here:
    """Takes the place of the part that writes an App's jobs, and runs them. Jobs run at once, or with
    `at_commit` when the transaction that they join has committed."""

    new_id: Callable[[], int]
    signals: dict[str, str | None] | None = None
    """The values of signals, as JSON, by their names; None where no job can wait for one."""
    is_closed = False
    """Whether what waits for a commit runs no more."""

    def __init__(
        self,
        tasks: Registry,
        known: MutableMapping[int, InlineJob],
        *,
        at_commit: bool,
        lifespan: Any = None,
        run: Run | None = None,
    ) -> None:
        """`known` keeps the jobs by their ids. `run` runs the coroutine of an `async def` handler for a
        caller that cannot await it."""
        self._tasks = tasks
        self._lifespan = lifespan
        self._run_coroutine = run or on_a_loop_of_its_own
        self._taking = threading.RLock()
        self._known = known
        self._last: deque[InlineJob] = deque(maxlen=REMEMBERED)
        """Those that ran last: `known` may keep weak references."""
        self._at_commit = at_commit

    def enqueue(self, batch: Batch, session: Any = None) -> Any:
        return at_once(self._enqueue(batch, session, self._call_here))

    async def aenqueue(self, batch: Batch, session: Any = None) -> Any:
        if session is not None and self._at_commit:
            return await asynchronous(session).run_sync(partial(self.enqueue, batch))
        return await self._enqueue(batch, None, _call_on_loop)

    async def _enqueue(self, batch: Batch, session: Any, call: Calls) -> Any:
        for new in batch.jobs if isinstance(batch, Plan) else batch:
            self._find(new)  # raises for a job whose handler is not here
        if hasattr(session, "run_sync"):
            connection_of(session)  # refuses it, with advice
        joined = transaction_to_write(session) if session is not None and self._at_commit else None
        if isinstance(batch, Plan):
            jobs = steps_of(batch, self._next)
            await self._run_or_keep(jobs, joined, session, call)
            steps = tuple(job.answer(created=True) for job in jobs)
            return EnqueuedFlow(jobs[0].id, batch.name, steps, *batch[3:])
        answers = []
        for new in batch:
            job, created = self._take(new)
            if created:
                await self._run_or_keep([job], joined, session, call)
            answers.append(job.answer(created=created))
        return answers

    @property
    def jobs(self) -> list[InlineJob]:
        """The jobs that are known, in the order in which they were enqueued."""
        with self._taking:
            return list(self._known.values())

    def find(self, id: int) -> InlineJob | None:
        """Return a job that ran here, or will; None for an unknown id, or a job that is forgotten."""
        return self._known.get(id)

    def answer(self, job: InlineJob) -> None:
        """Give a job that waits for a signal its state."""
        raise NotImplementedError

    # -- what differs in eager mode and in the test kit ------------------------------------------------------

    def signal(self, name: str, value: str | None, keep_ms: int, session: Any = None) -> bool:
        """Send a signal to the jobs here."""
        raise NotImplementedError

    def failed(self, job: InlineJob, error: Exception) -> None:
        """Called with the exception of a job that ran after a commit. The commit has succeeded, and raises
        nothing."""
        raise NotImplementedError

    def continues(self, job: InlineJob, error: BaseException) -> bool:
        """Whether a job has not failed by an attempt that raised. Where its state stays `running`, the next
        attempt follows at once."""
        raise NotImplementedError

    def _take(self, new: NewJob) -> tuple[InlineJob, bool]:
        """Return a job for this one, and whether it is new: an existing one with the same unique key is
        not."""
        task = self._find(new)
        # what a claim takes from the task
        unset = [name for name in ("max_attempts", "on_success", "on_failure") if getattr(new, name) is None]
        new = replace(new, **{name: getattr(task, name) for name in unset})
        with self._taking:
            others = [] if new.unique_key is None else self.jobs
            live = next((job for job in others if job.holds(new.queue, new.unique_key)), None)
            if live is not None:
                live.replaced = new.on_conflict != "keep" and live.state is State.AVAILABLE
                if live.replaced:
                    live.new = new
                return live, False
            job = InlineJob(self.new_id(), new, task)
            if task is WAIT:
                job.signal, job.timeout_ms = new.label, new.timeout_ms
            self._known[job.id] = job
            return job, True

    def _find(self, new: NewJob) -> AnyTask:
        """Return the task of a job. Raises `UnknownTaskError` for one that is not here, and
        `ConfigurationError` for a wait for a signal where there are none."""
        if new.task != WAIT_TASK:
            return self._tasks.find(new.task)
        if self.signals is None:
            raise ConfigurationError(
                f"an eager job waits for nothing, and the step waits for the signal {new.label}: enqueue its "
                "flow with eager=False, or test it with sqlq.testing.inline"
            )
        return WAIT

    def _next(self, new: NewJob) -> InlineJob:
        """Return a job for a step of a flow, or for the callback of another job."""
        return self._take(new)[0]

    # -- at a commit -----------------------------------------------------------------------------------------

    async def _run_or_keep(
        self, jobs: list[InlineJob], joined: CallersTransaction | None, session: Any, call: Calls
    ) -> None:
        """Run a job or a flow, or keep it for the commit of the transaction that it joins."""
        if joined is None:
            await self._run_all(jobs, call)
            return
        scope = session if hasattr(session, "registry") else None
        if not joined.when_over(partial(self._committed, jobs, scope), partial(self._forget, jobs)):
            self._forget(jobs)
            raise ConfigurationError(
                f"no commit on a connection of {joined.conn.driver} is reported: enqueue after the commit, "
                'without a session, or in an inline block without at="commit", where the job runs at once'
            )

    def _forget(self, jobs: list[InlineJob]) -> None:
        for job in jobs:
            self._known.pop(job.id, None)

    def _committed(self, jobs: list[InlineJob], scope: scoped_session[Any] | None) -> None:
        if self.is_closed:
            return
        if _in_greenlet():  # an asynchronous session's commit, on the caller's loop
            await_only(self._run_committed(jobs, None, _call_on_loop))
        else:
            at_once(self._run_committed(jobs, scope, self._call_here))

    async def _run_committed(
        self, jobs: list[InlineJob], scope: scoped_session[Any] | None, call: Calls
    ) -> None:
        """Run jobs that were enqueued through the scoped_session `scope`, if there is one."""
        try:
            with session_of_its_own(scope):
                await self._run_all(jobs, call)
        except Exception as error:  # guard: a-commit-raises-nothing
            self.failed(next((job for job in jobs if job.error is error), jobs[0]), error)

    # -- running ---------------------------------------------------------------------------------------------

    async def _run(self, job: InlineJob, call: Calls) -> None:
        """Run a job to its end."""
        job.state = State.RUNNING
        try:
            while job.state is State.RUNNING:
                await self._attempt(job, call)
        finally:
            if (follower := self._follower(job)) is not None:
                await self._run(follower, call)

    async def _run_all(self, jobs: list[InlineJob], call: Calls) -> None:
        """Run a job, or the steps of a flow, each when those before it have ended as it wants. Steps that
        wait for the success of a failed one stay blocked. The first exception is raised at the end."""
        raised: BaseException | None = None
        for job in self._in_turn(jobs):
            try:
                await self._run(job, call)
            except Exception as error:
                raised = raised or error
        if raised is not None:
            raise raised

    def _in_turn(self, jobs: list[InlineJob]) -> Iterator[InlineJob]:
        """Yield the jobs to run, and give the others their state; also those that a job adds meanwhile."""
        for job in jobs:
            if job.state not in (State.AVAILABLE, State.BLOCKED):
                continue  # it had its turn before a signal came
            job.state = judged(job)
            if job.signal is not None and job.state is State.AVAILABLE:
                self.answer(job)
            if job.flow_id is None and job.state is State.AVAILABLE:
                yield job
            elif job.state is State.AVAILABLE:
                job.before = [before.as_before(when) for before, when in job.waits]
                yield job
                if job.grown is not None:
                    jobs += steps_of(plan_of(job.grown), self._next, job)

    async def _attempt(self, job: InlineJob, call: Calls) -> None:
        """Make an attempt, and give the job its state afterwards."""
        job.attempts += 1
        context = contextvars.copy_context()  # so that the handler's current_job() is not the caller's
        try:
            running = context.run(self._begin, job)
            result = await call(context, running)
            if running.growth is not None and running.growth.steps:
                if not running.completed:
                    raise SqlqError(UNWRITTEN_GROWTH)
                job.grown = running.growth
            job.result, job.state = result, State.FINISHED
            return
        except Cancel as cancel:
            job.state, job.reason = State.CANCELLED, cancel.reason
            return
        except BaseException as error:
            if self.continues(job, error):
                return
            job.state = State.FAILED
            job.error = error.__cause__ if isinstance(error, Retry) and error.__cause__ else error
            if job.error is error:
                raise
        raise job.error

    def _begin(self, job: InlineJob) -> Attempt:
        """Begin an attempt in this context."""
        job.attempted_at.append(datetime.now(UTC))
        self._last.append(job)
        payload, why = with_results(job.new.payload, job.before or [])
        if why == NOT_NEEDED:
            raise Cancel(NOT_NEEDED)
        if why is not None:  # guard: an-unmet-step-fails-alone
            raise NoResultError(f"{job.task.name} takes a result that is not there: {why}")
        job.new = replace(job.new, payload=payload)
        running = Attempt(job.claimed(), job.task, float("inf"), Target(tasks=self._tasks))
        running.lifespan = self._lifespan
        running.on_saved = partial(self._saved, job)
        running.before, running.wait = job.before, job.wait
        running.arguments = job.task._interface.arguments(payload)
        begin(running)
        return running

    async def _call_here(self, context: contextvars.Context, running: Attempt) -> Any:
        """Call a handler in this thread, without waiting for anything."""
        if _is_async(running):
            return context.run(self._run_coroutine, acall_handler(running))
        return context.run(_call, running, self._run_coroutine)

    def _follower(self, job: InlineJob) -> InlineJob | None:
        """Return the job that follows one that has ended; None without one."""
        job.ended_at = datetime.now(UTC)
        outcome: Outcome | None = None
        if job.state is State.FINISHED:
            outcome = Finished()
        elif job.state is State.CANCELLED:
            outcome = Cancelled()
        elif job.error is not None:
            outcome = Failed("error", describe(job.error))
        new = None if outcome is None else follow_up(job.claimed(), outcome)
        return None if new is None else self._next(new)

    def _saved(self, job: InlineJob, joined: CallersTransaction | None, cursor: str) -> None:
        """Let the next attempt begin at a cursor if the transaction that saved it commits."""
        keep = partial(setattr, job, "cursor", cursor)
        # some drivers report no commits
        if joined is None or not joined.at_the_end(committed=keep):
            keep()


def at_once(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that waits for nothing, and return its result."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("a coroutine that should wait for nothing has waited")


async def _call_on_loop(context: contextvars.Context, running: Attempt) -> Any:
    """Call an `async def` handler on this event loop, and a `def` handler in a thread."""
    loop = asyncio.get_running_loop()
    if _is_async(running):
        return await loop.create_task(acall_handler(running), context=context)

    def run(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    return await loop.run_in_executor(None, context.run, _call, running, run)


def _call(running: Attempt, run: Run) -> Any:
    """Call a `def` handler. Neither a coroutine nor a future takes a StopIteration, so the caller gets a
    RuntimeError."""
    try:
        return call_handler(running, run)
    except StopIteration as error:  # guard: a-stop-iteration-keeps-nobody-waiting
        raise RuntimeError(f"{running.task} raised StopIteration") from error


def _is_async(running: Attempt) -> bool:
    return running.registered is not None and running.registered.is_async


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
        return await_only(asyncio.get_running_loop().create_task(work, context=contextvars.copy_context()))
    with ThreadPoolExecutor(1, "sqlq-inline") as thread:
        return thread.submit(contextvars.copy_context().run, asyncio.run, work).result()


class EagerEnqueuer(Here):
    """Runs the jobs of an App, or of a call, that is eager. A job is run until it has finished, or has failed
    for good. A job that is enqueued with a session waits for its commit."""

    def __init__(self, tasks: Registry, run: Run | None = None) -> None:
        # weak references: a job that waits for a commit is kept as long as its session, and no longer
        super().__init__(tasks, weakref.WeakValueDictionary(), at_commit=True, run=run)

    def new_id(self) -> int:
        """Return an id that no job in a database has, since handlers make idempotency keys of it."""
        return _LARGEST_STORED_ID + 1 + secrets.randbits(61)

    def failed(self, job: InlineJob, error: Exception) -> None:
        log.error(
            "%s, run eagerly when its transaction had committed, failed in attempt %d of %d",
            job.new.task,
            job.attempts,
            job.new.max_attempts,
            exc_info=error,
            extra=_about(job, "failed"),
        )

    def continues(self, job: InlineJob, error: BaseException) -> bool:
        if isinstance(error, Snooze):
            # Nothing is written, so the job cannot run later. To return would lose it silently.
            error.add_note(f"{job.task.name} ran eagerly, and cannot be run again later")
            return False
        if not isinstance(error, Exception):
            return False
        outcome = decide(job.claimed(), error, job.task.retry)
        if not isinstance(outcome, Retried):
            return False
        log.warning(
            "%s, run eagerly, failed in attempt %d of %d, and is tried again at once: %s",
            job.task.name,
            job.attempts,
            job.new.max_attempts,
            outcome.error.message,
            extra=_about(job, "retried"),
        )
        return True


def _about(job: InlineJob, event: str) -> dict[str, Any]:
    return {"job_id": job.id, "task": job.new.task, "queue": job.new.queue, "event": event}


def _in_greenlet() -> bool:
    return "greenlet" in sys.modules and concurrency.in_greenlet()
