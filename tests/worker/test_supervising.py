"""The supervisor's decisions about the jobs of a handler that dies, in this process and without its loop."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, text

import sqlq
from sqlq.database.batch import Right
from sqlq.model.job import ClaimedJob
from sqlq.model.outcome import Finished, Outcome, Released
from sqlq.store.jobs import lease
from sqlq.store.workers import workers
from sqlq.worker.attempt.attempt import Attempt, Target
from sqlq.worker.ipc.parent import ORPHANED_MS, Facts, Parent, SharedMemory
from sqlq.worker.ipc.pipe import Pipe
from sqlq.worker.options import WorkerOptions
from sqlq.worker.report.meter import Totals
from sqlq.worker.run.isolated import IsolatedProcesses
from sqlq.worker.supervise import child as child_module
from sqlq.worker.supervise import supervisor
from sqlq.worker.supervise.child import Child
from sqlq.worker.supervise.heartbeat import Dispatcher, Heartbeat
from sqlq.worker.supervise.supervisor import Supervisor
from tests.kit import (
    claim,
    deaths,
    needs,
    refuse_threads,
    renew,
    run_isolated,
    supervising,
    wait_until,
    worker_of,
)
from tests.kit.hand import fail_before
from tests.kit.isolated import Spawned

LEASE_MS = 1_000


@pytest.fixture
def noop(app: sqlq.App) -> Any:
    return app.task(name="noop", max_attempts=3)(lambda: None)


def facts_of(app: sqlq.App, worker: str = "w", *, lease_ms: int = 30_000) -> Facts:
    return Facts.of(worker, app.database, replace(app.worker()._options, lease_ms=lease_ms))


def right(job: ClaimedJob) -> tuple[int, int]:
    return (job.id, job.lease_token)


def enter(app: sqlq.App, worker: str) -> None:
    with app.database.begin() as conn:
        workers.register(conn, id=worker, host="here", pid=1, version="0", queues=None, concurrency=1)


# -- when a worker has died ----------------------------------------------------------------------------------


@pytest.fixture
def dead_worker(app: sqlq.App) -> Callable[..., bool]:
    dead = deaths()

    def dies(worker: str, started: set[Right] | None) -> bool:
        """Release the jobs that a worker held, or the rest; return whether none is left."""
        if not dead.waiting:
            dead.waiting += deaths(worker, started=started).waiting
        return dead.release(app.database) == float("inf")

    return dies


def test_started_jobs_of_a_dead_worker_count_and_others_do_not(
    app: sqlq.App, noop: Any, dead_worker: Callable[..., bool]
) -> None:
    app.enqueue_many([noop.new() for _ in range(3)])
    started, unstarted = claim(app, "dead", limit=2)
    (others,) = claim(app, "alive")
    assert dead_worker("dead", {right(started)})
    lost, given_back, left = (app.jobs.get(job.id) for job in (started, unstarted, others))
    assert (lost.state, lost.attempts, lost.releases, lost.lease_token) == ("available", 1, 0, 2)
    assert [error["reason"] for error in lost.errors] == ["worker_lost"]
    assert (given_back.state, given_back.attempts, given_back.releases, given_back.errors) == (
        "available",
        0,
        1,
        [],
    )
    (line,) = given_back.history
    assert (line.outcome, line.attempt, line.worker, line.started_at) == ("released", 1, "dead", None)
    assert line.claimed_at is not None
    assert (left.state, left.reserved_by) == ("running", "alive")
    assert {job.id: job.losses for job in claim(app, "next")} == {started.id: 1, unstarted.id: 0}


def test_all_jobs_count_as_started_without_shared_memory(
    app: sqlq.App, noop: Any, dead_worker: Callable[..., bool]
) -> None:
    app.enqueue_many([noop.new(), noop.new()])
    held = claim(app, "dead")
    assert dead_worker("dead", None)
    assert [(app.jobs.get(job.id).attempts, app.jobs.get(job.id).releases) for job in held] == [
        (1, 0),
        (1, 0),
    ]


@needs("sessions")
def test_a_locked_row_is_released_later(
    app: sqlq.App, engine: Engine, noop: Any, dead_worker: Callable[..., bool]
) -> None:
    app.enqueue_many([noop.new(), noop.new()])
    locked, free = claim(app, "dead")
    enter(app, "dead")
    both = {right(locked), right(free)}
    with engine.begin() as rival:
        rival.execute(text("SELECT 1 FROM jobs WHERE id = :id FOR UPDATE"), {"id": locked.id})
        assert not dead_worker("dead", both), "there is something left to do"
        assert [app.jobs.get(job.id).state for job in (locked, free)] == ["running", "available"]
    assert dead_worker("dead", both)
    assert app.jobs.get(locked.id).state == "available"


def test_a_death_that_cannot_be_settled_keeps_no_other_waiting(
    app: sqlq.App, noop: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    owned = lease.owned

    def owned_by(conn: Connection, worker: str) -> list[Right]:
        if worker == "odd":
            raise LookupError("no such thing")
        return owned(conn, worker)

    monkeypatch.setattr(lease, "owned", owned_by)
    app.enqueue(noop.new())
    (job,) = claim(app, "dead")
    dead = deaths("odd", "dead", started={right(job)})
    assert dead.release(app.database) == float("inf"), "nothing is left to do"
    assert app.jobs.get(job.id).state == "available"
    assert "jobs of worker odd stay until their leases have run out: no such thing" in caplog.text


def test_an_end_that_the_database_refuses_makes_no_job_one_that_never_began(
    app: sqlq.App, engine: Engine, noop: Any, dead_worker: Callable[..., bool]
) -> None:
    job = app.enqueue(noop.new().set(max_attempts=1))
    (held,) = claim(app, "dead")
    fail_before(engine, job.id)
    assert dead_worker("dead", {right(held)}), "it is not tried again"
    with engine.connect() as conn:
        assert conn.execute(text("SELECT releases FROM jobs")).scalar_one() == 0


def test_a_job_whose_end_was_refused_is_not_released(app: sqlq.App, engine: Engine, noop: Any) -> None:
    worker = app.worker()
    leases = worker._leases
    enter(app, worker.id)
    job = app.enqueue(noop.new().set(max_attempts=1))
    (held,) = claim(app, worker.id)
    fail_before(engine, job.id)
    leases.let_go(right(held))

    def renewed() -> None:
        for _ in range(2):
            renew(leases, {right(held): False}, time.monotonic())

    for _ in range(2):
        renewed()
        with engine.connect() as conn:
            found = conn.execute(text("SELECT releases, lease_token FROM jobs")).one()
        assert tuple(found) == (0, held.lease_token), "its end was refused, and undone"
    with engine.begin() as conn:
        conn.execute(text("DELETE FROM failed_jobs"))
    renewed()
    assert app.jobs.get(job.id).state == "failed"


# -- what is short -------------------------------------------------------------------------------------------


def test_a_child_without_a_receiving_thread_is_killed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    processes: list[Any] = []

    def noted(command: Any, fds: Any) -> Any:
        processes.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        return processes[-1]

    monkeypatch.setattr(child_module, "spawn", noted)
    refuse_threads(monkeypatch, "sqlq-receive")
    try:
        with supervising(Supervisor([], WorkerOptions(processes=1, lease_ms=30_000, grace_ms=0), {})) as code:
            wait_until(lambda: caplog.messages, what="a line in the log")
        assert caplog.messages == ["no worker process can be started now: can't start new thread"]
        assert code.result() == 0, "it goes on, and waits before it tries again"
        assert [process.poll() is not None for process in processes] == [True]
    finally:
        for process in processes:
            process.kill()
            process.wait()


IS_READY = """
import sys
from sqlq.worker.ipc.pipe import Pipe
link = Pipe.inherited(int(sys.argv[1]))
link.send(ready=link.receive()["facts"])
while "stop" not in link.receive():
    pass
link.send(ended={})
"""
"""A worker process that is at work."""


def test_a_heartbeat_starts_its_thread_later_when_it_cannot_now(
    app: sqlq.App, keeper: Heartbeat, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = Pipe.pair()
    with monkeypatch.context() as patch:
        refuse_threads(patch, "sqlq-heartbeat")
        keeper.keep(facts_of(app, "w"), here)
        assert keeper._thread is None
    assert keeper.begin()
    here.close()
    there.close()


@needs("listen")
def test_a_host_without_maintenance_has_no_poller(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuse_threads(monkeypatch, "sqlq-maintenance")
    command, setup = [sys.executable, "-c", IS_READY], {"facts": facts_of(app)._asdict()}
    host = Supervisor(command, WorkerOptions(processes=2, lease_ms=30_000, grace_ms=60_000), setup=setup)
    why = "the thread sqlq-maintenance cannot be started"
    with supervising(host) as code:
        wait_until(lambda: host.ready == 2, what="both ready")
        assert f"each worker looks for jobs, and runs its services, itself: {why}" in caplog.text
        assert "sqlq-poller" not in {thread.name for thread in threading.enumerate()}
    assert code.result() == 0


# -- pauses of those who come later --------------------------------------------------------------------------


def test_a_later_worker_is_notified_of_the_end_of_a_pause() -> None:
    def child(name: str) -> Any:
        box, link = SimpleNamespace(note_poll=hash), SimpleNamespace(offer=partial(say, name))
        return SimpleNamespace(worker=name, requests=None, link=link, box=box)

    def say(name: str, *, all_paused: bool) -> None:
        said.append((name, all_paused))

    said: list[tuple[str, bool]] = []
    children = [child("first")]
    keeper: Any = SimpleNamespace(knows=bool)
    host = Dispatcher(lambda: children, keeper)
    host.publish(workers.Requests(all_paused=True))
    children.append(child("second"))
    for _ in range(2):
        host.publish(workers.Requests(all_paused=False))
    assert said == [("first", True), ("first", False), ("second", False)]


# -- while it lives ------------------------------------------------------------------------------------------


@pytest.fixture
def keeper() -> Iterator[Heartbeat]:
    keeper = Heartbeat(LEASE_MS, Totals())
    yield keeper
    keeper.close()


def test_the_heartbeat_renews_its_workers_jobs_and_notifies_it(
    app: sqlq.App, engine: Engine, noop: Any, keeper: Heartbeat, database_url: str
) -> None:
    app.enqueue_many([noop.new(), noop.new()])
    mine, others = claim(app, "mine", limit=1)[0], claim(app, "other")[0]
    enter(app, "mine")

    def leases() -> dict[int, Any]:
        with engine.connect() as conn:
            return {
                row.id: row.lease_expires_at
                for row in conn.execute(text("SELECT id, lease_expires_at FROM jobs"))
            }

    before = leases()
    here, there = Pipe.pair()
    child = Pipe(there)
    keeper.keep(facts_of(app, "mine"), here)
    message = child.receive()
    assert message is not None
    assert message["renewed"]["rights"] == [[*right(mine), False]]
    assert message["renewed"]["entered"]
    after = leases()
    assert after[mine.id] != before[mine.id]
    assert after[others.id] == before[others.id]
    here.close()
    child.close()


@needs("sessions")
def test_a_locked_worker_row_does_not_stop_renewals_of_others(
    app: sqlq.App, engine: Engine, noop: Any
) -> None:
    app.enqueue(noop.new())
    (job,) = claim(app, "well")
    for worker in ("stuck", "well"):
        enter(app, worker)
    with engine.begin() as conn, app.database.begin() as standing_in:
        conn.execute(text("UPDATE sqlq_workers SET concurrency = 2 WHERE id = 'stuck'"))
        standing_in.execute(text("SET LOCAL lock_timeout = '1s'"))
        entered, renewed = workers.stand_in(standing_in, ["stuck", "well"], lease_ms=LEASE_MS)
    assert entered == {"stuck", "well"}
    assert renewed == {"stuck": {}, "well": {right(job): False}}


def test_a_worker_unknown_to_the_heartbeat_renews_for_itself(
    app: sqlq.App, keeper: Heartbeat, database_url: str
) -> None:
    """An engine with a creator of its own may lead to another database than its URL."""
    here, there = Pipe.pair()
    keeper.keep(facts_of(app, "elsewhere"), here)
    wait_until(lambda: not keeper._kept, what="the keeper noticing")
    with pytest.raises(BlockingIOError):
        there.recv(1, socket.MSG_DONTWAIT)
    here.close()
    there.close()


def test_a_worker_whose_supervisor_is_gone_stops_soon() -> None:
    box, fd = SharedMemory.create()
    os.close(fd)
    here, there = Pipe.pair()
    supervisor = Pipe(there)
    stops: list[int | None] = []
    Parent(here, box).listen({"stop": stops.append}, dict)
    supervisor.send(stop=None)
    wait_until(lambda: stops, what="being told to stop")
    assert stops == [None], "within its own grace time"
    supervisor.close()
    wait_until(lambda: len(stops) == 2, what="the end of the link noticed")
    assert stops[1] == ORPHANED_MS
    here.close()
    box.close()


SPEAKS = """
import os, sys
os.write(int(sys.argv[1]), b'{"more": true}\\n{"ended": {}}\\n')
"""


def test_a_bad_message_does_not_stop_a_supervisor_from_receiving() -> None:
    heard: list[Any] = []

    def hear(child: Child, message: Any) -> None:
        if message == {"more": True}:
            raise ValueError("mmap closed or invalid")
        heard.append(message)

    child = Child([sys.executable, "-c", SPEAKS], hear, {})
    try:
        wait_until(lambda: len(heard) == 2, timeout=20, what="its last word and its end")
        assert heard == [{"ended": {}}, None]
    finally:
        wait_until(lambda: child.end() is not None, what="its process ending")
        child.close()


def test_the_shared_memory_has_the_running_jobs(app: sqlq.App) -> None:
    """So a kill in the middle of it counts as that job's attempt."""
    box, fd = SharedMemory.create()
    os.close(fd)
    here, there = Pipe.pair()
    seen: list[Any] = []

    @app.task(name="looks")
    def looks() -> None:
        job = sqlq.current_job()
        seen.append(box.running() == [((job.id, job.lease_token), math.inf)])

    app.enqueue(looks.new())
    assert worker_of(app, drain=True, supervision=Parent(here, box)).run().finished == 1
    assert seen == [True]
    assert box.read() == set(), "and is forgotten when it is settled"
    here.close()
    there.close()
    box.close()


# -- processes for one job at a time -------------------------------------------------------------------------


class Recorded(IsolatedProcesses):
    """Notes which jobs were to run in a process of their own, and starts none."""

    def __init__(self) -> None:
        super().__init__(lambda fd: pytest.fail("a process was started"))
        self.ran: list[int] = []

    def execute(self, running: Attempt, *_: object) -> Outcome:
        self.ran.append(running.id)
        return Finished()


def test_jobs_that_lost_a_worker_or_are_isolated_run_alone(app: sqlq.App, engine: Engine, noop: Any) -> None:
    alone = app.task(name="alone", isolate=True)(lambda: None)
    usual, lost, isolated = app.enqueue_many([noop.new(), noop.new(), alone.new()])
    with engine.begin() as conn:
        conn.execute(text("UPDATE jobs SET losses = 1 WHERE id = :id"), {"id": lost.id})
    isolates = Recorded()
    assert worker_of(app, drain=True, isolates=isolates).run().finished == 3
    assert sorted(isolates.ran) == [lost.id, isolated.id]
    assert usual.id not in isolates.ran


class Killable(Attempt):
    """Keeps what would kill it, as a heartbeat does that is just about to."""

    seen: Callable[[], None]

    def mark_started(self) -> None:
        super().mark_started()
        assert self.kill is not None
        self.seen = self.kill


def test_a_late_kill_does_not_end_the_next_job() -> None:
    spawned = Spawned()

    def job(id: int) -> Killable:
        return Killable(
            ClaimedJob(id, 1, "q", "t", "{}", 1, 3),
            None,
            float("inf"),
            Target(),
            isolated=True,
        )

    isolates = spawned.isolates
    first, second = job(1), job(2)
    assert run_isolated(isolates, first) == Finished()
    first.seen()
    assert run_isolated(isolates, second) == Finished()
    assert len(spawned.processes) == 1, "one after the other in the same process"
    (isolate,) = isolates._all
    isolates.close()
    isolate.link.close()
    assert isinstance(run_isolated(isolates, job(3)), Released)


# -- complete() ----------------------------------------------------------------------------------------------


def test_a_watchdog_counts_no_time_when_the_supervisor_did_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example the machine slept: then no child could give a sign of life."""
    now, killed = [100.0], list[int]()
    monkeypatch.setattr(supervisor, "monotonic", lambda: now[0])
    child: Any = SimpleNamespace(
        worker="w",
        has_reported=False,
        stuck=None,
        is_silent=False,
        sign=0.0,
        silent=0.0,
        box=SimpleNamespace(last_sign=lambda: 1.0, running=list),
        process=SimpleNamespace(pid=1, kill=lambda: killed.append(1)),
    )
    heartbeat: Any = SimpleNamespace(worker_stuck=lambda worker, stuck: None)
    dog = supervisor.Watchdog(heartbeat, WorkerOptions(processes=1, lease_ms=30_000, grace_ms=0))
    dog.look([child], is_whole=True)
    now[0] += 3_600
    dog.look([child], is_whole=True)
    assert not killed
    for _ in range(int(supervisor.SILENT_SECONDS)):
        now[0] += 1
        dog.look([child], is_whole=True)
    assert killed == [1]
