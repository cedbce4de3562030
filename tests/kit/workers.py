"""Run a worker, or a part of one, while a test goes on."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

import sqlq
from sqlq import JobEvent
from sqlq.events import NAMES, EventName
from sqlq.model.outcome import Outcome
from sqlq.worker.attempt.attempt import Attempt
from sqlq.worker.claim.claimer import Claimer
from sqlq.worker.decide import Turn, claim_size
from sqlq.worker.ipc.parent import NoParent, Parent, SharedMemory
from sqlq.worker.ipc.pipe import Pipe
from sqlq.worker.options import WorkerOptions
from sqlq.worker.report.reporter import Reporter
from sqlq.worker.run.isolated import IsolatedProcesses
from sqlq.worker.supervise.heartbeat import Dead, Deaths
from sqlq.worker.supervise.supervisor import Supervisor
from sqlq.worker.worker import Worker


def worker_of(
    app: sqlq.App,
    supervision: NoParent | None = None,
    isolates: IsolatedProcesses | None = None,
    **options: Any,
) -> Worker:
    """Return a worker as `sqlq work` has it."""
    return app._worker(WorkerOptions.of(**options), supervision, isolates)


def claim_size_of(claimer: Claimer, running: int = 0) -> int:
    """Return how many jobs a worker with this claimer claims while none wait."""
    turn = Turn(running, ahead=claimer.ahead(0, 0.0), max_claim=claimer.max_jobs)
    return claim_size(claimer._options, turn)


def run_isolated(isolates: IsolatedProcesses, job: Attempt) -> Outcome:
    """Run a job in a process of its own, as a slot does."""
    assert isolates.let_in(job)
    return isolates.execute(job, lambda job: None, lambda: None)


@contextmanager
def working(app: sqlq.App, **options: Any) -> Iterator[Any]:
    """Run a worker in a thread of this process; at the end it stops at once, whatever a test asserts."""
    worker = worker_of(app, **options)
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        yield worker
    finally:
        worker.stop()
        worker.stop()
        thread.join(20)
        assert not thread.is_alive()


@contextmanager
def supervising(supervisor: Supervisor) -> Iterator[Future[int]]:
    """Run a supervisor in a thread of this process, and stop it at the end; its exit code is yielded."""
    with ThreadPoolExecutor(1) as pool:
        try:
            yield pool.submit(supervisor.run)
        finally:
            supervisor.stop()


@contextmanager
def supervised(**options: Any) -> Iterator[tuple[Parent, SharedMemory, Pipe]]:
    """Yield a worker's side of its supervisor, the memory that they share, and the supervisor's pipe."""
    box, fd = SharedMemory.create()
    os.close(fd)
    here, there = Pipe.pair()
    supervisor = Pipe(there)
    yield Parent(here, box, **options), box, supervisor
    here.close()
    supervisor.close()
    box.close()


def deaths(*worker: str, started: Collection[tuple[int, int]] | None = ()) -> Deaths:
    """Return the deaths of workers, as their supervisor has them."""
    found = Deaths(Reporter().rescued)
    rights = None if started is None else set(started)
    found.waiting += [Dead(each, rights, "died", time.monotonic() + 60) for each in worker]
    return found


def drain(app: sqlq.App, **options: Any) -> Any:
    """Run a worker until nothing is available; return its counts."""
    return app.worker(drain=True, **options).run()


def run_one(app: sqlq.App, handler: Callable[[], Any], **options: Any) -> Any:
    """Run one job of this handler until nothing is available; return all that is known of it then."""
    job = app.enqueue(app.task(name="t", backoff="0s", **options)(handler).new())
    drain(app)
    return app.jobs.get(job.id)


def renew(leases: Any, renewed: dict[tuple[int, int], bool], sent_at: float) -> None:
    """Renew as a supervisor does, and look into it as the thread of the leases does."""
    leases.renewed_for_us(renewed, sent_at, entered=True)
    if (doubts := leases._doubts) is not None:
        leases._doubts = None
        leases._give_back(doubts)
        leases.beat()


def handler_of(kind: str, body: Callable[[], Any]) -> Any:
    """Return a handler that does what `body` does: a coroutine function where the kind is `async def`."""

    async def handler() -> Any:
        await asyncio.sleep(0)
        return body()

    def plain() -> Any:
        return body()

    return handler if kind == "async def" else plain


def refuse_threads(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Have no thread started whose name begins so, as where the system has none left."""
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name.startswith(name):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)


TOLD = [name for name in NAMES if name != "enqueued"]


def listening(app: sqlq.App, *names: EventName) -> list[JobEvent]:
    """Return a list that receives the events."""
    told: list[JobEvent] = []
    app.on(*names or TOLD)(told.extend)
    return told
