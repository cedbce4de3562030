"""The poller of a host: its notifications and looks, and the workers that a supervisor wakes."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from math import inf
from types import SimpleNamespace
from typing import Any, Self

import pytest
from sqlalchemy import Connection, Engine
from sqlalchemy.orm import Session

import sqlq
from sqlq.config.constants import RESCUE_MS
from sqlq.database.database import Database
from sqlq.store.jobs import settle
from sqlq.store.workers import look as workers_look
from sqlq.store.workers import notify, workers
from sqlq.worker import worker as worker_module
from sqlq.worker.ipc.parent import NoParent, SharedMemory
from sqlq.worker.maintain import services
from sqlq.worker.options import WorkerOptions
from sqlq.worker.supervise import child as child_module
from sqlq.worker.supervise.child import Child, Stage
from sqlq.worker.supervise.heartbeat import HELPERS, Dispatcher
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
from tests.kit import claim, execute, expire, for_each, needs, supervised, wait_until, working

# -- lots ----------------------------------------------------------------------------------------------------


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


@needs("listen")
def test_the_poller_finds_a_job_without_a_notification(
    app: sqlq.App, engine: Engine, task: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poller, "IDLE_POLL_SECONDS", 0.3)
    with LookingOut(app) as seen:
        wait_until(lambda: seen.looked, what="the first look")
        assert seen.went == 0, "nothing is due"
        execute(engine, "INSERT INTO jobs (queue, task, payload) VALUES ('q', 't', '{}')")
        wait_until(lambda: seen.went, what="a worker sent")


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
def test_a_look_reports_work_for_services(app: sqlq.App, engine: Engine, task: Any) -> None:
    def found(*, maintenance: bool = True) -> tuple[bool | None, ...]:
        with app.database.connect(isolation_level="AUTOCOMMIT") as conn:
            known = workers_look.KnownQueues()
            look = workers_look.look(conn, app.database, known, hosts_within_ms=None, maintenance=maintenance)
        return look.expired, look.limited

    app.limit("door", running=1)
    app.enqueue(task.new())
    assert found() == (False, False)
    app.enqueue(task.new().set(limit="door"))
    assert found() == (False, True)
    claim(app)
    expire(engine)
    assert found() == (True, True)
    assert found(maintenance=False) == (None, None)


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
        self.link: Any = SimpleNamespace(offer=lambda **message: None)
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


def test_a_worker_in_another_database_is_not_watched(host: Host) -> None:
    """Where its engine leads elsewhere than its URL, what the supervisor sees is not what it would see."""
    here, elsewhere = host.add("here"), host.add("elsewhere")
    host.publish(workers.Requests())
    assert here.box.last_poll() > 0 >= elsewhere.box.last_poll()
    host.send()
    assert host.sent == ["here"]


@needs("mariadb")
@pytest.mark.parametrize("by", ["sqlq", "session"])
def test_a_worker_without_notifications_is_woken_by_enqueues_of_its_process(
    app: sqlq.App, engine: Engine, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    monkeypatch.setattr(poller, "IDLE_POLL_SECONDS", 3600.0)
    monkeypatch.setattr(poller, "TRUSTED_SECONDS", 3600.0)
    monkeypatch.setattr(wake, "POLL_SECONDS", 3600.0)
    ran = threading.Event()
    task = app.task(name="t")(ran.set)
    with working(app) as worker:
        wait_until(lambda: worker._wake.is_resting, what="the worker at rest")
        if by == "sqlq":
            app.enqueue(task.new())
        else:
            with Session(engine) as session, session.begin():
                app.enqueue(task.new(), session=session)
        assert ran.wait(30)
