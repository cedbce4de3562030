"""Where handlers run: `def` in threads, `async def` on an event loop, some in processes of their own; together at most
`concurrency` at a time.

A slot that ends a job takes the next ready one itself, in the thread or on the loop it is in: a hand-over between
threads is paid for only when a slot was idle.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from sqlq.job import Outcome
from sqlq.worker.execute import Starting, aexecute, execute, give_back
from sqlq.worker.isolates import Isolates
from sqlq.worker.running import RunningJob

log = logging.getLogger("sqlq.worker")

Done = Callable[[RunningJob, Outcome], None]


class Executors:
    """Runs jobs in slots and reports each outcome to `done`, from whatever thread it came about in."""

    def __init__(self, concurrency: int, starting: Starting, done: Done, isolates: Isolates | None = None) -> None:
        self._concurrency = concurrency
        self._tell = starting
        self._done = done
        self._isolates = isolates
        self._lock = threading.Lock()
        self._ready: deque[RunningJob] = deque()
        self._running: set[RunningJob] = set()
        self._idle = threading.Condition(self._lock)
        self._room = threading.Event()
        self._low_water = -1
        self._handed_over: SimpleQueue[RunningJob | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._starting = True
        self.ended = 0
        """Jobs ended so far; its growth is the pace."""

    def offer(self, jobs: Sequence[RunningJob]) -> None:
        """Take jobs to run; they start as slots are free, in this order."""
        with self._lock:
            self._ready.extend(jobs)
            starting = []
            while self._ready and self._starting and len(self._running) < self._concurrency:
                starting.append(self._take())
        for job in starting:
            self._start(job)

    def load(self) -> tuple[int, int]:
        """Return how many jobs run, and how many are ready but wait for a slot."""
        with self._lock:
            return len(self._running), len(self._ready)

    def wait_for_room(self, low_water: int, seconds: float) -> None:
        """Wait until a slot has freed and no more than `low_water` jobs are ready, at most so long."""
        with self._lock:
            if len(self._ready) <= low_water and len(self._running) < self._concurrency:
                return
            self._room.clear()
            self._low_water = low_water
        self._room.wait(seconds)
        self._low_water = -1

    def start_no_more(self) -> None:
        """Start nothing that has not started, and end a wait for room; only sets flags."""
        self._starting = False
        self._room.set()

    def take_back(self, claimed_before: float = float("inf")) -> list[RunningJob]:
        """Return the jobs claimed before a moment that have not started; they will not start any more."""
        with self._lock:
            if not self._ready or self._ready[0].claimed_at >= claimed_before:  # the first has waited longest
                return []
            unstarted = [job for job in self._ready if job.claimed_at < claimed_before]
            if unstarted:
                self._ready = deque(job for job in self._ready if job.claimed_at >= claimed_before)
            return unstarted

    def running(self) -> list[RunningJob]:
        with self._lock:
            return list(self._running)

    def wait_idle(self, seconds: float) -> bool:
        """Wait until nothing runs, at most so long; say whether that is so."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._running, seconds)

    def _take(self) -> RunningJob:
        job = self._ready.popleft()
        self._running.add(job)
        return job

    def _start(self, job: RunningJob) -> None:
        if job.is_async:
            loop = self._event_loop()
            loop.call_soon_threadsafe(self._spawn, job)
        else:
            if len(self._threads) < self._concurrency:
                thread = threading.Thread(target=self._run_slot, name=f"sqlq-slot-{len(self._threads) + 1}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._handed_over.put(job)

    def _next(self, ended: RunningJob, on_loop: bool) -> RunningJob | None:
        """Free the slot of a job that ended and take the next one, if it runs where this one ran."""
        with self._lock:
            self._running.discard(ended)
            self.ended += 1
            job = self._take() if self._ready and self._starting else None
            if job is None and not self._running:
                self._idle.notify_all()
            if len(self._ready) <= self._low_water:
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

    def _attempt(self, job: RunningJob) -> Outcome:
        if not job.is_trusted():
            return give_back(job.claimed)
        if job.isolated and self._isolates is not None:
            self._tell(job)
            return self._isolates.execute(job)
        return execute(job, self._tell)

    # -- the event loop ----------------------------------------------------------------------------------------------

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._run_loop, args=(self._loop,), name="sqlq-loop", daemon=True).start()
            return self._loop

    def _run_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    def _spawn(self, job: RunningJob) -> None:
        # the loop keeps weak references only
        task = asyncio.ensure_future(self._run_on_loop(job))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_on_loop(self, first: RunningJob) -> None:
        job: RunningJob | None = first
        while job is not None:
            self._done(job, await self._aattempt(job))
            job = self._next(job, on_loop=True)

    async def _aattempt(self, job: RunningJob) -> Outcome:
        if not job.is_trusted():
            return give_back(job.claimed)
        return await asyncio.create_task(aexecute(job, self._tell))

    def close(self) -> None:
        """End idle threads and the loop; what still runs is left to end with the process."""
        for _ in self._threads:
            self._handed_over.put(None)
        if self._isolates is not None:
            self._isolates.close()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
