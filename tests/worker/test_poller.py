"""The poller of a host: its notifications and looks, and the workers that a supervisor wakes."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from types import SimpleNamespace
from typing import Any

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
from sqlq.worker.ipc.parent import NoParent, Parent, SharedMemory
from sqlq.worker.ipc.pipe import Pipe
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
from tests.kit import claim, execute, for_each, needs, wait_until, working

# -- lots ----------------------------------------------------------------------------------------------------


@for_each("hosts", [1, 2, WINNERS])
def test_few_hosts_all_claim_at_once(hosts: int) -> None:
    assert {drawn(hosts) for _ in range(100)} == {0.0}


@pytest.mark.parametrize("hosts", [24, 1_000])
def test_a_few_of_many_hosts_claim_at_once_and_others_within_the_interval(hosts: int) -> None:
    random.seed(7)
    rounds = [[drawn(hosts) for _ in range(hosts)] for _ in range(200)]
    went = [waits.count(0.0) for waits in rounds]
    assert 2 < sum(went) / len(went) < 4, "about three, whatever their number"
    assert max(went) <= 15
    assert max(map(max, rounds)) <= IDLE_POLL_SECONDS
    first_look = [min(wait for wait in waits if wait) for waits in rounds]
    assert sorted(first_look)[150] < 0.01, "when nobody went, or had room, another looks some ms later"


# -- the lookout ---------------------------------------------------------------------------------------------


class Supervised(NoParent):
    """A worker among several, whose supervisor looks while `looks` is true."""

    is_alone = False
    looks = True

    def last_poll(self) -> float:
        return time.monotonic() if self.looks else -inf


@dataclass
class Seen:
    """The actions of a poller."""

    supervision: NoParent = field(default_factory=NoParent)
    went: int = 0
    looked: int = 0
    expired: int = 0

    def go(self) -> None:
        self.went += 1

    def has_looked(self, look: workers_look.Look, at: float) -> None:
        self.looked += 1
        self.expired += bool(look.expired)


@contextmanager
def looking_out(app: sqlq.App, seen: Seen, *, lease_ms: int = 30_000, quiet: bool = False) -> Iterator[Seen]:
    lookout = Poller(
        app.database.for_loops,
        WorkerOptions(lease_ms=lease_ms),
        seen.go,
        last_look=LastLook(seen.supervision),
        on_look=seen.has_looked,
        workers=tuple,
        quiet=quiet,
    )
    lookout.start()
    try:
        yield seen
    finally:
        lookout.close(5.0)


@pytest.fixture
def task(app: sqlq.App) -> Any:
    return app.task(name="t")(lambda: None)


@needs("listen")
def test_the_poller_finds_a_job_without_a_notification(
    app: sqlq.App, engine: Engine, task: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poller, "IDLE_POLL_SECONDS", 0.3)
    with looking_out(app, Seen()) as seen:
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
    with looking_out(app, Seen()) as seen:
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
    with looking_out(app, Seen()) as seen:
        wait_until(lambda: seen.went, what="a worker sent")
        assert seen.looked == 1
        assert app.jobs.get(1).state == "available", "not before"


@needs("listen")
def test_a_mistake_in_the_poller_is_logged_with_its_traceback(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Under a supervisor too, where a poller logs no outage."""
    monkeypatch.setattr(workers_look, "look", lambda *given, **named: 1 + "1")  # type: ignore[operator]
    with looking_out(app, Seen(), quiet=True):
        wait_until(lambda: caplog.records, what="a line in the log")
    assert caplog.records[0].exc_info is not None
    assert caplog.records[0].levelname == "ERROR"
    assert "does not answer" not in caplog.text


@for_each(("hosts", "least", "most"), [(1, 1_000, 1_000), (10, 1_000, 1_000), (1_000, 4, 20)])
def test_many_hosts_share_the_looks_for_maintenance(hosts: int, least: int, most: int) -> None:
    random.seed(7)
    assert least <= sum(looks_for_services(hosts) for _ in range(1_000)) <= most


@needs("postgresql")
def test_a_worker_counts_the_hosts_by_their_supervisors(app: sqlq.App) -> None:
    entered = [("a", "x", 1), ("bb", "x", 1), ("c", "x", 2), ("d", "y", 1), ("ee", "y", None)]
    with app.database.begin() as conn:
        for id, host, supervisor in entered:
            labels: dict[str, Any] = {"version": "0", "queues": None, "concurrency": 1}
            workers.register(conn, id=id, host=host, pid=len(id), supervisor_pid=supervisor, **labels)
    with app.database.connect(isolation_level="AUTOCOMMIT") as conn:
        look = workers_look.look(
            conn, app.database, workers_look.KnownQueues(), hosts_within_ms=10_000, maintenance=True
        )
    assert (look.hosts, look.listens, look.expired, look.due) == (4, False, False, {})


@needs("listen")
def test_a_poll_reports_work_for_services(app: sqlq.App, engine: Engine, task: Any) -> None:
    def found(*, maintenance: bool = True) -> tuple[bool | None, ...]:
        with app.database.connect(isolation_level="AUTOCOMMIT") as conn:
            look = workers_look.look(
                conn, app.database, workers_look.KnownQueues(), hosts_within_ms=None, maintenance=maintenance
            )
        return look.expired, look.limited

    app.limit("door", running=1)
    app.enqueue(task.new())
    assert found() == (False, False)
    app.enqueue(task.new().set(limit="door"))
    assert found() == (False, True)
    (held, *_) = claim(app)
    execute(engine, "UPDATE jobs SET lease_expires_at = now() WHERE id = :id", id=held.id)
    assert found()[0] is True
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

    def __init__(self, is_watched: Callable[[], bool]) -> None:
        super().__init__(sqlq.App("sqlite://").database, is_watched=is_watched)
        self.turns = 0
        self.wait: float | None = None

    def turn(self) -> float | None:
        self.turns += 1
        return self.wait


def test_a_polled_service_runs_when_a_poll_has_found_work() -> None:
    silent: list[bool] = []
    service = noted = Noted(lambda: not silent)
    rhythm = RESCUE_MS / 1000 * services.MIN_RHYTHM_SHARE
    assert service.run() >= rhythm
    assert noted.turns == 0
    service.calls += 1
    noted.wait = 0.0  # there is more to do
    assert service.run() == 0.0
    noted.wait = None
    assert service.run() >= rhythm
    assert noted.turns == 2
    assert service.run() >= rhythm
    assert noted.turns == 2
    silent.append(True)  # nobody looks
    service.run()
    service.run()
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
    box, fd = SharedMemory.create()
    os.close(fd)
    here, there = Pipe.pair()
    with working(app, supervision=Parent(here, box, is_alone=True)) as worker:
        wait_until(lambda: worker._last_look.at() > 0, what="its lookout looking")
    here.close()
    there.close()
    box.close()


@needs("postgresql")
def test_a_worker_whose_supervisor_falls_silent_rescues_jobs(
    app: sqlq.App, task: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the supervisor looks, it also does the maintenance."""
    monkeypatch.setattr(services, "RESCUE_MS", 50)
    monkeypatch.setattr("sqlq.worker.maintain.maintenance.RESCUE_MS", 50)
    monkeypatch.setattr(poller, "STAND_BY_SECONDS", 3600.0)
    box, fd = SharedMemory.create()
    os.close(fd)
    here, there = Pipe.pair()
    turns: list[int] = []
    swept: list[int] = []

    def rescue(conn: Any, **options: Any) -> list[Any]:
        turns.append(1)
        return []

    def sweep(self: services.Sweep) -> float:
        swept.append(1)
        return 0.05

    monkeypatch.setattr(settle, "rescue", rescue)
    monkeypatch.setattr(services.Sweep, "run", sweep)
    box.note_poll(time.monotonic() + 3600)
    with working(app, supervision=Parent(here, box)) as worker:
        wait_until(lambda: worker._wake.is_resting, what="the worker resting")
        assert (turns, swept) == ([], [])
        box.note_poll(time.monotonic() - poller.TRUSTED_SECONDS + 0.1)
        wait_until(lambda: turns and swept, what="a rescue, and a sweep")
    here.close()
    there.close()
    box.close()


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
    now, supervision = [1_000.0], Supervised()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(poller, "monotonic", lambda: now[0])
        looked_at = -inf if by_supervisor is None else now[0] - by_supervisor
        patch.setattr(supervision, "last_poll", lambda: looked_at)
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


@pytest.fixture
def children() -> Iterator[Callable[..., Any]]:
    made: list[Sent] = []

    def child(name: str, sent: list[str], **options: Any) -> Any:
        made.append(Sent(name, sent, **options))
        return made[-1]

    yield child
    for each in made:
        each.box.close()


def host_of(found: list[Any], known: Callable[[str], bool] = lambda worker: True) -> Dispatcher:
    keeper: Any = SimpleNamespace(knows=known)
    return Dispatcher(lambda: found, keeper)


def test_a_notification_wakes_the_worker_with_a_free_slot_and_fewest_jobs(children: Any) -> None:
    sent: list[str] = []
    found = [
        children("full", sent, running=2, slots=2),
        children("busy", sent, running=3),
        children("less busy", sent, running=1),
    ]
    host_of(found).send()
    assert sent == ["less busy"]
    for stage in (Stage.LEAVING, Stage.RETIRING):
        found[2].stage = stage
        host_of(found).send()
    assert sent == ["less busy", "busy", "busy"]


def test_another_worker_is_woken_when_the_last_one_does_not_react(
    children: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_module, "LATE_SECONDS", 0.0)
    sent: list[str] = []
    host = host_of([children("a", sent), children("b", sent)])
    host.send()
    host.send()
    assert sorted(sent) == ["a", "b"]


def test_other_workers_are_woken_in_turn_when_one_finds_too_many_jobs(children: Any) -> None:
    sent: list[str] = []
    found = [children(name, sent) for name in ("first", "a", "b", "c", "d")]
    host = host_of(found)
    for _ in range(2):
        host.more(found[0])
    assert len(sent) == 2 * HELPERS
    assert set(sent) == {"a", "b", "c", "d"}


def test_a_dead_worker_does_not_block_the_wake_of_others(children: Any) -> None:
    """The caller may have an older list of the children."""
    gone = Child([sys.executable, "-c", ""], lambda child, message: None, {})
    wait_until(lambda: gone.end() is not None, what="its process ending")
    gone.stage, gone.worker, gone.slots = Stage.WORKING, "gone", 4
    sent: list[str] = []
    found = [children("first", sent), gone, children("alive", sent)]
    host = host_of(found)
    gone.close()
    host.more(found[0])
    assert "alive" in sent


def test_a_worker_in_another_database_is_not_watched(children: Any) -> None:
    """Where its engine leads elsewhere than its URL, what the supervisor sees is not what it would see."""
    sent: list[str] = []
    found = [children("here", sent), children("elsewhere", sent)]
    host = host_of(found, known=lambda worker: worker == "here")
    host.publish(workers.Requests())
    assert [child.box.last_poll() > 0 for child in found] == [True, False]
    host.send()
    assert sent == ["here"]


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
