"""Jobs that run where they are enqueued: those of an App in eager mode, and of `sqlq.testing.inline`.

A job goes the way that it goes in a worker, by JSON, the handler's annotations and what surrounds attempts;
but in the caller's own thread or on the caller's own event loop, and nothing of it is written.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import secrets
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from sqlq.endings import follow_up
from sqlq.enqueue import check_new
from sqlq.job import ClaimedJob, Completed, Failed, Job, NewJob, Retried, State
from sqlq.retry import Cancel, Retry, Snooze, decide, describe
from sqlq.task import Registry, Task
from sqlq.worker.execute import Run, acall_handler, call_handler
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

    def answer(self, *, created: bool) -> Job:
        """Return what `enqueue` answers."""
        return Job(id=self.id, queue=self.new.queue, task=self.new.task, state=self.state, created=created)


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

    def run(self, job: JobHere, run: Run | None = None) -> None:
        """Run a job to its end in this thread; `run` runs the coroutine of an `async def` handler."""
        task = self._tasks.find(job.new.task)
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
                job.result = attempt(self._attempt, task, claimed, run)
                job.state = State.FINISHED
            except BaseException as error:
                reaching = self.after(job, claimed, error)
                if reaching is error:
                    raise
            if reaching is not None:
                raise reaching

    async def arun(self, job: JobHere) -> None:
        """Run a job to its end on this event loop, the handler of a `def` task in a thread."""
        task = self._tasks.find(job.new.task)
        if not task.is_async:
            loop = asyncio.get_running_loop()
            await asyncio.to_thread(
                self.run, job, lambda work: asyncio.run_coroutine_threadsafe(work, loop).result()
            )
            return
        job.state = State.RUNNING
        try:
            await self._arun_attempts(job, task)
        finally:
            if (follower := self._follower(job, task)) is not None:
                await self.arun(follower)

    async def _arun_attempts(self, job: JobHere, task: Task[..., Any]) -> None:
        while job.state is State.RUNNING:
            job.attempts += 1
            claimed, reaching = _claimed(job, task), None
            try:
                # a task of its own, whose context ends with it
                job.result = await asyncio.create_task(self._aattempt(task, claimed))
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

    def _attempt(self, task: Task[..., Any], claimed: ClaimedJob, run: Run) -> Any:
        running = self._begun(task, claimed)
        return run(acall_handler(running)) if task.is_async else call_handler(running, run)

    async def _aattempt(self, task: Task[..., Any], claimed: ClaimedJob) -> Any:
        return await acall_handler(self._begun(task, claimed))

    def _begun(self, task: Task[..., Any], claimed: ClaimedJob) -> RunningJob:
        """Begin an attempt in this context."""
        running = RunningJob(claimed, task, float("inf"))
        running.lifespan = self._lifespan
        running.arguments = task.arguments(claimed.payload)
        running.begin()
        return running


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
    )


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

    def _take(self, new: NewJob) -> tuple[JobHere, bool]:
        """Return a job for this one, and whether it is new: where one with the same unique key runs, it is
        that."""
        job = JobHere(_new_id(), new)
        if new.unique_key is None or new.unique_until == "start":
            return job, True
        holder = self._holding.setdefault((new.queue, new.unique_key), job)
        return holder, holder is job

    def _let_go_of(self, job: JobHere) -> None:
        if job.new.unique_key is not None and job.new.unique_until == "finish":
            self._holding.pop((job.new.queue, job.new.unique_key), None)


def _new_id() -> int:
    """Return an id that no job in a database has, since handlers make idempotency keys of it."""
    return _LARGEST_STORED_ID + 1 + secrets.randbits(61)
