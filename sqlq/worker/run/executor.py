"""Runs handlers: `def` in threads, `async def` on an event loop, some in subprocesses. Together at most
`concurrency` at a time.

A slot that ends a job takes the next ready one itself, in its thread or on its loop. Only an idle slot costs
a hand-over between threads."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from math import inf
from queue import SimpleQueue
from time import monotonic
from typing import Any, NamedTuple

from sqlq.model.outcome import Outcome, SelfCompleted
from sqlq.model.retry import broken_off, given_back
from sqlq.worker.attempt.attempt import Attempt
from sqlq.worker.attempt.call import Starting, aexecute, execute, late, raised
from sqlq.worker.run.isolated import IsolatedProcesses
from sqlq.worker.threads.log import log

Done = Callable[[Attempt, Outcome], None]

NOT_STARTED_MS = 1_000
"""How long a job waits that could not be started: a shortage of threads or memory is seldom over at once."""
UNSTARTED_SECONDS = 1.0
"""A job that has not started after this long is released: another worker may have a free slot."""
ISOLATED_UNSTARTED_SECONDS = 10.0
"""The same for a job that needs a subprocess, which takes a start of Python."""
CROWDED_SECONDS = 0.25
"""Jobs that wait for processes, and are more than there are slots, are released after this time. Running
processes take one after the other, so that none waits for long."""
CANCELLED_SECONDS = 1.0


class Load(NamedTuple):
    """How busy the slots are."""

    running: int
    waiting: int
    """How many jobs wait for a slot or a subprocess."""
    waits_for_isolates: bool
    """Whether jobs wait, all of them for subprocesses."""


class Executor:
    """Runs jobs in slots, and calls `done` with each outcome, in the thread where it came about."""

    _low_water = -1
    _loop: asyncio.AbstractEventLoop | None = None
    _ends_loop = True
    _closing = False
    _starting = True
    ended, busy_seconds = 0, 0.0
    """Jobs ended so far, and how long they ran together; their growth is the pace."""

    def __init__(
        self,
        concurrency: int,
        starting: Starting,
        done: Done,
        may_start: Callable[[], bool],
        isolates: IsolatedProcesses | None = None,
    ) -> None:
        """While `may_start` returns False nothing starts. Call `start_ready` when it returns True again."""
        self._concurrency = concurrency
        self._may_start = may_start
        self._starting_job = starting
        self._done = done
        self._isolates = isolates
        self._lock = threading.Lock()
        self._ready: deque[Attempt] = deque()
        self._for_isolates: deque[Attempt] = deque()
        """Ready, too, but each needs a subprocess, and a limited number of those start at a time."""
        self._running: set[Attempt] = set()
        self._idle = threading.Condition(self._lock)
        self._room = threading.Event()
        """Few enough jobs wait. It has a lock of its own: each slot needs the other one for each job."""
        self._handed_over: SimpleQueue[Attempt | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._tasks: dict[Attempt, asyncio.Task[None]] = {}
        """By their jobs: the loop keeps weak references only."""

    def offer(self, jobs: Sequence[Attempt]) -> None:
        """Take jobs to run; they start as slots are free, in this order."""
        with self._lock:
            for job in jobs:
                (self._for_isolates if job.isolated else self._ready).append(job)
        self.start_ready()

    def start_ready(self) -> None:
        """Start ready jobs in the free slots."""
        starting = []
        with self._lock:
            while len(self._running) < self._concurrency and (job := self._take()) is not None:
                starting.append(job)
        for job in starting:
            self._start(job)

    def load(self) -> Load:
        """Return how many jobs run, and how many wait."""
        with self._lock:
            waits_for_isolates = bool(self._for_isolates) and not self._ready
            return Load(len(self._running), self._waiting(), waits_for_isolates)

    def _waiting(self) -> int:
        return len(self._ready) + len(self._for_isolates)

    def wait_for_room(self, low_water: int, seconds: float) -> None:
        """Wait until a slot has freed and no more than `low_water` jobs wait, at most that time."""
        with self._lock:
            is_full = self._waiting() > low_water or len(self._running) >= self._concurrency
            if not (is_full and self._starting):
                return
            self._room.clear()
            self._low_water = low_water
        self._room.wait(seconds)
        self._low_water = -1

    def start_no_more(self) -> None:
        """Start no more jobs, and end a wait for room."""
        with self._lock:
            self._starting = False
            self._room.set()

    # -- releases: the job runs again, here or elsewhere, and no attempt is counted --------------------------

    def release_ready(self, limit_key: str | None = None) -> None:
        """Release the jobs that have not started; with a key those of its limit."""
        jobs: list[Attempt] = []
        with self._lock:
            for waiting in (self._ready, self._for_isolates):
                some = list(waiting)
                waiting.clear()
                for job in some:
                    (jobs if limit_key in (None, job.claimed.limit_key) else waiting).append(job)
        self._release(jobs)

    def release_unstarted(self) -> None:
        """Release jobs that have waited long for a slot, and those behind them, which would start before
        them."""
        with self._lock:
            if not self._ready or self._ready[0].claimed_at >= monotonic() - UNSTARTED_SECONDS:
                return
            jobs = list(self._ready)
            self._ready.clear()  # guard: who-waits-behind-goes-back-too
        self._release(jobs)

    def release_crowded(self) -> None:
        """Release jobs that have waited long for a subprocess, and the last ones beyond the number of
        slots."""
        jobs, now = [], monotonic()
        with self._lock:
            waiting = self._for_isolates
            while waiting and waiting[0].claimed_at < now - ISOLATED_UNSTARTED_SECONDS:
                jobs.append(waiting.popleft())
            while len(waiting) > self._concurrency and waiting[-1].claimed_at < now - CROWDED_SECONDS:
                jobs.append(waiting.pop())
        self._release(jobs, crowded=True)

    def _release(self, jobs: Iterable[Attempt], *, crowded: bool = False) -> None:
        for job in jobs:
            self._done(job, given_back(job.claimed, crowded=crowded))

    def release_running(self) -> None:
        """End the jobs that still run: cancel coroutines, kill processes, leave threads behind."""
        for job in self.running():
            job.cancel()
        self.wait_idle(CANCELLED_SECONDS)
        killed = [kill for job in self.running() if (kill := job.kill) is not None]
        for kill in killed:
            kill()  # guard: no-process-outlives-its-give-back
        if killed:  # the slot of each waits for its process, and then reports how the attempt ended
            self.wait_idle(CANCELLED_SECONDS)
        for job in self.running():
            # the handler may have completed the job, here or in its own process
            otherwise = late(job) or (given_back if job.started is None else broken_off)(job.claimed)
            self._done(job, SelfCompleted(otherwise))  # guard: give-back-after-grace

    # -- slots -----------------------------------------------------------------------------------------------

    def running(self) -> list[Attempt]:
        with self._lock:
            return list(self._running)

    def wait_idle(self, seconds: float) -> bool:
        """Wait until nothing runs, at most that time. Return whether nothing runs."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._running, seconds)

    def _take(self) -> Attempt | None:
        """Take the next job that may start now into a slot; None without one."""
        if not (self._starting and self._may_start()):  # guard: unwritten-outcomes-are-bounded
            return None
        if self._for_isolates and self._isolates is not None and self._isolates.let_in(self._for_isolates[0]):
            job = self._for_isolates.popleft()
        elif self._ready:
            job = self._ready.popleft()
        else:
            return None
        self._running.add(job)
        return job

    def _start(self, job: Attempt) -> None:
        """Hand a job over to its thread or loop. Where threads, files or memory are short, release it and
        free its slot."""
        try:
            if job.is_async:
                # not in the caller's context: there, in a test, Django's ORM would wait for the thread that
                # waits for the worker
                context = contextvars.Context()  # guard: a-context-of-no-caller
                self._event_loop().call_soon_threadsafe(self._spawn, context, job, context=context)
            else:
                self._ensure_threads()
                self._handed_over.put(job)
        except BaseException as error:  # guard: what-cannot-start-is-given-back
            job.log_error(
                "not_started",
                "it cannot be started here (%s: %s); it is given back",
                type(error).__name__,
                error,
            )
            if job.isolated and self._isolates is not None:
                self._isolates.let_out(job)
            job.trusted_until = -inf  # so that it does not start later
            with self._lock:
                self._running.discard(job)
                self._idle.notify_all()
                self._room.set()
            # guard: what-cannot-start-is-bounded
            self._done(job, given_back(job.claimed, delay_ms=NOT_STARTED_MS))

    def _ensure_threads(self) -> None:
        """Start one more thread, as long as there are fewer than slots. Raises where that fails and too few
        are left."""
        with self._lock:
            if len(self._threads) >= self._concurrency:
                return
            thread = threading.Thread(
                target=self._run_slot, name=f"sqlq-slot-{len(self._threads) + 1}", daemon=True
            )
            self._threads.append(thread)
        try:
            thread.start()
        except BaseException:
            with self._lock:
                self._threads.remove(thread)
                if len(self._threads) < sum(not job.is_async for job in self._running):
                    raise

    def _next(self, ended: Attempt, on_loop: bool) -> Attempt | None:
        """Free the slot of a job that ended. Return the next one if it runs in the same place, else start it
        elsewhere."""
        with self._lock:
            self._running.discard(ended)
            self.ended += 1
            if ended.started is not None:
                self.busy_seconds += monotonic() - ended.started
            job = self._take()
            if not self._running:
                self._idle.notify_all()
            if self._waiting() <= self._low_water:
                self._room.set()
        if job is None or job.is_async == on_loop:
            return job
        self._start(job)
        return None

    def _run_slot(self) -> None:
        while (job := self._handed_over.get()) is not None:
            while job is not None:
                self._done(job, self._attempt(job))
                job = self._next(job, on_loop=False)

    def _attempt(self, job: Attempt) -> Outcome:
        isolates = self._isolates if job.isolated else None
        if monotonic() >= job.trusted_until:  # guard: start-on-a-trusted-lease
            if isolates is not None:
                isolates.let_out(job)
            return given_back(job.claimed)
        if isolates is not None:
            self._starting_job(job)
            try:
                return isolates.execute(job, self._starting_job, self.start_ready)
            except BaseException as error:  # guard: slot-survives-a-subprocess-error
                return raised(job, error)
        return execute(job, self._starting_job, self.run_coroutine)

    # -- the event loop --------------------------------------------------------------------------------------

    def run_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run coroutines on a loop that runs in another thread, and leave its end to that thread."""
        self._loop, self._ends_loop = loop, False

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                loop = asyncio.new_event_loop()
                thread = threading.Thread(target=self._run_loop, args=(loop,), name="sqlq-loop", daemon=True)
                try:
                    thread.start()
                except BaseException:
                    loop.close()
                    raise
                self._loop = loop
            return self._loop

    def _run_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            while not self._closing:  # guard: the-loop-of-all-goes-on
                try:
                    loop.run_forever()
                # asyncio raises these of any task here, to end the program; code that awaits the task gets
                # them, too
                except (SystemExit, KeyboardInterrupt) as error:
                    log.warning(
                        "an asyncio task that a handler has started raised %s: the event loop goes on",
                        type(error).__name__,
                    )
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    def run_coroutine(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine, of a handler in a thread or of the lifespan, and wait for its end. It runs on the
        loop of all `async def` handlers, whose clients and pools it may share."""
        done: Future[Any] = Future()

        async def run() -> None:
            try:
                done.set_result(await coroutine)
            except BaseException as error:  # an exception that reached the loop would end it
                done.set_exception(error)

        # in the context of this thread, so that current_job() is found
        asyncio.run_coroutine_threadsafe(run(), self._event_loop()).result()
        return done.result()

    def _spawn(self, context: contextvars.Context, job: Attempt) -> None:
        """Run a job in an asyncio task of its own, which a cancel of the job cancels. It has a copy of the
        context, so the next job does not see its changes."""
        # guard: a-context-for-each-coroutine
        self._tasks[job] = asyncio.create_task(self._run_on_loop(context, job), context=context.copy())

    async def _run_on_loop(self, context: contextvars.Context, job: Attempt) -> None:
        # one task for a job, and no callback at its end: each more would take a turn of the loop
        outcome = (
            await aexecute(job, self._starting_job)
            if monotonic() < job.trusted_until
            else given_back(job.claimed)
        )
        self._done(job, outcome)
        if (following := self._next(job, on_loop=True)) is not None:
            self._spawn(context, following)
        del self._tasks[job]

    def close(self) -> None:
        """End idle threads and the loop. Jobs that still run end with the process."""
        for _ in self._threads:
            self._handed_over.put(None)
        if self._isolates is not None:
            self._isolates.close()
        if self._loop is not None and self._ends_loop:  # guard: callers-loop-is-not-stopped
            self._closing = True
            self._loop.call_soon_threadsafe(self._loop.stop)
