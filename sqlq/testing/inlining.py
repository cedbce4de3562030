"""Inline mode: a job runs where it is enqueued, and nothing is written."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlq.app import App
from sqlq.enqueue import Enqueuer
from sqlq.errors import EnqueueError
from sqlq.job import ClaimedJob, Job, NewJob, State
from sqlq.retry import Cancel, Retry, Snooze
from sqlq.task import Task, decode
from sqlq.testing.place import current
from sqlq.worker.running import RunningJob


@dataclass
class InlineJob:
    """A job that ran inline: what it was, and what became of it (`failed` when its exception reached the test)."""

    id: int
    new: NewJob
    state: State = State.RUNNING
    attempts: int = 0
    result: Any = None


class Inline:
    """The jobs of an `inline` block, in the order in which they were enqueued."""

    def __init__(self) -> None:
        self.jobs: list[InlineJob] = []


@contextmanager
def inline(app: App) -> Iterator[Inline]:
    """Run this App's jobs where they are enqueued, while the block runs; nothing is written, and no database is needed.

    `enqueue` runs a `def` handler in the caller's thread and an `async def` one on an event loop of its own (in a thread,
    when the caller is on a loop already); `aenqueue` awaits `async def` handlers on the caller's loop and runs the others
    in a thread. Handlers get their arguments by way of JSON, `sqlq.current_job()` works, and what they enqueue runs inline
    too. An exception propagates to whoever enqueued, at the first attempt: no retry hides it from the test. Delays,
    priorities, queues and timeouts do not matter; a unique key holds while its job runs. The signals:

    - `Retry`: the next attempt follows at once; when it was the last, the Retry, or its cause, propagates.
    - `Snooze`: the job is left alone, with state `scheduled`: what it waits for will not happen meanwhile.
    - `Cancel`: the job ends with state `cancelled`.

    A handler runs before the caller's transaction has ended: on a connection of its own it does not see what that
    transaction wrote (and on SQLite waits for its lock), and it has run even if the caller then rolls back. Where that
    matters, enqueue for real and `drain()`.

    >>> with sqlq.testing.inline(app) as ran:  # doctest: +SKIP
    ...     place_order(...)
    >>> assert [job.state for job in ran.jobs] == ["finished"]  # doctest: +SKIP
    """
    ran = Inline()
    before, app.enqueuer = app.enqueuer, InlineEnqueuer(app, ran)
    try:
        with current(app):
            yield ran
    finally:
        app.enqueuer = before


class InlineEnqueuer(Enqueuer):
    """Takes the place of an App's Enqueuer: what goes in is run."""

    def __init__(self, app: App, ran: Inline) -> None:
        self._tasks = app.tasks
        self.ran = ran
        self._ids = itertools.count(1)

    def enqueue(self, new: Sequence[NewJob], session: Any = None) -> list[Job]:
        _refuse_async(session)
        return [self._enqueue(job) for job in _checked(new)]

    async def aenqueue(self, new: Sequence[NewJob], session: Any = None) -> list[Job]:
        done = []
        for job in _checked(new):
            if self._tasks.find(job.task).is_async:
                done.append(await self._aenqueue(job))
            else:
                done.append(await asyncio.to_thread(self._enqueue, job))
        return done

    def close(self) -> None:
        pass

    def _enqueue(self, new: NewJob) -> Job:
        task = self._tasks.find(new.task)
        job = self._live(new)
        if job is not None:
            return _answer(job, created=False)
        job = self._add(new)
        while job.state is State.RUNNING:
            with _Ending(job):
                job.result = _call(task, job)
                job.state = State.FINISHED
        return _answer(job)

    async def _aenqueue(self, new: NewJob) -> Job:
        task = self._tasks.find(new.task)
        job = self._live(new)
        if job is not None:
            return _answer(job, created=False)
        job = self._add(new)
        while job.state is State.RUNNING:
            with _Ending(job):
                # a task of its own, whose context ends with it
                job.result = await asyncio.create_task(_acall(task, job))
                job.state = State.FINISHED
        return _answer(job)

    def _add(self, new: NewJob) -> InlineJob:
        job = InlineJob(next(self._ids), new)
        self.ran.jobs.append(job)
        return job

    def _live(self, new: NewJob) -> InlineJob | None:
        """The job that runs at this moment and holds the same unique key; until "start", none that runs holds it."""
        if new.unique_key is None:
            return None
        key = (new.queue, new.unique_key, "finish")
        running = (job for job in self.ran.jobs if job.state is State.RUNNING)
        return next((job for job in running if (job.new.queue, job.new.unique_key, job.new.unique_until) == key), None)


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
            case Retry() if self._job.attempts < self._job.new.max_attempts:
                pass
            case Retry(__cause__=BaseException() as cause):
                self._job.state = State.FAILED
                raise cause
            case _:
                self._job.state = State.FAILED
                return False
        return True


def _call(task: Task[..., Any], job: InlineJob) -> Any:
    def run() -> Any:
        return asyncio.run(_acall(task, job)) if task.is_async else _attempt(task, job)

    # in a copy of the context, so that the handler's current_job() is not the caller's
    context = contextvars.copy_context()
    return _in_thread(lambda: context.run(run)) if task.is_async and _on_a_loop() else context.run(run)


async def _acall(task: Task[..., Any], job: InlineJob) -> Any:
    return await _attempt(task, job)


def _attempt(task: Task[..., Any], job: InlineJob) -> Any:
    args, kwargs = decode(job.new.payload)
    claimed = ClaimedJob(
        id=job.id,
        lease_token=job.attempts,
        queue=job.new.queue,
        task=job.new.task,
        payload=job.new.payload,
        attempts=job.attempts,
        max_attempts=job.new.max_attempts,
    )
    RunningJob(claimed, task, float("inf")).begin()
    return task.handler(*args, **kwargs)


def _on_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _in_thread(work: Callable[[], Any]) -> Any:
    """Run `work` in a thread and wait for it. The caller's loop stands still meanwhile, as it would in any other call."""
    done: list[Any] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="sqlq-inline")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return done[0]


def _checked(new: Sequence[NewJob]) -> Sequence[NewJob]:
    for job in new:
        if not isinstance(job, NewJob):
            raise EnqueueError(f"enqueue takes what task.new(…) returns, not a {type(job).__name__}: write app.enqueue(task.new(…))")
    return new


def _refuse_async(session: Any) -> None:
    if hasattr(session, "run_sync"):
        raise EnqueueError(f"this is an {type(session).__name__}: write await app.aenqueue(…, session=session)")


def _answer(job: InlineJob, created: bool = True) -> Job:
    return Job(id=job.id, queue=job.new.queue, task=job.new.task, state=job.state, created=created)
