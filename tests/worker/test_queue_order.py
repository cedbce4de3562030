"""A job that was claimed and never started keeps its place in the queue, whatever its worker met."""

from __future__ import annotations

import re
import threading
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, exc, text

import sqlq
from sqlq.database.dialect import Driver
from sqlq.model.outcome import Released, Settlement
from sqlq.store.jobs import settle
from sqlq.store.limits import admit
from sqlq.store.workers import workers
from sqlq.worker import worker
from sqlq.worker.attempt.attempt import Attempt
from sqlq.worker.claim import claimer as claims
from sqlq.worker.claim.claimer import Claimer, Pace
from sqlq.worker.maintain import services
from sqlq.worker.options import WorkerOptions
from sqlq.worker.run import executor
from sqlq.worker.run.lease import Leases
from tests.kit import claim, claim_size_of, deaths, expire, rescue, span, wait_until, working

pytestmark = pytest.mark.each_database


class Steps:
    """A task whose jobs note their start, and end when a test lets them."""

    def __init__(self, app: sqlq.App) -> None:
        self.app = app
        self.started: list[str] = []
        self.ends: dict[str, threading.Event] = {}
        self.ids: dict[str, int] = {}
        self._task = app.task(name="step")(self._run)

    def _run(self, name: str) -> None:
        self.started.append(name)
        assert self.ends[name].wait(60)

    def enqueue(self, *names: str) -> None:
        self.ends |= {name: threading.Event() for name in names}
        self.ids |= {name: self.app.enqueue(self._task.new(name)).id for name in names}

    def end(self, *names: str) -> None:
        """Let the first jobs end, and wait until each of the others has started in its turn."""
        self.ends[names[0]].set()
        for name in names[1:]:
            wait_until(partial(self.has_started, name), what=f"{name} has started")
            self.ends[name].set()

    def has_started(self, name: str) -> bool:
        return name in self.started

    def released(self, *names: str, times: int = 1) -> bool:
        return all(self.app.jobs.get(self.ids[name]).releases >= times for name in names)

    def reserved(self) -> int:
        return sum(self.app.jobs.get(id).state == "running" for id in self.ids.values())


@pytest.fixture
def steps(app: sqlq.App) -> Steps:
    return Steps(app)


def die(app: sqlq.App, owner: str) -> None:
    """Release the jobs of a worker that died under its supervisor, and had started none of them."""
    assert deaths(owner).release(app.database) == float("inf")


def test_a_queue_keeps_its_order_through_releases_a_stop_and_deaths(
    steps: Steps, app: sqlq.App, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr("sqlq.worker.settle.settle.notify_idle", told.append)
    steps.enqueue("x", "y", "a1", "a2", "a3", "a4")
    with monkeypatch.context() as wrong, working(app, concurrency=2) as at_work:
        wrong.setattr(Pace, "measure", lambda *given: 100.0)  # ten jobs are claimed ahead
        wrong.setattr(executor, "UNSTARTED_SECONDS", 0.05)
        wrong.setattr(worker, "UNSTARTED_SECONDS", 0.05)
        at_work._wake.call()
        wait_until(lambda: steps.released("a1", "a2", "a3", "a4", times=2), what="all given back twice")
        steps.enqueue("b1", "b2")
        wait_until(lambda: steps.released("b1", "b2"), what="also what came meanwhile")
        wrong.undo()
        wait_until(lambda: steps.reserved() == 2, what="nothing is held ahead any more")
        steps.end("x", "a1")
        wait_until(lambda: steps.has_started("a2"), what="a2 has started")
        wrong.setattr(Pace, "measure", lambda *given: 100.0)
        at_work._wake.call()
        wait_until(lambda: steps.reserved() == 6, what="the others are claimed ahead")
        at_work.stop()
        wait_until(lambda: steps.reserved() == 2, what="they are given back as it stops")
        steps.enqueue("c1")
        steps.end("a2")
        steps.end("y")
        wait_until(lambda: not steps.reserved(), what="what ran has ended")
    assert [job.id for job in claim(app, owner="died", limit=2)] == [steps.ids["a3"], steps.ids["a4"]]
    die(app, "died")
    steps.enqueue("c2")
    assert [job.id for job in claim(app, owner="away", limit=2)] == [steps.ids["a3"], steps.ids["a4"]]
    expire(engine)
    assert len(rescue(app)) == 2
    steps.enqueue("c3")
    with working(app, concurrency=1):
        steps.end("a3", "a4", "b1", "b2", "c1", "c2", "c3")
        wait_until(lambda: not steps.reserved(), what="all have ended")
    assert set(steps.started[:2]) == {"x", "y"}
    assert steps.started[2:] == ["a1", "a2", "a3", "a4", "b1", "b2", "c1", "c2", "c3"]
    assert app.jobs.get(steps.ids["a4"]).attempts == 2, "the rescue alone counts"
    assert told, "workers with free slots were told of what was given back"


def test_a_job_does_not_start_before_a_released_one_ahead_of_it(steps: Steps, app: sqlq.App) -> None:
    released: list[Attempt] = []
    steps.enqueue("old", "new")
    old, new = (Attempt(job, app.tasks["step"], float("inf")) for job in claim(app, limit=2))
    executors = executor.Executor(
        1, lambda job: None, lambda job, outcome: released.append(job), lambda: False
    )
    old.claimed_at = time.monotonic() - 2
    executors.offer([old, new])
    executors.release_unstarted()
    assert released == [old, new]


@pytest.mark.parametrize("how", ["released", "paused"])
def test_a_limited_job_that_never_started_keeps_its_place(app: sqlq.App, engine: Engine, how: str) -> None:
    task = app.task(name="call", limit=sqlq.Limit("stripe", running=1))(lambda: None)
    first, second = (app.enqueue(task.new()) for _ in range(2))
    with engine.begin() as conn:  # so that they were due one after the other
        minute = span(engine, 60)
        conn.execute(text(f"UPDATE jobs SET due_at = due_at - {minute} WHERE id = {first.id}"))
    admit.look(app.database)
    assert app.jobs.get(first.id).due_at is None
    if how == "released":
        (held,) = claim(app)
        settlement = Settlement(held.id, held.lease_token, 1, Released(), limit_key=held.limit_key)
        with app.database.begin() as conn:
            settle.settle(conn, [settlement])
    else:
        app.queues.pause("default")
        admit.sweep(app.database, "")
        app.queues.resume("default")
    assert app.jobs.get(first.id).state == "blocked"
    admit.look(app.database, ["stripe"])
    assert [job.id for job in claim(app)] == [first.id]
    assert app.jobs.get(second.id).state == "blocked"


# -- what is claimed ahead -----------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock that claims go by."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(claims, "monotonic", lambda: clock.now)
    return clock


def test_two_long_jobs_that_end_together_are_no_fast_pace(clock: SimpleNamespace) -> None:
    pace = Pace(2)
    clock.now += 2.2
    assert pace.measure(0, 0.0) == 0
    clock.now += 0.1
    assert pace.measure(2, 4.4) == pytest.approx(2 / 2.2)


def test_the_pace_of_short_jobs_after_long_ones_is_found_again(clock: SimpleNamespace) -> None:
    pace, ended, busy_seconds, seen = Pace(2), 2, 4.4, 0.0
    for _ in range(20):
        clock.now += 0.1
        seen = pace.measure(ended, busy_seconds)
        ended, busy_seconds = ended + 50, busy_seconds + 0.1
    assert seen == pytest.approx(500, rel=0.1)


def test_slow_claims_take_fewer_jobs(
    app: sqlq.App, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = app.task(name="t")(lambda: None)
    app.enqueue_many([task.new() for _ in range(20)])
    claimer = Claimer(app.database, "me", WorkerOptions(("default",), 10, 30_000))
    run = type(app.database.dialect.driver).run
    slow = [5.0]

    def runs(own: Driver, driver: Any, statement: str, parameters: Any) -> Any:
        clock.now += slow.pop() if slow and "reserved_by" in statement else 0.0
        return run(own, driver, statement, parameters)

    monkeypatch.setattr(type(app.database.dialect.driver), "run", runs)
    room = []
    for _ in range(3):
        room.append(claim_size_of(claimer))
        assert len(claimer.claim(room[-1])) == room[-1]
    assert room == [10, 2, 4]


def test_claims_of_large_payloads_take_fewer_jobs(app: sqlq.App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "SLOW_SECONDS", float("inf"))
    task = app.task(name="t")(lambda text: None)
    claimer = Claimer(app.database, "me", WorkerOptions(("default",), 100, 30_000))

    def room_for(number: int, size: int) -> int:
        """Return how many jobs a claim requests, which finds these."""
        ids = [job.id for job in app.enqueue_many([task.new("x" * size) for _ in range(number)])]
        room = claim_size_of(claimer)
        claimed = claimer.claim(room)
        app.jobs.cancel(ids, force=True)
        assert len(claimed) == min(room, number)
        return room

    assert [room_for(100, 1), room_for(20, 1_000_000)] == [100, 100], "the payloads became large only now"
    assert [room_for(20, 1_000_000) for _ in range(3)] == [16, 16, 16]
    assert [room_for(40, 1) for _ in range(3)] == [16, 32, 64]


# -- what takes long to be claimed ---------------------------------------------------------------------------


def test_a_late_claim_starts_its_jobs(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = type(app.database.dialect.driver).run
    delayed: list[int] = []

    def late(own: Driver, driver: Any, statement: str, parameters: Any) -> Any:
        rows = run(own, driver, statement, parameters)
        # MariaDB returns no rows, and reserves some only where it has found some
        if re.search(r"reserved_by ?= ?[?%]", statement) and (rows or app.database.dialect.name == "mariadb"):
            delayed.append(len(rows))
            until = time.monotonic() + 2.1
            wait_until(lambda: time.monotonic() > until, what="the lease has run out")
        return rows

    monkeypatch.setattr(type(app.database.dialect.driver), "run", late)
    monkeypatch.setattr(services.Rescue, "run", lambda self: 60.0)
    arrived, rescued = Leases.arrived, list[Any]()

    def rescued_first(leases: Leases, trusted_until: float) -> None:
        # on PostgreSQL the statement has committed, and its reply alone is late
        if app.database.dialect.name == "sqlite":
            rescued.extend(rescue(app))
        arrived(leases, trusted_until)

    monkeypatch.setattr(Leases, "arrived", rescued_first)
    task = app.task(name="t")(lambda: None)
    made = app.enqueue_many([task.new() for _ in range(2)])  # one claim takes both
    with working(app, concurrency=2, lease="2s") as at_work:
        wait_until(lambda: all(app.jobs.get(job.id).state == "finished" for job in made), what="all done")
        counts = at_work.counts
    assert (len(delayed), rescued) == (1, [])
    assert (counts.finished, counts.released, counts.lost) == (2, 0, 0)
    assert [(app.jobs.get(job.id).attempts, app.jobs.get(job.id).releases) for job in made] == [(1, 0)] * 2
    assert "lease lost" not in caplog.text


def test_a_late_claim_is_held_where_it_cannot_be_renewed(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def refuse(conn: Connection, worker: str) -> bool:
        asked.append(worker)
        raise exc.TimeoutError("QueuePool limit reached")

    monkeypatch.setattr(workers, "seen", refuse)
    worker = app.worker()
    worker._leases.arrived(time.monotonic())  # raises nothing
    assert asked == [worker.id]


def test_a_released_and_reclaimed_job_does_not_count_as_lost(
    app: sqlq.App, caplog: pytest.LogCaptureFixture
) -> None:
    task = app.task(name="t")(lambda: None)
    app.enqueue(task.new())
    leases = app.worker()._leases
    (first,) = (Attempt(job, task, 0.0) for job in claim(app))
    leases.hold([first])
    first.ended = True
    with app.database.begin() as conn:
        settle.settle(conn, [Settlement(*first.right, 1, Released())])
    claim(app)
    leases.beat()
    assert "lease lost" not in caplog.text
    first.ended = False
    leases.beat()
    assert "lease lost" in caplog.text, "what has not ended is"
