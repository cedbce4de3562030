"""The supervisor's decisions about the jobs of a handler that dies, in this process and without its loop."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, text

import sqlq
from sqlq.database.batch import Right
from sqlq.model.job import ClaimedJob
from sqlq.model.outcome import Finished
from sqlq.store.jobs import lease
from sqlq.store.workers import workers
from sqlq.worker.attempt.attempt import Attempt
from sqlq.worker.ipc.parent import Facts
from sqlq.worker.ipc.pipe import Pipe
from sqlq.worker.options import WorkerOptions
from sqlq.worker.report.meter import Totals
from sqlq.worker.supervise import child as child_module
from sqlq.worker.supervise import supervisor
from sqlq.worker.supervise.child import Child
from sqlq.worker.supervise.heartbeat import Dispatcher, Heartbeat
from sqlq.worker.supervise.supervisor import Supervisor
from tests.kit import (
    claim,
    committed,
    deaths,
    execute,
    locked,
    needs,
    refuse_threads,
    renew,
    run_isolated,
    supervised,
    supervising,
    wait_until,
    worker_of,
)
from tests.kit.hand import fail_before
from tests.kit.isolated import Spawned

LEASE_MS = 1_000


@pytest.fixture
def keeper() -> Iterator[Heartbeat]:
    keeper = Heartbeat(LEASE_MS, Totals())
    yield keeper
    keeper.close()


@pytest.fixture
def pipe() -> Iterator[tuple[Pipe, Pipe]]:
    """A supervisor's end of a pipe, and a worker's."""
    here, there = Pipe.pair()
    ends = here, Pipe(there)
    yield ends
    for end in ends:
        end.close()


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


@pytest.mark.parametrize("has_memory", [True, False], ids=["memory", "none"])
def test_started_jobs_of_a_dead_worker_count_and_others_do_not(
    app: sqlq.App, noop: Any, has_memory: bool
) -> None:
    """Without shared memory all of them may have started."""
    app.enqueue_many([noop.new() for _ in range(3)])
    started, unstarted = claim(app, "dead", limit=2)
    (others,) = claim(app, "alive")
    dead = deaths("dead", started={right(started)} if has_memory else None)
    assert dead.release(app.database) == math.inf
    lost, given_back, left = (app.jobs.get(job.id) for job in (started, unstarted, others))
    assert (lost.state, lost.attempts, lost.releases, lost.lease_token) == ("available", 1, 0, 2)
    assert [error["reason"] for error in lost.errors] == ["worker_lost"]
    if has_memory:
        assert (given_back.attempts, given_back.releases, given_back.errors) == (0, 1, [])
    else:
        assert (given_back.attempts, given_back.releases) == (1, 0)
    assert (left.state, left.reserved_by) == ("running", "alive")
    losses = {job.id: job.losses for job in claim(app, "next")}
    assert losses == {started.id: 1, unstarted.id: 0 if has_memory else 1}


@needs("sessions")
def test_a_locked_row_is_released_later(app: sqlq.App, engine: Engine, noop: Any) -> None:
    app.enqueue_many([noop.new(), noop.new()])
    held, free = claim(app, "dead")
    enter(app, "dead")
    dead = deaths("dead", started={right(held), right(free)})
    with locked(engine, held.id):
        assert dead.release(app.database) < math.inf, "there is something left to do"
        assert [app.jobs.get(job.id).state for job in (held, free)] == ["running", "available"]
    assert dead.release(app.database) == math.inf
    assert app.jobs.get(held.id).state == "available"


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
    app: sqlq.App, engine: Engine, noop: Any
) -> None:
    job = app.enqueue(noop.new().set(max_attempts=1))
    (held,) = claim(app, "dead")
    fail_before(engine, job.id)
    dead = deaths("dead", started={right(held)})
    assert dead.release(app.database) == math.inf, "it is not tried again"
    assert committed(engine, column="releases") == [0]


def test_a_job_whose_end_was_refused_is_not_released(app: sqlq.App, engine: Engine, noop: Any) -> None:
    worker = app.worker()
    leases = worker._leases
    enter(app, worker.id)
    job = app.enqueue(noop.new().set(max_attempts=1))
    (held,) = claim(app, worker.id)
    fail_before(engine, job.id)
    leases.let_go(right(held))
    for _ in range(4):
        renew(leases, {right(held): False}, time.monotonic())
        assert committed(engine, column="releases") == [0]
        assert committed(engine, column="lease_token") == [held.lease_token], "its end was undone"
    execute(engine, "DELETE FROM failed_jobs")
    for _ in range(2):
        renew(leases, {right(held): False}, time.monotonic())
    assert app.jobs.get(job.id).state == "failed"


# -- what is short -------------------------------------------------------------------------------------------

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


def test_a_child_without_a_receiving_thread_is_killed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    processes: list[Any] = []

    def noted(command: Any, fds: Any) -> Any:
        processes.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        return processes[-1]

    monkeypatch.setattr(child_module, "spawn", noted)
    refuse_threads(monkeypatch, "sqlq-receive")
    with supervising(Supervisor([], WorkerOptions(processes=1, lease_ms=30_000, grace_ms=0), {})) as code:
        wait_until(lambda: caplog.messages, what="a line in the log")
    assert caplog.messages == ["no worker process can be started now: can't start new thread"]
    assert code.result() == 0, "it goes on, and waits before it tries again"
    wait_until(lambda: [process.poll() for process in processes] == [-9], timeout=20, what="its end")


def test_a_heartbeat_starts_its_thread_later_when_it_cannot_now(
    app: sqlq.App, keeper: Heartbeat, pipe: tuple[Pipe, Pipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        refuse_threads(patch, "sqlq-heartbeat")
        keeper.keep(facts_of(app, "w"), pipe[0])
        assert not keeper.begin()
    assert keeper.begin()


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


def test_the_heartbeat_renews_its_workers_jobs_and_notifies_it(
    app: sqlq.App, engine: Engine, noop: Any, keeper: Heartbeat, pipe: tuple[Pipe, Pipe]
) -> None:
    app.enqueue_many([noop.new(), noop.new()])
    (mine,), _ = claim(app, "mine", limit=1), claim(app, "other")
    enter(app, "mine")
    before = committed(engine, column="lease_expires_at")
    keeper.keep(facts_of(app, "mine"), pipe[0])
    message = pipe[1].receive()
    assert message is not None
    assert message["renewed"]["rights"] == [[*right(mine), False]]
    assert message["renewed"]["entered"]
    after = committed(engine, column="lease_expires_at")
    assert len({*before} & {*after}) == 1, "its own alone"


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
    app: sqlq.App, keeper: Heartbeat, pipe: tuple[Pipe, Pipe]
) -> None:
    """An engine with a creator of its own may lead to another database than its URL."""
    keeper.keep(facts_of(app, "elsewhere"), pipe[0])
    wait_until(lambda: not keeper._kept, what="the keeper noticing")
    pipe[0].send(no="renewal")
    assert pipe[1].receive() == {"no": "renewal"}


def test_a_bad_message_does_not_stop_a_supervisor_from_receiving() -> None:
    heard: list[Any] = []

    def hear(child: Child, message: Any) -> None:
        if message == {"more": True}:
            raise ValueError("mmap closed or invalid")
        heard.append(message)

    program = """import os, sys; os.write(int(sys.argv[1]), b'{"more": true}\\n{"ended": {}}\\n')"""
    child = Child([sys.executable, "-c", program], hear, {})
    try:
        wait_until(lambda: len(heard) == 2, timeout=20, what="its last word and its end")
        assert heard == [{"ended": {}}, None]
    finally:
        wait_until(lambda: child.end() is not None, what="its process ending")
        child.close()


def test_the_shared_memory_has_the_running_jobs(app: sqlq.App) -> None:
    """So a kill in the middle of it counts as that job's attempt."""
    seen: list[Any] = []

    @app.task(name="looks")
    def looks() -> None:
        job = sqlq.current_job()
        seen.append(box.running() == [((job.id, job.lease_token), math.inf)])

    app.enqueue(looks.new())
    with supervised() as (supervision, box, _):
        assert worker_of(app, drain=True, supervision=supervision).run().finished == 1
        assert seen == [True]
        assert box.read() == set(), "and is forgotten when it is settled"


class Killable(Attempt):
    """Keeps what would kill it, as a heartbeat does that is just about to."""

    def mark_started(self) -> None:
        super().mark_started()
        self.seen = self.kill


def test_a_late_kill_does_not_end_the_next_job() -> None:
    spawned = Spawned()
    first: Any = spawned.job(kind=Killable)
    assert run_isolated(spawned.isolates, first) == Finished()
    first.seen()
    assert spawned.run() == Finished()
    assert len(spawned.processes) == 1, "one after the other in the same process"
    spawned.isolates.close()


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
