"""Jobs that run where they are enqueued: those of an App in eager mode, and of `sqlq.testing.inline`.

A job goes the way that it goes in a worker, by JSON, the handler's annotations and what surrounds attempts;
but in the caller's own thread or on the caller's own event loop, and nothing of it is written.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import secrets
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sqlalchemy import Connection, event

from sqlq.borrowed import Borrowed
from sqlq.endings import follow_up
from sqlq.enqueue import check_new
from sqlq.errors import NoResultError, SqlqError
from sqlq.flow import GROWN_FROM, EnqueuedFlow, Growth, Plan, When
from sqlq.job import ClaimedJob, Job, NewJob, State
from sqlq.outcome import Completed, Failed, Retried
from sqlq.results import JobRunHere
from sqlq.retry import Cancel, Retry, Snooze, decide, describe
from sqlq.store.flows import Before, with_results
from sqlq.store.results import Seen
from sqlq.task import Registry, Task
from sqlq.worker.execute import UNWRITTEN_GROWTH, Run, acall_handler, call_handler
from sqlq.worker.result import completion
from sqlq.worker.running import RunningJob

log = logging.getLogger("sqlq")

_LARGEST_STORED_ID = 4_000_000_000_000_000_000


@dataclass
class JobHere:
    """A job that runs where it is enqueued: what it was, and what became of it. When it has `failed`, `error`
    is the exception that reaches the caller."""

    id: int
    new: NewJob
    state: State = State.AVAILABLE
    attempts: int = 0
    result: Any = None
    error: BaseException | None = None
    cursor: str | None = None
    """What its checkpoints have saved, as JSON."""
    replaced = False
    """Whether the last one that was asked for with its unique key took its place."""
    flow_id: int | None = None
    before: list[Before] | None = None
    """The steps before it, where it is one of a flow."""
    grown: Growth | None = None
    """What its handler has added to that flow."""
    unmet: str | None = None
    """Which of their results it takes and cannot have."""
    known: Task[..., Any] | None = None
    """Its task, once it has been run."""

    def answer(self, *, created: bool) -> Job:
        """Return what `enqueue` answers."""
        replaced = self.replaced and not created
        what = (self.id, self.new.queue, self.new.task, self.state)
        return JobRunHere(*what, created=created, replaced=replaced, look=self.seen)

    def seen(self) -> Seen:
        """Return what became of it, as its row would have it."""
        what = (self.id, self.state, self.new.queue, self.new.task, self.attempts)
        if self.state is State.FAILED and self.error is not None:
            error = describe(self.error)
            return Seen(*what, None, "error", error.exception, error.message, error.traceback)
        if self.state is not State.FINISHED or self.known is None:
            return Seen(*what)
        done = completion(self.result, _claimed(self, self.known), self.known)
        return Seen(*what, done.result, done.note)


@dataclass
class FlowHere:
    """A flow that runs where it is enqueued: its jobs, in the order in which their steps were added."""

    id: int
    name: str | None
    jobs: list[JobHere]
    edges: list[list[tuple[JobHere, When]]]
    """Of each job those that it waits for, in the order in which they were named."""
    ends: tuple[int, ...] = ()
    is_list: bool = False

    @classmethod
    def of(cls, plan: Plan, id: int, make: Callable[[NewJob], JobHere]) -> FlowHere:
        flow = cls(id, plan.name, [], [], plan.ends, plan.is_list)
        flow.extend(plan, make)
        return flow

    def extend(
        self, plan: Plan, make: Callable[[NewJob], JobHere], grown_from: JobHere | None = None
    ) -> None:
        """Add what a plan says; `grown_from` is the job whose handler has added it."""
        new = [make(job) for job in plan.jobs]
        waits: list[list[tuple[JobHere, When]]] = [[] for _ in new]
        for edge in plan.edges:
            before = grown_from if edge.after == GROWN_FROM else new[edge.after]
            assert before is not None
            waits[edge.step].append((before, edge.when))
        for job, edges in zip(new, waits, strict=True):
            job.flow_id = self.id
            job.state = State.BLOCKED if edges else State.AVAILABLE
        self.jobs += new
        self.edges += waits

    def answer(self) -> EnqueuedFlow:
        """Return what `enqueue` answers."""
        jobs = tuple(job.answer(created=True) for job in self.jobs)
        return EnqueuedFlow(self.id, self.name, jobs, self.ends, self.is_list)


class Here:
    """Runs jobs here and now."""

    def __init__(self, tasks: Registry, lifespan: Any = None) -> None:
        self._tasks = tasks
        self._lifespan = lifespan

    def check(self, new: Sequence[NewJob]) -> None:
        """Raise `EnqueueError` for what is no job, and for a job whose handler is not here."""
        check_new(new)
        for job in new:
            self._tasks.find(job.task)

    def after(self, job: JobHere, claimed: ClaimedJob, error: BaseException) -> BaseException | None:
        """Give a job its state after an attempt that raised, and return what is to reach the caller. Where
        the state stays `running`, the next attempt follows at once."""
        raise NotImplementedError

    def follow(self, new: NewJob) -> JobHere:
        """Return a job for one that follows the end of another, to be run next."""
        raise NotImplementedError

    def step(self, new: NewJob) -> JobHere:
        """Return a job for a step of a flow."""
        raise NotImplementedError

    def run_flow(self, flow: FlowHere, run: Run | None = None) -> None:
        """Run the steps of a flow, each when those before it have ended as it wants; what comes after one
        that failed stays blocked. The first exception is raised at the end."""
        raised: BaseException | None = None
        for job in self._in_turn(flow):
            try:
                self.run(job, run)
            except Exception as error:
                raised = raised or error
        if raised is not None:
            raise raised

    async def arun_flow(self, flow: FlowHere) -> None:
        """The same on this event loop."""
        raised: BaseException | None = None
        for job in self._in_turn(flow):
            try:
                await self.arun(job)
            except Exception as error:
                raised = raised or error
        if raised is not None:
            raise raised

    def _in_turn(self, flow: FlowHere) -> Iterator[JobHere]:
        """Yield the jobs to run, and give the others their state; also those that a job adds meanwhile."""
        turn = 0
        while turn < len(flow.jobs):
            job, edges = flow.jobs[turn], flow.edges[turn]
            turn += 1
            job.state = _judged(edges)
            if job.state is State.AVAILABLE:
                job.before = [self._before(before) for before, _ in edges]
                payload, why = with_results(job.new.payload, job.before)
                job.new = replace(job.new, payload=payload)
                if why is not None:
                    job.unmet = f"{job.new.task} takes a result that is not there: {why}"
                yield job
                if job.grown is not None:
                    flow.extend(job.grown.plan(), self.step, job)

    def _before(self, job: JobHere) -> Before:
        if job.state is not State.FINISHED:
            return Before(job.id, job.new.task, None, f"job {job.id} ({job.new.task}) is {job.state}")
        task = self._tasks.find(job.new.task)
        done = completion(job.result, _claimed(job, task), task)
        return Before(job.id, job.new.task, done.result, done.note)

    def run(self, job: JobHere, run: Run | None = None) -> None:
        """Run a job to its end in this thread; `run` runs the coroutine of an `async def` handler."""
        task = job.known = self._tasks.find(job.new.task)
        job.state = State.RUNNING
        try:
            self._run_attempts(job, task, run or on_a_loop_of_its_own)
        finally:
            if (follower := self._follower(job, task)) is not None:
                self.run(follower, run)

    def _run_attempts(self, job: JobHere, task: Task[..., Any], run: Run) -> None:
        while job.state is State.RUNNING:
            job.attempts += 1
            claimed, reaching = _claimed(job, task), None
            try:
                # in a copy of the context, so that the handler's current_job() is not the caller's
                attempt = contextvars.copy_context().run
                job.result = attempt(self._attempt, job, task, claimed, run)
                job.state = State.FINISHED
            except BaseException as error:
                reaching = self.after(job, claimed, error)
                if reaching is error:
                    raise
            if reaching is not None:
                raise reaching

    async def arun(self, job: JobHere) -> None:
        """Run a job to its end on this event loop, the handler of a `def` task in a thread."""
        task = job.known = self._tasks.find(job.new.task)
        if not task.is_async:
            loop = asyncio.get_running_loop()
            await asyncio.to_thread(
                self._run_in_thread, job, lambda work: asyncio.run_coroutine_threadsafe(work, loop).result()
            )
            return
        job.state = State.RUNNING
        try:
            await self._arun_attempts(job, task)
        finally:
            if (follower := self._follower(job, task)) is not None:
                await self.arun(follower)

    def _run_in_thread(self, job: JobHere, run: Run) -> None:
        """Run a job for a caller on an event loop, where no future takes a StopIteration: it reaches the
        caller as it would from a coroutine."""
        try:
            self.run(job, run)
        except StopIteration as error:  # guard: a-stop-iteration-keeps-nobody-waiting
            raise RuntimeError(f"{job.new.task} raised StopIteration") from error

    async def _arun_attempts(self, job: JobHere, task: Task[..., Any]) -> None:
        while job.state is State.RUNNING:
            job.attempts += 1
            claimed, reaching = _claimed(job, task), None
            try:
                # a task of its own, whose context ends with it
                job.result = await asyncio.create_task(self._aattempt(job, task, claimed))
                job.state = State.FINISHED
            except BaseException as error:
                reaching = self.after(job, claimed, error)
                if reaching is error:
                    raise
            if reaching is not None:
                raise reaching

    def _follower(self, job: JobHere, task: Task[..., Any]) -> JobHere | None:
        """Return the job that follows one that has ended, if one does."""
        if job.state is State.FAILED and job.error is not None:
            new = follow_up(_claimed(job, task), Failed("error", describe(job.error)))
        else:
            new = follow_up(_claimed(job, task), Completed()) if job.state is State.FINISHED else None
        return None if new is None else self.follow(new)

    def _attempt(self, job: JobHere, task: Task[..., Any], claimed: ClaimedJob, run: Run) -> Any:
        running = self._begun(job, task, claimed)
        result = run(acall_handler(running)) if task.is_async else call_handler(running, run)
        return self._ended(job, running, result)

    async def _aattempt(self, job: JobHere, task: Task[..., Any], claimed: ClaimedJob) -> Any:
        running = self._begun(job, task, claimed)
        return self._ended(job, running, await acall_handler(running))

    def _ended(self, job: JobHere, running: RunningJob, result: Any) -> Any:
        """Return the result of an attempt that has not raised."""
        if running.growth is None or not running.growth.steps:
            return result
        if not running.completed:
            raise SqlqError(UNWRITTEN_GROWTH)
        job.grown = running.growth
        return result

    def _begun(self, job: JobHere, task: Task[..., Any], claimed: ClaimedJob) -> RunningJob:
        """Begin an attempt in this context."""
        running = RunningJob(claimed, task, float("inf"))
        running.lifespan = self._lifespan
        running.on_saved = partial(_saved, job)
        running.before = job.before
        if job.unmet is not None:  # guard: an-unmet-step-fails-alone
            raise NoResultError(job.unmet)
        running.arguments = task.arguments(claimed.payload)
        running.begin()
        return running


def _saved(job: JobHere, conn: Connection, cursor: str) -> None:
    """Let the next attempt begin at a cursor if the transaction commits in which it was saved."""
    if isinstance(conn, Borrowed):
        if not conn.driver.on_commit(lambda: setattr(job, "cursor", cursor)):
            job.cursor = cursor  # nobody tells of a commit there
        return
    open_still = [cursor]

    @event.listens_for(conn, "commit")
    def _commits(conn: Connection) -> None:
        if open_still:
            job.cursor = open_still.pop()

    @event.listens_for(conn, "rollback")
    def _rolls_back(conn: Connection) -> None:
        open_still.clear()


def _claimed(job: JobHere, task: Task[..., Any]) -> ClaimedJob:
    """Return a job as a worker would hold it in the attempt that has begun."""
    return ClaimedJob(
        id=job.id,
        lease_token=job.attempts,
        queue=job.new.queue,
        task=job.new.task,
        payload=job.new.payload,
        attempts=job.attempts,
        max_attempts=job.new.max_attempts or task.max_attempts,
        on_success=job.new.on_success,
        on_failure=job.new.on_failure,
        label=job.new.label,
        headers=job.new.headers_text,
        cursor=job.cursor,
        flow_id=job.flow_id,
    )


def _judged(edges: Sequence[tuple[JobHere, When]]) -> State:
    """Return the state of a step whose turn it is, by how those before it ended."""
    states = [(before.state, when) for before, when in edges]
    if any(
        (state is State.CANCELLED and when != "ended") or (state is State.FINISHED and when == "failure")
        for state, when in states
    ):
        return State.CANCELLED
    if any(
        state not in (State.FINISHED, State.CANCELLED, State.FAILED)
        or (state is State.FAILED and when == "success")
        for state, when in states
    ):
        return State.BLOCKED
    return State.AVAILABLE


def on_a_loop_of_its_own(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine on an event loop of its own: in a thread, where the caller is on a loop, which stands
    still meanwhile, as it would in any other call."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1, "sqlq-inline") as thread:
        return thread.submit(contextvars.copy_context().run, asyncio.run, work).result()


class EagerEnqueuer(Here):
    """Takes the place of what writes an App's jobs, in an App or a call that is eager: a job is run until it
    has finished, or has failed for good."""

    def __init__(self, tasks: Registry, run: Run | None = None) -> None:
        """`run` runs the coroutine of an `async def` handler for a caller that cannot await it."""
        super().__init__(tasks)
        self._run_coroutine = run
        self._holding: dict[tuple[str, str], JobHere] = {}
        """The jobs that hold their unique keys, since they run."""

    def enqueue(self, new: Sequence[NewJob], session: Any = None) -> list[Job]:
        self.check(new)
        done = []
        for each in new:
            job, created = self._take(each)
            if created:
                try:
                    self.run(job, self._run_coroutine)
                finally:
                    self._let_go_of(job)
            done.append(job.answer(created=created))
        return done

    async def aenqueue(self, new: Sequence[NewJob], session: Any = None) -> list[Job]:
        self.check(new)
        done = []
        for each in new:
            job, created = self._take(each)
            if created:
                try:
                    await self.arun(job)
                finally:
                    self._let_go_of(job)
            done.append(job.answer(created=created))
        return done

    def after(self, job: JobHere, claimed: ClaimedJob, error: BaseException) -> BaseException | None:
        if isinstance(error, Cancel):
            job.state = State.CANCELLED
            return None
        if isinstance(error, Snooze):
            # Nothing is written, so there is no later: to return would lose the job without a word.
            error.add_note(f"{claimed.task} ran eagerly, and cannot be run again later")
        elif isinstance(error, Exception):
            outcome = decide(claimed, error, self._tasks.find(claimed.task).retry)
            if isinstance(outcome, Retried):
                log.warning(
                    "%s, run eagerly, failed in attempt %d of %d, and is tried again at once: %s",
                    *(claimed.task, claimed.attempts, claimed.max_attempts, outcome.error.message),
                    extra={
                        "job_id": job.id,
                        "task": claimed.task,
                        "queue": claimed.queue,
                        "event": "retried",
                    },
                )
                return None
        job.state = State.FAILED
        job.error = error.__cause__ if isinstance(error, Retry) and error.__cause__ else error
        return job.error

    def follow(self, new: NewJob) -> JobHere:
        return JobHere(_new_id(), new)

    def step(self, new: NewJob) -> JobHere:
        return JobHere(_new_id(), new)

    def enqueue_flow(self, plan: Plan, session: Any = None) -> EnqueuedFlow:
        self.check(plan.jobs)
        flow = FlowHere.of(plan, _new_id(), self.step)
        self.run_flow(flow, self._run_coroutine)
        return flow.answer()

    async def aenqueue_flow(self, plan: Plan, session: Any = None) -> EnqueuedFlow:
        self.check(plan.jobs)
        flow = FlowHere.of(plan, _new_id(), self.step)
        await self.arun_flow(flow)
        return flow.answer()

    def _take(self, new: NewJob) -> tuple[JobHere, bool]:
        """Return a job for this one, and whether it is new: where one with the same unique key runs, it is
        that."""
        job = JobHere(_new_id(), new)
        if new.unique_key is None or new.unique_until == "start":
            return job, True
        holder = self._holding.setdefault((new.queue, new.unique_key), job)
        return holder, holder is job

    def _let_go_of(self, job: JobHere) -> None:
        if job.new.unique_key is not None and job.new.unique_until != "start":
            self._holding.pop((job.new.queue, job.new.unique_key), None)


def _new_id() -> int:
    """Return an id that no job in a database has, since handlers make idempotency keys of it."""
    return _LARGEST_STORED_ID + 1 + secrets.randbits(61)
