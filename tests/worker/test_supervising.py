"""A supervisor: the jobs of a worker that dies, renewals, and the poller of its host, which wakes workers."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any, Self

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.orm import Session

import sqlq
from sqlq.config.constants import RESCUE_MS
from sqlq.database.batch import Right
from sqlq.database.database import Database
from sqlq.model.job import ClaimedJob
from sqlq.model.outcome import Finished
from sqlq.store.jobs import lease, settle
from sqlq.store.workers import look as workers_look
from sqlq.store.workers import notify, workers
from sqlq.worker import worker as worker_module
from sqlq.worker.attempt.attempt import Attempt
from sqlq.worker.ipc.parent import ORPHANED_MS, Facts, NoParent, SharedMemory
from sqlq.worker.ipc.pipe import Pipe
from sqlq.worker.maintain import services
from sqlq.worker.options import WorkerOptions
from sqlq.worker.report.meter import Totals
from sqlq.worker.supervise import child as child_module
from sqlq.worker.supervise import supervisor
from sqlq.worker.supervise.child import Child, Stage
from sqlq.worker.supervise.heartbeat import HELPERS, Dispatcher, Heartbeat
from sqlq.worker.supervise.supervisor import Supervisor
from sqlq.worker.wait import poller, wake
from sqlq.worker.wait.poller import (
    IDLE_POLL_SECONDS,
    STAND_BY_SECONDS,
    TRUSTED_SECONDS,
    WINNERS,
    Agenda,
    LastLook,
    Poller,
    drawn,
    looks_for_services,
)
from sqlq.worker.wait.wake import Wake
from tests.kit import (
    claim,
    committed,
    deaths,
    execute,
    for_each,
    locked,
    needs,
    refuse_threads,
    renew,
    run_isolated,
    supervised,
    supervising,
    wait_until,
    worker_of,
    working,
)
from tests.kit.hand import fail_before
from tests.kit.isolated import Spawned

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
    assert dead.release(app.database) == inf
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
    assert dead.release(app.database) == inf, "it is not tried again"
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
    command, setup = [sys.executable, "-m", CHILDREN, "ready"], {"facts": facts_of(app)._asdict()}
    host = Supervisor(command, WorkerOptions(processes=2, lease_ms=30_000, grace_ms=60_000), setup=setup)
    why = "the thread sqlq-maintenance cannot be started"
    with supervising(host) as code:
        wait_until(lambda: host.ready == 2, what="both ready")
        assert f"each worker looks for jobs, and runs its services, itself: {why}" in caplog.text
        assert "sqlq-poller" not in {thread.name for thread in threading.enumerate()}
    assert code.result() == 0


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
    wait_until(lambda: not keeper._kept, timeout=30, what="the keeper noticing")
    pipe[0].send(no="renewal")
    assert pipe[1].receive() == {"no": "renewal"}


def test_a_worker_whose_supervisor_is_gone_stops_soon() -> None:
    stops: list[int | None] = []
    with supervised() as (parent, _, supervisor):
        parent.listen({"stop": stops.append}, dict)
        supervisor.send(stop=None)
        wait_until(lambda: stops == [None], timeout=30, what="a stop within its own grace time")
        supervisor.close()
        wait_until(lambda: stops == [None, ORPHANED_MS], timeout=30, what="the end of the pipe noticed")


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
        wait_until(lambda: child.end() is not None, timeout=20, what="its process ending")
        child.close()


def test_the_shared_memory_has_the_running_jobs(app: sqlq.App) -> None:
    """So a kill in the middle of it counts as that job's attempt."""
    seen: list[Any] = []

    @app.task(name="looks")
    def looks() -> None:
        job = sqlq.current_job()
        seen.append(box.running() == [((job.id, job.lease_token), inf)])

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


@pytest.mark.parametrize(
    ("since_jobs", "hosts", "seconds"),
    [
        (-0.1, 1, 0.25),
        (0.0, 1, 0.1),
        (10.0, 1, 0.1),
        (60.0, 1, 0.6),
        (60.0, 20, 12.0),
        (float("inf"), 1, float("inf")),
    ],
)
def test_a_host_without_notifications_polls_ever_more_rarely_after_jobs(
    since_jobs: float, hosts: int, seconds: float
) -> None:
    assert poller.seconds_without_notifications(since_jobs, hosts) == pytest.approx(seconds)


@pytest.mark.parametrize("hosts", [24, 1_000])
def test_a_few_of_many_hosts_claim_at_once_and_others_within_the_interval(hosts: int) -> None:
    assert {drawn(few) for few in (1, 2, WINNERS) for _ in range(100)} == {0.0}
    random.seed(7)
    rounds = [[drawn(hosts) for _ in range(hosts)] for _ in range(200)]
    went = [waits.count(0.0) for waits in rounds]
    assert 2 < sum(went) / len(went) < 4, "about three, whatever their number"
    assert max(went) <= 15
    assert max(map(max, rounds)) <= IDLE_POLL_SECONDS
    first_look = [min(wait for wait in waits if wait) for waits in rounds]
    assert sorted(first_look)[150] < 0.01, "when nobody went, or had room, another looks some ms later"


# -- the lookout ---------------------------------------------------------------------------------------------


class LookingOut(Poller):
    """A poller, which counts its looks and how often it sends a worker."""

    def __init__(self, app: sqlq.App, *, quiet: bool = False) -> None:
        self.went = self.looked = 0
        super().__init__(
            app.database.for_loops,
            WorkerOptions(lease_ms=30_000),
            self.go,
            last_look=LastLook(NoParent()),
            on_look=self.has_looked,
            workers=tuple,
            quiet=quiet,
        )

    def go(self) -> None:
        self.went += 1

    def has_looked(self, look: workers_look.Look, at: float) -> None:
        self.looked += 1

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close(5.0)


@pytest.fixture
def task(app: sqlq.App) -> Any:
    return app.task(name="t")(lambda: None)


HINTS: dict[str, tuple[list[tuple[str, float]], tuple[float, float]]] = {
    "one host": ([("hint", 5.0)], (5.0, 5.0)),
    "two hints": ([("hint", 5.0), ("hint", 4.0)], (4.0, 5.0)),
    "many hosts": ([("hint", 4.5), ("backs off", 4.5)], (4.5, 4.75)),
    "backs off to a later look": ([("backs off", 4.9)], (inf, 5.0)),
    "a later hint is for jobs that the look has seen": ([("hint", 6.0), ("looked", 5.0)], (inf, 8.0)),
    # it may have overtaken its COMMIT, so that the look finds nothing
    "a hint during a look stays": ([("hint", 5.0), ("looked", 5.0)], (5.0, 8.0)),
    "sent": ([("hint", 5.0), ("sent", 5.0)], (inf, 5.0)),
}
"""Events at their times, and when a worker is then sent and the poller looks. Its first look is at 5."""


@for_each("name", HINTS)
def test_a_notification_counts_until_a_later_look_or_a_worker_is_sent(name: str) -> None:
    events, expected = HINTS[name]
    agenda = Agenda(look_at=5.0)
    for event, moment in events:
        match event:
            case "hint" | "backs off":
                agenda.expect(moment, 0.0 if event == "hint" else 0.25)
            case "looked":
                agenda.plan_next_look(moment, moment + 3.0)
            case "sent":
                agenda.send_at = inf
    assert (agenda.send_at, agenda.look_at) == expected


@needs("listen")
def test_a_notification_with_the_answer_of_a_poll_is_read_at_once(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = workers_look.look

    def looks(conn: Connection, *arguments: Any, **options: Any) -> Any:
        answer = look(conn, *arguments, **options)
        # a session receives its own notification with the answer
        conn.exec_driver_sql("SELECT pg_notify(%s, '')", (notify.channel(app.database.schema),))
        return answer

    monkeypatch.setattr(workers_look, "look", looks)
    monkeypatch.setattr(poller, "IDLE_POLL_SECONDS", 3600.0)
    with LookingOut(app) as seen:
        wait_until(lambda: seen.went, timeout=20, what="a worker sent")


@needs("listen")
def test_the_poller_wakes_a_worker_when_a_job_is_due(
    app: sqlq.App, task: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = workers_look.look

    def looks(*asked: Any, **more: Any) -> workers_look.Look:
        time.sleep(0.1)  # noqa: TID251 - so long a question takes to the server
        return look(*asked, **more)

    monkeypatch.setattr(workers_look, "look", looks)
    monkeypatch.setattr(poller, "IDLE_POLL_SECONDS", 3600.0)
    app.enqueue(task.new().set(delay="1s"))
    with LookingOut(app) as seen:
        wait_until(lambda: seen.went, what="a worker sent")
        assert seen.looked == 1
        assert app.jobs.get(1).state == "available", "not before"


@needs("listen")
def test_a_mistake_in_the_poller_is_logged_with_its_traceback(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Under a supervisor too, where a poller logs no outage."""
    monkeypatch.setattr(workers_look, "look", lambda *given, **named: 1 + "1")  # type: ignore[operator]
    with LookingOut(app, quiet=True):
        wait_until(lambda: caplog.records, what="a line in the log")
    assert caplog.records[0].exc_info is not None
    assert caplog.records[0].levelname == "ERROR"
    assert "does not answer" not in caplog.text


@for_each(("hosts", "least", "most"), [(1, 1_000, 1_000), (10, 1_000, 1_000), (1_000, 4, 20)])
def test_many_hosts_share_the_looks_for_maintenance(hosts: int, least: int, most: int) -> None:
    random.seed(7)
    assert least <= sum(looks_for_services(hosts) for _ in range(1_000)) <= most


@needs("listen")
def test_the_poller_starts_the_rescue_of_an_idle_worker(
    app: sqlq.App, engine: Engine, task: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its service runs when a poll has found a job, and not by itself while there are polls."""
    monkeypatch.setattr(poller, "RESCUE_MS", 100)
    job = app.enqueue(task.new())
    with working(app, queues=["other"]) as worker:
        wait_until(worker._last_look.is_recent, what="a poll")
        execute(engine, "UPDATE jobs SET reserved_at = now(), lease_expires_at = now(), attempts = 1")
        wait_until(lambda: app.jobs.get(job.id).state == "available", what="the rescue")


class Noted(services.PolledService):
    """A service that notes its turns, and has the next one when it is called."""

    activity = "noting"
    turns = 0
    wait: float | None = None

    def turn(self) -> float | None:
        self.turns += 1
        return self.wait


def test_a_polled_service_runs_when_a_poll_has_found_work() -> None:
    silent: list[bool] = []
    noted = Noted(sqlq.App("sqlite://").database, is_watched=lambda: not silent)
    rhythm = RESCUE_MS / 1000 * services.MIN_RHYTHM_SHARE
    assert noted.run() >= rhythm
    assert noted.turns == 0
    noted.calls += 1
    noted.wait = 0.0  # there is more to do
    assert noted.run() == 0.0
    noted.wait = None
    assert [noted.run() >= rhythm for _ in range(2)] == [True, True]
    assert noted.turns == 2
    silent.append(True)  # nobody looks
    noted.run()
    noted.run()
    assert noted.turns == 4


# -- a worker that is watched --------------------------------------------------------------------------------


@needs("postgresql")
def test_a_resting_worker_keeps_one_connection_beside_that_for_claims(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "IDLE_SECONDS", 0.0)

    def open_(database: Database) -> int:
        pool: Any = database.engine.pool
        return int(pool.checkedin() + pool.checkedout())

    with working(app) as worker:
        with app.database.read(), app.database.for_loops.read(), app.database.for_loops.read():
            pass
        notify.notify(app.database.for_loops)
        with app.database.for_claims.read(), app.database.for_claims.read():
            pass
        wait_until(lambda: worker._wake.is_resting, what="the worker resting")
        worker._wake.call()
        wait_until(lambda: open_(app.database.for_loops) <= 1, what="connections closed")
        wait_until(lambda: open_(app.database.for_claims) <= 1, what="connections of claims closed")
        wait_until(lambda: open_(app.database) == 0, what="the App's connections closed")


def test_a_call_at_the_end_of_a_wait_counts_for_the_next_wait(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@needs("postgresql")
def test_the_only_worker_of_its_supervisor_looks_from_the_start(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poller, "STAND_BY_SECONDS", 3600.0)
    with supervised(is_alone=True) as (parent, _, _), working(app, supervision=parent) as worker:
        wait_until(lambda: worker._last_look.at() > 0, what="its lookout looking")


@needs("postgresql")
def test_a_worker_whose_supervisor_falls_silent_rescues_jobs(
    app: sqlq.App, engine: Engine, task: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    with supervised() as (parent, box, _):
        box.note_poll(time.monotonic() + 3600)
        with working(app, supervision=parent) as worker:
            wait_until(lambda: worker._wake.is_resting, what="the worker resting")
            assert turns == []
            box.note_poll(time.monotonic() - poller.TRUSTED_SECONDS + 0.1)
            wait_until(lambda: {*turns} == {"rescue", "sweep"}, what="a rescue, and a sweep")


SIGHTS = {
    "nobody looks": (None, None, (False, False, False)),
    "the own poller looks": (None, 1.0, (True, False, False)),
    "the supervisor looks": (1.0, None, (True, True, True)),
    "it has just fallen silent": (TRUSTED_SECONDS + 0.1, None, (False, False, True)),
    "the own poller takes over": (STAND_BY_SECONDS + 0.1, None, (False, False, False)),
    "the own poller has taken over": (STAND_BY_SECONDS + 0.1, 1.0, (True, False, False)),
}
"""For how long the supervisor and the own poller have been silent. Then whether a poller looks, whether it is
the supervisor's, and whether the own one stands by."""


@for_each("name", SIGHTS)
def test_the_own_poller_and_the_worker_itself_follow_a_silent_supervisor(name: str) -> None:
    by_supervisor, own, expected = SIGHTS[name]
    now = [1_000.0]
    supervision: Any = SimpleNamespace(is_alone=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(poller, "monotonic", lambda: now[0])
        looked_at = -inf if by_supervisor is None else now[0] - by_supervisor
        supervision.last_poll = lambda: looked_at
        now[0] -= STAND_BY_SECONDS
        last_look = LastLook(supervision)
        assert last_look.stands_by(), "the supervisor's may be about to begin"
        now[0] += STAND_BY_SECONDS
        if own is not None:
            now[0] -= own
            last_look.note()
            now[0] += own
        assert (last_look.is_recent(), last_look.supervisor_looks(), last_look.stands_by()) == expected


# -- whom a supervisor sends ---------------------------------------------------------------------------------


class Sent(Child):
    """A child without a process, which notes that it was sent."""

    stage = Stage.WORKING

    def __init__(self, name: str, sent: list[str], *, running: int = 0, slots: int = 10) -> None:
        self.worker, self.slots = name, slots
        self.sent = sent
        self.told: list[dict[str, Any]] = []
        self.link: Any = SimpleNamespace(offer=lambda **message: self.told.append(message))
        self.box, fd = SharedMemory.create()
        os.close(fd)
        for id in range(running):
            self.box.started((id + 1, 1))
        self.box.pulse()

    def send(self) -> None:
        self.sent.append(self.worker or "")
        self.sent_at = time.monotonic()


class Host(Dispatcher):
    """The dispatcher of such children, all but those of another database."""

    def __init__(self) -> None:
        self.added: list[Any] = []
        self.sent: list[str] = []
        keeper: Any = SimpleNamespace(knows=lambda worker: worker != "elsewhere")
        super().__init__(lambda: self.added, keeper)

    def add(self, name: str, **options: int) -> Any:
        self.added.append(Sent(name, self.sent, **options))
        return self.added[-1]


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host()
    yield host
    for child in host.added:
        child.box.close()


def test_a_notification_wakes_the_worker_with_a_free_slot_and_fewest_jobs(host: Host) -> None:
    host.add("full", running=2, slots=2)
    host.add("busy", running=3)
    last = host.add("less busy", running=1)
    host.send()
    for stage in (Stage.LEAVING, Stage.RETIRING):
        last.stage = stage
        host.send()
    assert host.sent == ["less busy", "busy", "busy"]


def test_another_worker_is_woken_when_the_last_one_does_not_react(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_module, "LATE_SECONDS", 0.0)
    for name in ("a", "b"):
        host.add(name)
    host.send()
    host.send()
    assert sorted(host.sent) == ["a", "b"]


def test_other_workers_are_woken_in_turn_when_one_finds_too_many_jobs(host: Host) -> None:
    first, *_ = [host.add(name) for name in ("first", "a", "b", "c", "d")]
    for _ in range(2):
        host.more(first)
    assert len(host.sent) == 2 * HELPERS
    assert {*host.sent} == {"a", "b", "c", "d"}


def test_a_dead_worker_does_not_block_the_wake_of_others(host: Host) -> None:
    """The caller may have an older list of the children."""
    gone = Child([sys.executable, "-c", ""], lambda child, message: None, {})
    wait_until(lambda: gone.end() is not None, what="its process ending")
    gone.stage, gone.worker, gone.slots = Stage.WORKING, "gone", 4
    first = host.add("first")
    host.added.append(gone)
    host.add("alive")
    gone.close()
    host.more(first)
    assert "alive" in host.sent


def test_a_later_worker_is_notified_of_the_end_of_a_pause(host: Host) -> None:
    first = host.add("first")
    host.publish(workers.Requests(all_paused=True))
    second = host.add("second")
    for _ in range(2):
        host.publish(workers.Requests(all_paused=False))
    assert first.told == [{"all_paused": True}, {"all_paused": False}]
    assert second.told == [{"all_paused": False}]


def test_a_worker_in_another_database_is_not_watched(host: Host) -> None:
    """Where its engine leads elsewhere than its URL, what the supervisor sees is not what it would see."""
    here, elsewhere = host.add("here"), host.add("elsewhere")
    host.publish(workers.Requests())
    assert here.box.last_poll() > 0 >= elsewhere.box.last_poll()
    host.send()
    assert host.sent == ["here"]


@needs("mariadb")
@pytest.mark.parametrize("by", ["sqlq", "session", "another process"])
def test_a_worker_without_notifications_is_woken_by_enqueues_of_its_machine(
    app: sqlq.App, engine: Engine, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    monkeypatch.setattr(poller, "IDLE_POLL_SECONDS", 3600.0)
    monkeypatch.setattr(poller, "TRUSTED_SECONDS", 3600.0)
    monkeypatch.setattr(wake, "POLL_SECONDS", 3600.0)
    ran = threading.Event()
    task = app.task(name="t")(ran.set)
    with working(app) as worker:
        wait_until(lambda: worker._wake.is_resting, what="the worker at rest")
        if by == "another process":
            url = engine.url.render_as_string(hide_password=False)
            subprocess.run([sys.executable, "-m", "sqlq", "-d", url, "enqueue", "t"], check=True, timeout=60)
        elif by == "sqlq":
            app.enqueue(task.new())
        else:
            with Session(engine) as session, session.begin():
                app.enqueue(task.new(), session=session)
        assert ran.wait(30)
