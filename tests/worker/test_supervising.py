"""A supervisor: the jobs of a worker that dies, renewals, and the poller of its host, which wakes workers."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.orm import Session

import sqlq
from sqlq.database.batch import Right
from sqlq.database.database import Database
from sqlq.model.job import ClaimedJob
from sqlq.store.jobs import lease, settle
from sqlq.store.workers import look as workers_look
from sqlq.store.workers import notify, workers
from sqlq.worker import worker as worker_module
from sqlq.worker.ipc.parent import ORPHANED_MS, Facts, NoParent
from sqlq.worker.ipc.pipe import Pipe
from sqlq.worker.maintain import services
from sqlq.worker.options import WorkerOptions
from sqlq.worker.report.meter import Totals
from sqlq.worker.supervise import child as child_module
from sqlq.worker.supervise.child import Child
from sqlq.worker.supervise.heartbeat import Heartbeat
from sqlq.worker.supervise.supervisor import Supervisor
from sqlq.worker.wait import poller, wake
from sqlq.worker.wait.poller import LastLook, Poller
from sqlq.worker.wait.wake import Wake
from tests import kit
from tests.kit.hand import fail_before

LEASE_MS = 1_000
CHILDREN = "tests.programs.children"


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
    there.settimeout(30)
    yield ends
    for end in ends:
        end.close()


def facts_of(app: sqlq.App, worker: str = "w") -> Facts:
    return Facts.of(worker, app.database, replace(app.worker()._options, lease_ms=30_000))


def right(job: ClaimedJob) -> tuple[int, int]:
    return (job.id, job.lease_token)


def enter(app: sqlq.App, worker: str) -> None:
    with app.database.begin() as conn:
        workers.register(conn, id=worker, host="here", pid=1, version="0", queues=None, concurrency=1)


@pytest.mark.parametrize("has_memory", [True, False], ids=["memory", "none"])
def test_started_jobs_of_a_dead_worker_count_and_others_do_not(
    app: sqlq.App, noop: Any, has_memory: bool
) -> None:
    """Without shared memory all of them may have started."""
    app.enqueue_many([noop.new() for _ in range(3)])
    started, unstarted = kit.claim(app, "dead", limit=2)
    (others,) = kit.claim(app, "alive")
    dead = kit.deaths("dead", started={right(started)} if has_memory else None)
    assert dead.release(app.database) == inf
    lost, given_back, left = (app.jobs.get(job.id) for job in (started, unstarted, others))
    assert (lost.state, lost.attempts, lost.releases, lost.lease_token) == ("available", 1, 0, 2)
    assert [error["reason"] for error in lost.errors] == ["worker_lost"]
    if has_memory:
        assert (given_back.attempts, given_back.releases, given_back.errors) == (0, 1, [])
    else:
        assert (given_back.attempts, given_back.releases) == (1, 0)
    assert (left.state, left.reserved_by) == ("running", "alive")
    losses = {job.id: job.losses for job in kit.claim(app, "next")}
    assert losses == {started.id: 1, unstarted.id: 0 if has_memory else 1}


@kit.needs("sessions")
def test_a_locked_row_is_released_later(app: sqlq.App, engine: Engine, noop: Any) -> None:
    app.enqueue_many([noop.new(), noop.new()])
    held, free = kit.claim(app, "dead")
    enter(app, "dead")
    dead = kit.deaths("dead", started={right(held), right(free)})
    with kit.locked(engine, held.id):
        assert dead.release(app.database) < inf, "there is something left to do"
        assert [app.jobs.get(job.id).state for job in (held, free)] == ["running", "available"]
    assert dead.release(app.database) == inf
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
    (job,) = kit.claim(app, "dead")
    dead = kit.deaths("odd", "dead", started={right(job)})
    assert dead.release(app.database) == float("inf"), "nothing is left to do"
    assert app.jobs.get(job.id).state == "available"
    assert "jobs of worker odd stay until their leases have run out: no such thing" in caplog.text


def test_an_end_that_the_database_refuses_makes_no_job_one_that_never_began(
    app: sqlq.App, engine: Engine, noop: Any
) -> None:
    job = app.enqueue(noop.new().set(max_attempts=1))
    (held,) = kit.claim(app, "dead")
    fail_before(engine, job.id)
    dead = kit.deaths("dead", started={right(held)})
    assert dead.release(app.database) == inf, "it is not tried again"
    assert kit.committed(engine, column="releases") == [0]


def test_a_job_whose_end_was_refused_is_not_released(app: sqlq.App, engine: Engine, noop: Any) -> None:
    worker = app.worker()
    leases = worker._leases
    enter(app, worker.id)
    job = app.enqueue(noop.new().set(max_attempts=1))
    (held,) = kit.claim(app, worker.id)
    fail_before(engine, job.id)
    leases.let_go(right(held))
    for _ in range(4):
        kit.renew(leases, {right(held): False}, time.monotonic())
        assert kit.committed(engine, column="releases") == [0]
        assert kit.committed(engine, column="lease_token") == [held.lease_token], "its end was undone"
    kit.execute(engine, "DELETE FROM failed_jobs")
    for _ in range(2):
        kit.renew(leases, {right(held): False}, time.monotonic())
    assert app.jobs.get(job.id).state == "failed"


def test_a_child_without_a_receiving_thread_is_killed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    processes: list[Any] = []

    def noted(command: Any, fds: Any) -> Any:
        processes.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        return processes[-1]

    monkeypatch.setattr(child_module, "spawn", noted)
    kit.refuse_threads(monkeypatch, "sqlq-receive")
    with kit.supervising(Supervisor([], WorkerOptions(processes=1, lease_ms=30_000, grace_ms=0), {})) as code:
        kit.wait_until(lambda: caplog.messages, what="a line in the log")
    assert caplog.messages == ["no worker process can be started now: can't start new thread"]
    assert code.result() == 0, "it goes on, and waits before it tries again"
    kit.wait_until(lambda: [process.poll() for process in processes] == [-9], timeout=20, what="its end")


@kit.needs("listen")
def test_a_host_without_maintenance_has_no_poller(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kit.refuse_threads(monkeypatch, "sqlq-maintenance")
    command, setup = [sys.executable, "-m", CHILDREN, "ready"], {"facts": facts_of(app)._asdict()}
    host = Supervisor(command, WorkerOptions(processes=2, lease_ms=30_000, grace_ms=60_000), setup=setup)
    why = "the thread sqlq-maintenance cannot be started"
    with kit.supervising(host) as code:
        kit.wait_until(lambda: host.ready == 2, what="both ready")
        assert f"each worker looks for jobs, and runs its services, itself: {why}" in caplog.text
        assert "sqlq-poller" not in {thread.name for thread in threading.enumerate()}
    assert code.result() == 0


def test_the_heartbeat_renews_its_workers_jobs_and_notifies_it(
    app: sqlq.App, engine: Engine, noop: Any, keeper: Heartbeat, pipe: tuple[Pipe, Pipe]
) -> None:
    app.enqueue_many([noop.new(), noop.new()])
    (mine,), _ = kit.claim(app, "mine", limit=1), kit.claim(app, "other")
    enter(app, "mine")
    before = kit.committed(engine, column="lease_expires_at")
    keeper.keep(facts_of(app, "mine"), pipe[0])
    message = pipe[1].receive()
    assert message is not None
    assert message["renewed"]["rights"] == [[*right(mine), False]]
    assert message["renewed"]["entered"]
    after = kit.committed(engine, column="lease_expires_at")
    assert len({*before} & {*after}) == 1, "its own alone"


@kit.needs("sessions")
def test_a_locked_worker_row_stops_no_renewals_of_others(app: sqlq.App, engine: Engine, noop: Any) -> None:
    app.enqueue(noop.new())
    (job,) = kit.claim(app, "well")
    for worker in ("stuck", "well"):
        enter(app, worker)
    with engine.begin() as conn, app.database.begin() as standing_in:
        conn.execute(text("UPDATE sqlq_workers SET concurrency = 2 WHERE id = 'stuck'"))
        standing_in.execute(text("SET LOCAL lock_timeout = '1s'"))
        entered, renewed = workers.stand_in(standing_in, ["stuck", "well"], lease_ms=LEASE_MS)
    assert entered == {"stuck", "well"}
    assert renewed == {"stuck": {}, "well": {right(job): False}}


def test_a_worker_unknown_to_the_heartbeat_renews_for_itself(
    app: sqlq.App, keeper: Heartbeat, pipe: tuple[Pipe, Pipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine with a creator of its own may lead to another database than its URL. The thread of the
    heartbeat is started later when that cannot be now."""
    with monkeypatch.context() as patch:
        kit.refuse_threads(patch, "sqlq-heartbeat")
        keeper.keep(facts_of(app), pipe[0])
        assert not keeper.begin()
    assert keeper.begin()
    kit.wait_until(lambda: not keeper._kept, timeout=30, what="the keeper noticing")
    pipe[0].send(no="renewal")
    assert pipe[1].receive() == {"no": "renewal"}


def test_a_worker_whose_supervisor_is_gone_stops_soon() -> None:
    stops: list[int | None] = []
    with kit.supervised() as (parent, _, supervisor):
        parent.listen({"stop": stops.append}, dict)
        supervisor.send(stop=None)
        kit.wait_until(lambda: stops == [None], timeout=30, what="a stop within its own grace time")
        supervisor.close()
        kit.wait_until(lambda: stops == [None, ORPHANED_MS], timeout=30, what="the end of the pipe noticed")


def test_a_bad_message_does_not_stop_a_supervisor_from_receiving() -> None:
    heard: list[Any] = []

    def hear(child: Child, message: Any) -> None:
        if message == {"more": True}:
            raise ValueError("mmap closed or invalid")
        heard.append(message)

    program = """import os, sys; os.write(int(sys.argv[1]), b'{"more": true}\\n{"ended": {}}\\n')"""
    child = Child([sys.executable, "-c", program], hear, {})
    try:
        kit.wait_until(lambda: len(heard) == 2, timeout=20, what="its last word and its end")
        assert heard == [{"ended": {}}, None]
    finally:
        kit.wait_until(lambda: child.end() is not None, timeout=20, what="its process ending")
        child.close()


def test_the_shared_memory_has_the_running_jobs(app: sqlq.App) -> None:
    """So a kill in the middle of it counts as that job's attempt."""
    seen: list[Any] = []

    @app.task(name="looks")
    def looks() -> None:
        job = sqlq.current_job()
        seen.append(box.running() == [((job.id, job.lease_token), inf)])

    app.enqueue(looks.new())
    with kit.supervised() as (supervision, box, _):
        assert kit.worker_of(app, drain=True, supervision=supervision).run().finished == 1
        assert seen == [True]
        assert box.read() == set(), "and is forgotten when it is settled"


@contextmanager
def looking_out(app: sqlq.App, *, quiet: bool = False) -> Iterator[Counter[str]]:
    """Run a poller, and count its looks and how often it sends a worker."""
    seen = Counter[str]()
    poller = Poller(
        app.database.for_loops,
        WorkerOptions(lease_ms=30_000),
        lambda: seen.update(["sent"]),
        last_look=LastLook(NoParent()),
        on_look=lambda look, at: seen.update(["looked"]),
        workers=tuple,
        quiet=quiet,
    )
    poller.start()
    try:
        yield seen
    finally:
        poller.close(5.0)


@kit.needs("listen")
def test_a_notification_within_a_poll_is_read_at_once(app: sqlq.App, monkeypatch: pytest.MonkeyPatch) -> None:
    look = workers_look.look

    def looks(conn: Connection, *arguments: Any, **options: Any) -> Any:
        answer = look(conn, *arguments, **options)
        # a session receives its own notification with the answer
        conn.exec_driver_sql("SELECT pg_notify(%s, '')", (notify.channel(app.database.schema),))
        return answer

    monkeypatch.setattr(workers_look, "look", looks)
    monkeypatch.setattr(poller, "IDLE_POLL_SECONDS", 3600.0)
    with looking_out(app) as seen:
        kit.wait_until(lambda: seen["sent"], timeout=20, what="a worker sent")


@kit.needs("listen")
def test_the_poller_wakes_a_worker_in_time(app: sqlq.App, noop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    look = workers_look.look

    def looks(*asked: Any, **more: Any) -> workers_look.Look:
        time.sleep(0.1)  # noqa: TID251 - so long a question takes to the server
        return look(*asked, **more)

    monkeypatch.setattr(workers_look, "look", looks)
    monkeypatch.setattr(poller, "IDLE_POLL_SECONDS", 3600.0)
    app.enqueue(noop.new().set(delay="1s"))
    with looking_out(app) as seen:
        kit.wait_until(lambda: seen["sent"], what="a worker sent")
        assert seen["looked"] == 1
        assert app.jobs.get(1).state == "available", "not before"


@kit.needs("listen")
def test_a_mistake_in_the_poller_is_logged_with_its_traceback(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Under a supervisor too, where a poller logs no outage."""
    monkeypatch.setattr(workers_look, "look", lambda *given, **named: 1 + "1")  # type: ignore[operator]
    with looking_out(app, quiet=True):
        kit.wait_until(lambda: caplog.records, what="a line in the log")
    assert caplog.records[0].exc_info is not None
    assert caplog.records[0].levelname == "ERROR"
    assert "does not answer" not in caplog.text


@kit.needs("listen")
def test_the_poller_starts_the_rescue_of_an_idle_worker(
    app: sqlq.App, engine: Engine, noop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its service runs when a poll has found a job, and not by itself while there are polls."""
    monkeypatch.setattr(poller, "RESCUE_MS", 100)
    job = app.enqueue(noop.new())
    with kit.working(app, queues=["other"]) as worker:
        kit.wait_until(worker._last_look.is_recent, what="a poll")
        kit.execute(engine, "UPDATE jobs SET reserved_at = now(), lease_expires_at = now(), attempts = 1")
        kit.wait_until(lambda: app.jobs.get(job.id).state == "available", what="the rescue")


@kit.needs("postgresql")
def test_a_resting_worker_keeps_one_connection_beside_that_for_claims(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "IDLE_SECONDS", 0.0)

    def open_(database: Database) -> int:
        pool: Any = database.engine.pool
        return int(pool.checkedin() + pool.checkedout())

    with kit.working(app) as worker:
        with app.database.read(), app.database.for_loops.read(), app.database.for_loops.read():
            pass
        notify.notify(app.database.for_loops)
        with app.database.for_claims.read(), app.database.for_claims.read():
            pass
        kit.wait_until(lambda: worker._wake.is_resting, what="the worker resting")
        worker._wake.call()
        kit.wait_until(lambda: open_(app.database.for_loops) <= 1, what="connections closed")
        kit.wait_until(lambda: open_(app.database.for_claims) <= 1, what="connections of claims closed")
        kit.wait_until(lambda: open_(app.database) == 0, what="the App's connections closed")


def test_a_call_as_a_wait_ends_counts_for_the_next(app: sqlq.App, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drain that missed the end of its last job would rest for ever."""
    events: list[threading.Event] = []

    class CalledLate(threading.Event):
        def __init__(self) -> None:
            super().__init__()
            self.late = True
            events.append(self)

        def is_set(self) -> bool:
            was = super().is_set()
            if self.late:
                self.late = False
                self.set()
            return was

    monkeypatch.setattr(wake, "threading", SimpleNamespace(Event=CalledLate, Lock=threading.Lock))
    Wake(app.database).wait()
    (called,) = events
    assert called.is_set()


def test_a_wait_ends_at_the_nearest_known_time(app: sqlq.App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wake, "FIRST_LOOK_SECONDS", 30.0)
    monkeypatch.setattr(wake, "POLL_SECONDS", 30.0)
    waiting, began = Wake(app.database), time.monotonic()
    for seconds in (3600.0, 0.1, 7200.0):
        waiting.at(began + seconds)
    assert waiting.wait(), "ended by the calls"
    waiting.wait()
    assert 0.1 <= time.monotonic() - began < 10.0


@kit.needs("postgresql")
def test_a_supervisors_only_worker_looks_at_once(app: sqlq.App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poller, "STAND_BY_SECONDS", 3600.0)
    with kit.supervised(is_alone=True) as (parent, _, _), kit.working(app, supervision=parent) as worker:
        kit.wait_until(lambda: worker._last_look.at() > 0, what="its lookout looking")


@kit.needs("postgresql")
def test_a_worker_of_a_silent_supervisor_rescues_jobs(app: sqlq.App, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the supervisor looks, it also does the maintenance."""
    monkeypatch.setattr(services, "RESCUE_MS", 50)
    monkeypatch.setattr("sqlq.worker.maintain.maintenance.RESCUE_MS", 50)
    monkeypatch.setattr(poller, "STAND_BY_SECONDS", 3600.0)
    turns: list[str] = []

    def rescue(conn: Any, **options: Any) -> list[Any]:
        turns.append("rescue")
        return []

    def sweep(service: services.Sweep) -> float:
        turns.append("sweep")
        return 0.05

    monkeypatch.setattr(settle, "rescue", rescue)
    monkeypatch.setattr(services.Sweep, "run", sweep)
    with kit.supervised() as (parent, box, _):
        box.note_poll(time.monotonic() + 3600)
        with kit.working(app, supervision=parent) as worker:
            kit.wait_until(lambda: worker._wake.is_resting, what="the worker resting")
            assert turns == []
            box.note_poll(time.monotonic() - poller.TRUSTED_SECONDS + 0.1)
            kit.wait_until(lambda: {*turns} == {"rescue", "sweep"}, what="a rescue, and a sweep")


@kit.needs("mariadb")
@pytest.mark.parametrize("by", ["sqlq", "session", "another process"])
def test_a_worker_without_notifications_is_woken_by_enqueues_of_its_machine(
    app: sqlq.App, engine: Engine, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    monkeypatch.setattr(poller, "IDLE_POLL_SECONDS", 3600.0)
    monkeypatch.setattr(poller, "TRUSTED_SECONDS", 3600.0)
    monkeypatch.setattr(wake, "POLL_SECONDS", 3600.0)
    ran = threading.Event()
    task = app.task(name="t")(ran.set)
    with kit.working(app) as worker:
        kit.wait_until(lambda: worker._wake.is_resting, what="the worker at rest")
        if by == "another process":
            url = engine.url.render_as_string(hide_password=False)
            subprocess.run([sys.executable, "-m", "sqlq", "-d", url, "enqueue", "t"], check=True, timeout=60)
        elif by == "sqlq":
            app.enqueue(task.new())
        else:
            with Session(engine) as session, session.begin():
                app.enqueue(task.new(), session=session)
        assert ran.wait(30)
