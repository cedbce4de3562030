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
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.orm import Session

import sqlq
from sqlq.config.constants import RESCUE_MS
from sqlq.database.database import Database
from sqlq.store.jobs import settle
from sqlq.store.limits import admit
from sqlq.store.workers import look as workers_look
from sqlq.store.workers import notify, workers
from sqlq.worker import worker as worker_module
from sqlq.worker.ipc.parent import NoParent, Parent
from sqlq.worker.ipc.pipe import Pipe
from sqlq.worker.ipc.process import Child
from sqlq.worker.ipc.shared_memory import SharedMemory
from sqlq.worker.maintain import services
from sqlq.worker.options import WorkerOptions
from sqlq.worker.supervise.dispatch import HELPERS, Dispatcher
from sqlq.worker.wait import poller, wake
from sqlq.worker.wait.poller import LOOKOUT_SECONDS, NEVER, TRUSTED_SECONDS, WINNERS, LastLook, Poller, drawn
from sqlq.worker.wait.wake import MOST_KNOWN, Wake
from tests.kit import claim, for_each, working
from tests.waiting import wait_until

on_postgresql = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)


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
    assert max(map(max, rounds)) <= LOOKOUT_SECONDS
    first_look = [min(wait for wait in waits if wait) for waits in rounds]
    assert sorted(first_look)[150] < 0.01, "when nobody went, or had room, another looks some ms later"


# -- the lookout ---------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """The actions of a poller."""

    lookout: Poller | None = None
    went: int = 0
    looked: int = 0
    expired: int = 0
    stands_by: bool = False
    agains: int = 0
    check_after: list[float] = field(default_factory=list)

    def go(self, *, again: bool) -> float:
        self.went += not again
        self.agains += again
        return self.check_after.pop() if self.check_after else NEVER

    def has_looked(self, look: workers_look.Look, at: float) -> None:
        self.looked += 1
        self.expired += bool(look.expired)


@contextmanager
def looking_out(app: sqlq.App, seen: Seen, *, lease_ms: int = 30_000, quiet: bool = False) -> Iterator[Seen]:
    last_look = LastLook(NoParent())
    last_look.stands_by = lambda: seen.stands_by  # type: ignore[method-assign]
    seen.lookout = Poller(
        app.database.for_loops,
        WorkerOptions(lease_ms=lease_ms),
        seen.go,
        last_look=last_look,
        looked=seen.has_looked,
        workers=tuple,
        quiet=quiet,
    )
    seen.lookout.start()
    try:
        yield seen
    finally:
        seen.lookout.close(5.0)


@pytest.fixture
def task(app: sqlq.App) -> Any:
    return app.task(name="t")(lambda: None)


@on_postgresql
def test_the_poller_finds_a_job_without_a_notification(
    app: sqlq.App, engine: Engine, task: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poller, "LOOKOUT_SECONDS", 0.3)
    with looking_out(app, Seen()) as seen:
        wait_until(lambda: seen.looked, what="the first look")
        assert seen.went == 0, "nothing is due"
        with engine.begin() as conn:
            conn.execute(text("INSERT INTO jobs (queue, task, payload) VALUES ('q', 't', '{}')"))
        wait_until(lambda: seen.went, what="a worker sent")


@on_postgresql
def test_a_notification_wakes_a_worker_before_the_next_poll(
    app: sqlq.App, task: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poller, "LOOKOUT_SECONDS", 3600.0)
    with looking_out(app, Seen()) as seen:
        wait_until(lambda: seen.looked, what="the first look")
        notify.notify(app.database)
        wait_until(lambda: seen.went, what="a worker sent")
        assert seen.looked == 1


@on_postgresql
def test_a_notification_during_a_poll_wakes_a_worker(app: sqlq.App, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have overtaken its COMMIT, so that the look finds nothing."""
    # no public method delays the poll until a notification has come
    go_or_look = Poller._go_or_look

    def goes(looking: Poller, moment: float) -> None:
        go_or_look(looking, moment)
        looking._look_at = looking._go_at

    monkeypatch.setattr(Poller, "_go_or_look", goes)
    monkeypatch.setattr(poller, "LOOKOUT_SECONDS", 3600.0)
    with looking_out(app, Seen()) as seen:
        wait_until(lambda: seen.looked, what="the first look")
        notify.notify(app.database)
        wait_until(lambda: seen.looked == 2, what="the look at the moment of the hint")
        wait_until(lambda: seen.went, what="a worker sent")


@on_postgresql
def test_a_notification_with_the_answer_of_a_poll_is_read_at_once(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = Poller._look

    def looks(looking: Poller, conn: Connection) -> Any:
        found = look(looking, conn)
        # a session receives its own notification with the answer
        conn.exec_driver_sql("SELECT pg_notify(%s, '')", (notify.channel(app.database.schema),))
        return found

    monkeypatch.setattr(Poller, "_look", looks)
    monkeypatch.setattr(poller, "LOOKOUT_SECONDS", 3600.0)
    with looking_out(app, Seen()) as seen:
        wait_until(lambda: seen.went, timeout=20, what="a worker sent")


@on_postgresql
def test_the_poller_wakes_a_worker_when_a_job_is_due(
    app: sqlq.App, task: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = workers_look.look

    def looks(*asked: Any, **more: Any) -> workers_look.Look:
        time.sleep(0.1)  # noqa: TID251 - so long a question takes to the server
        return look(*asked, **more)

    monkeypatch.setattr(workers_look, "look", looks)
    monkeypatch.setattr(poller, "LOOKOUT_SECONDS", 3600.0)
    app.enqueue(task.new().set(delay="1s"))
    with looking_out(app, Seen()) as seen:
        wait_until(lambda: seen.went, what="a worker sent")
        assert seen.looked == 1
        assert app.jobs.get(1).state == "available", "not before"


@on_postgresql
def test_the_poller_tries_again_when_a_woken_worker_may_not_claim(app: sqlq.App) -> None:
    with looking_out(app, Seen(check_after=[0.01, 0.01])) as seen:
        wait_until(lambda: seen.looked, what="the first look")
        notify.notify(app.database)
        wait_until(lambda: seen.agains == 2, what="being asked again")


@on_postgresql
def test_the_poller_sees_expired_leases(app: sqlq.App, task: Any, engine: Engine) -> None:
    app.enqueue(task.new())
    with engine.begin() as conn:
        conn.execute(
            text(
                "UPDATE jobs SET reserved_at = now(), reserved_by = 'gone', attempts = 1, lease_token = 1, "
                "lease_expires_at = now() - interval '1 second'"
            )
        )
    with looking_out(app, Seen(), lease_ms=400) as seen:
        wait_until(lambda: seen.expired, what="the lease seen")


@on_postgresql
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


@on_postgresql
def test_a_poller_whose_connection_ends_logs_no_mistake(
    app: sqlq.App, engine: Engine, task: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with looking_out(app, Seen(), quiet=True) as seen:
        for _ in range(3):
            wait_until(lambda: seen.looked, what="a look")
            with engine.begin() as conn:
                conn.execute(
                    text(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                        "WHERE query LIKE '%AS listens,%' AND datname = current_database() "
                        "AND pid <> pg_backend_pid()"
                    )
                )
            seen.looked = 0
        wait_until(lambda: seen.looked, what="a look")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@for_each(("hosts", "least", "most"), [(1, 1_000, 1_000), (10, 1_000, 1_000), (1_000, 4, 20)])
@pytest.mark.slow
def test_many_hosts_share_the_looks_for_maintenance(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch, hosts: int, least: int, most: int
) -> None:
    random.seed(7)
    asked: list[bool] = []

    def look(*given: Any, maintenance: bool, **named: Any) -> workers_look.Look:
        asked.append(maintenance)
        found = {"listens": True, "hosts": hosts, "expired": None, "limited": None}
        return workers_look.Look({}, **found, tick_ms=None, wanted=workers.Wanted())  # type: ignore[arg-type]

    monkeypatch.setattr(workers_look, "look", look)
    last_look = LastLook(NoParent())
    for _ in range(1_000):
        each = Poller(
            *(app.database, WorkerOptions(), lambda *, again: NEVER),
            last_look=last_look,
            looked=lambda look, at: None,
            workers=tuple,
        )
        each._hosts = hosts
        each._look(None)  # type: ignore[arg-type]
    assert least <= sum(asked) <= most
    assert time.monotonic() - last_look.own_leases_at() < 10, "services leave it to the hosts together"


@on_postgresql
def test_a_poller_on_standby_has_no_connection(
    app: sqlq.App, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poller, "LOOKOUT_SECONDS", 0.3)

    def listening() -> int:
        with engine.connect() as conn:
            found: int = conn.scalar(
                text(
                    "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%AS listens,%' "
                    "AND pid <> pg_backend_pid() AND datname = current_database()"
                )
            )
            return found

    with looking_out(app, Seen(stands_by=True)) as seen:
        assert seen.lookout is not None
        seen.stands_by = False
        wait_until(listening, what="it having taken over")
        seen.stands_by = True
        wait_until(lambda: not listening(), what="it having let go")


@on_postgresql
def test_a_worker_counts_the_hosts_by_their_supervisors(app: sqlq.App, engine: Engine) -> None:
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


@on_postgresql
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
    with engine.begin() as conn:
        conn.execute(text("UPDATE jobs SET lease_expires_at = now() WHERE id = :id"), {"id": held.id})
    assert found()[0] is True
    assert found(maintenance=False) == (None, None)


@on_postgresql
def test_the_poller_starts_the_rescue_of_an_idle_worker(
    app: sqlq.App, engine: Engine, task: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its service runs when a poll has found a job, and not by itself while there are polls."""
    monkeypatch.setattr(poller, "RESCUE_MS", 100)
    job = app.enqueue(task.new())
    with working(app, queues=["other"]) as worker:
        wait_until(lambda: worker._last_look.own_leases_at() > 0, what="a poll")
        with engine.begin() as conn:
            conn.execute(text("UPDATE jobs SET reserved_at = now(), lease_expires_at = now(), attempts = 1"))
        wait_until(lambda: app.jobs.get(job.id).state == "available", what="the rescue")


class Noted(services.PolledService):
    """A service that notes its turns, and has the next one when it is called."""

    doing = "noting"

    def __init__(self, looked_at: Callable[[], float]) -> None:
        super().__init__(looked_at)
        self.turns = 0
        self.wait: float | None = None

    def turn(self) -> float | None:
        self.turns += 1
        return self.wait


def test_a_polled_service_runs_when_a_poll_has_found_work() -> None:
    looked_at = [time.monotonic()]
    service = noted = Noted(lambda: looked_at[0])
    rhythm = RESCUE_MS / 1000 * services.SHORTEST_RHYTHM
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
    looked_at[0] -= 60.0  # nobody looks
    service.run()
    service.run()
    assert noted.turns == 4


# -- a worker that is watched --------------------------------------------------------------------------------


@on_postgresql
def test_a_worker_does_not_poll_while_a_poller_does(app: sqlq.App, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []
    real = workers_look.due_in

    def counted(*args: Any) -> Any:
        looks.append(time.monotonic())
        return real(*args)

    monkeypatch.setattr(workers_look, "due_in", counted)
    monkeypatch.setattr(poller, "LOOKOUT_SECONDS", 0.3)
    with working(app) as worker:
        wait_until(lambda: worker._wake.rests, what="the worker resting")
        before, seen = len(looks), worker._last_look.at()
        wait_until(
            lambda: worker._last_look.at() > seen + 2 * poller.LOOKOUT_SECONDS, what="the lookout looking"
        )
        assert len(looks) == before


@on_postgresql
def test_a_resting_worker_keeps_one_connection_beside_that_for_claims(
    app: sqlq.App, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "IDLE_SECONDS", 0.0)

    def open_(database: Database) -> int:
        pool: Any = database.engine.pool
        return int(pool.checkedin() + pool.checkedout())

    with working(app) as worker:
        with app.database.read(), app.database.for_loops.read(), app.database.for_loops.read():
            pass
        notify.notify(app.database.for_loops)
        wait_until(lambda: worker._wake.rests, what="the worker resting")
        worker._wake.call()
        wait_until(lambda: open_(app.database.for_loops) <= 1, what="connections closed")
        wait_until(lambda: open_(app.database) == 0, what="the App's connections closed")


def test_a_call_at_the_end_of_a_wait_counts_for_the_next_wait(app: sqlq.App) -> None:
    """A drain that missed the end of its last job would rest for ever."""
    wake = Wake(app.database)

    class CalledLate(threading.Event):
        late = True

        def is_set(self) -> bool:
            was = super().is_set()
            if self.late:
                self.late = False
                self.set()
            return was

    wake._called = CalledLate()
    wake.wait()
    assert wake._called.is_set()


def test_a_worker_keeps_only_the_nearest_due_times(app: sqlq.App) -> None:
    """A worker that releases a hundred jobs a second for a day would keep millions of times."""
    wake, moment = Wake(app.database), time.monotonic() + 3600
    for n in reversed(range(10 * MOST_KNOWN)):
        wake.at(moment + n)
        assert len(wake._due) <= MOST_KNOWN
    assert sorted(wake._due)[:3] == [moment, moment + 1, moment + 2]
    assert len(wake._due) >= MOST_KNOWN / 2


@on_postgresql
def test_a_worker_polls_for_itself_when_its_poller_is_silent(
    app: sqlq.App, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Poller, "_run", lambda self: None)
    ran: list[int] = []
    app.task(name="t")(lambda: ran.append(1))
    with working(app) as worker:
        worker._last_look.note(leases=False)  # the last look
        wait_until(lambda: worker._wake._waited >= 1 or worker._wake.rests, what="the worker resting")
        worker._last_look._looked_at -= TRUSTED_SECONDS - 0.1
        with engine.begin() as conn:
            conn.execute(text("INSERT INTO jobs (queue, task, payload) VALUES ('q', 't', '{}')"))
        wait_until(lambda: ran, what="the job done")


@on_postgresql
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


@on_postgresql
def test_a_worker_whose_supervisor_falls_silent_rescues_jobs(
    app: sqlq.App, task: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the supervisor looks, it also does the maintenance."""
    monkeypatch.setattr(services, "RESCUE_MS", 50)
    monkeypatch.setattr("sqlq.worker.maintain.maintenance.RESCUE_MS", 50)
    monkeypatch.setattr(Poller, "_run", lambda self: None)
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
    box.looked(time.monotonic() + 3600)
    with working(app, supervision=Parent(here, box)) as worker:
        wait_until(lambda: worker._wake.rests, what="the worker resting")
        assert (turns, swept) == ([], [])
        box.looked(time.monotonic() - TRUSTED_SECONDS + 0.1)
        wait_until(lambda: turns and swept, what="a rescue, and a sweep")
    here.close()
    there.close()
    box.close()


def test_a_service_runs_soon_when_the_supervisor_has_fallen_silent(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last look of the supervisor does not count as one of the worker's own poller."""
    turns: list[Any] = []
    monkeypatch.setattr(admit, "are_in_use", turns.append)
    worker = app.worker()
    silent = SimpleNamespace(looked_at=lambda: time.monotonic() - TRUSTED_SECONDS - 0.1)
    monkeypatch.setattr(worker._last_look, "_supervision", silent)
    assert not worker._last_look.supervisor_looks()
    worker._maintenance._admit.run()
    assert turns


# -- whom a supervisor sends ---------------------------------------------------------------------------------


class Links:
    """The supervisor's end of pipes: it notes which worker was woken."""

    def __init__(self) -> None:
        self.sent: list[str] = []


@pytest.fixture
def children() -> Iterator[Callable[..., Any]]:
    boxes: list[SharedMemory] = []
    clock = iter(range(1, 1_000))

    def child(name: str, sent: list[str], *, running: int = 0, slots: int = 10, rests: bool = True) -> Any:
        box, fd = SharedMemory.create()
        os.close(fd)
        boxes.append(box)
        for id in range(running):
            box.started((id + 1, 1))
        box.pulse(rests=rests)

        def send() -> None:
            sent.append(name)
            made.sent_at = next(clock)
            box.called()

        made = SimpleNamespace(worker=name, box=box, leaving=False, slots=slots, sent_at=0.0, send=send)
        return made

    yield child
    for box in boxes:
        box.close()


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
    found[2].leaving = False
    host_of(found)._go(again=False)
    assert sent == ["less busy"]
    found[2].leaving = True
    host_of(found)._go(again=False)
    assert sent == ["less busy", "busy"]


def test_the_next_lone_job_wakes_the_same_worker(children: Any) -> None:
    sent: list[str] = []
    found = [children("a", sent), children("b", sent), children("c", sent)]
    host = host_of(found)
    host._go(again=False)
    for child in found:
        child.box.pulse(rests=True)
    host._go(again=False)
    assert sent == [sent[0]] * 2


def test_another_worker_is_woken_when_the_first_does_not_claim(children: Any) -> None:
    sent: list[str] = []
    found = [children("a", sent), children("b", sent)]
    host = host_of(found)
    assert host._go(again=False) < 1.0
    assert host._go(again=True) == NEVER
    assert sorted(sent) == ["a", "b"]
    host._go(again=False)
    found["ab".index(sent[-1])].box.pulse()
    assert host._go(again=True) == NEVER, "it has gone"
    assert len(sent) == 3


def test_resting_workers_are_woken_when_one_finds_too_many_jobs(children: Any) -> None:
    sent: list[str] = []
    found = [children("first", sent, rests=False), children("awake", sent, rests=False)]
    found += [children(name, sent) for name in ("a", "b", "c")]
    host_of(found).more(found[0])
    assert len(sent) == len(set(sent)) == HELPERS
    assert set(sent) <= {"a", "b", "c"}


def test_a_dead_worker_does_not_block_the_wake_of_others(children: Any) -> None:
    """The caller may have an older list of the children."""
    gone = Child([sys.executable, "-c", ""], lambda child, message: None)
    wait_until(lambda: gone.end() is not None, what="its process ending")
    gone.worker, gone.slots = "gone", 4
    sent: list[str] = []
    found = [children("first", sent, rests=False), gone, children("alive", sent)]
    host = host_of(found)
    gone.close()
    host.more(found[0])
    host._note_look()
    assert "alive" in sent


def test_a_worker_in_another_database_is_not_watched(children: Any) -> None:
    """Where its engine leads elsewhere than its URL, what the supervisor sees is not what it would see."""
    sent: list[str] = []
    found = [children("here", sent), children("elsewhere", sent)]
    host = host_of(found, known=lambda worker: worker == "here")
    host._note_look()
    assert [child.box.looked_at() > 0 for child in found] == [True, False]
    host._go(again=False)
    host._go(again=True)
    assert sent == ["here"]


@pytest.mark.parametrize("database_url", ["mariadb"], indirect=True)
@pytest.mark.parametrize("by", ["sqlq", "session"])
def test_a_worker_without_notifications_is_woken_by_enqueues_of_its_process(
    app: sqlq.App, engine: Engine, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    monkeypatch.setattr(poller, "LOOKOUT_SECONDS", 3600.0)
    monkeypatch.setattr(poller, "TRUSTED_SECONDS", 3600.0)
    monkeypatch.setattr(wake, "POLL_SECONDS", 3600.0)
    ran = threading.Event()
    task = app.task(name="t")(ran.set)
    with working(app) as worker:
        wait_until(lambda: worker._wake.rests, what="the worker at rest")
        if by == "sqlq":
            app.enqueue(task.new())
        else:
            with Session(engine) as session, session.begin():
                app.enqueue(task.new(), session=session)
        assert ran.wait(30)
