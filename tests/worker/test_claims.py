"""Claims: in which order queues and jobs come, how many a claim takes, and where it begins."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from contextlib import closing
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import chain, cycle
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Engine, text

import sqlq
from sqlq.database.dialect import Driver
from sqlq.model.outcome import Released
from sqlq.store.limits import admit
from sqlq.worker import worker
from sqlq.worker.attempt.attempt import Attempt
from sqlq.worker.claim import claimer as claims
from sqlq.worker.claim.claimer import Claimer, Pace
from sqlq.worker.maintain import services
from sqlq.worker.options import WorkerOptions
from sqlq.worker.run import executor
from sqlq.worker.run.lease import Leases
from tests.kit import claim, claim_size_of, deaths, expire, needs, rescue, settle, span, wait_until, working

pytestmark = pytest.mark.each_database


def test_claims_order_queues_by_weight(app: sqlq.App, noop: Any) -> None:
    weights = {"a": 5, "b": 1, "c": 1}
    claimer = Claimer(app.database, "me", WorkerOptions(("a", "b", "c"), 10, 60_000, weights=weights))
    assert claimer.claim(5) == []
    orders = Counter("".join(claimer._in_turn("abc")) for _ in range(7_000))
    assert set(orders) == {"abc", "acb", "bac", "bca", "cab", "cba"}
    assert 4_700 < sum(number for order, number in orders.items() if order[0] == "a") < 5_300
    app.enqueue_many([noop.new().set(queue=queue) for queue in "abc" for _ in range(2)])
    assert Counter(job.queue for job in claimer.claim(10)) == {"a": 2, "b": 2, "c": 2}


@pytest.mark.parametrize("dear", [False, True])
def test_a_worker_serves_a_low_queue_beside_a_full_one(
    app: sqlq.App, dear: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # whether claims go on where the last one ended does not depend on how busy the machine is
    monkeypatch.setattr(claims, "DEAR_SECONDS", -1.0 if dear else 60.0)
    monkeypatch.setattr(claims, "DEAR_SECONDS_A_JOB", 0.0)
    monkeypatch.setattr(claims, "ANEW_ONCE_IN", 1e9)
    monkeypatch.setattr(claims, "MAX_REST_SECONDS", 1e9)
    # three claims begin with `high`, so that only its position is known; then they take turns
    draws = chain([0.9, 0.1] * 3, cycle([0.1, 0.9, 0.9, 0.1]))
    monkeypatch.setattr(claims, "random", SimpleNamespace(random=lambda: next(draws)))
    ran: list[str] = []
    task = app.task(name="t")(ran.append)
    for queue in ("high", "low"):
        app.enqueue_many([task.new(queue).set(queue=queue) for _ in range(40)])
    worker = app.worker({"high": 1, "low": 1}, concurrency=1, max_jobs=32, ahead="0s")
    worker.run()
    assert min(Counter(ran)["high"], Counter(ran)["low"]) >= 5


@needs("file")
def test_a_claim_takes_as_many_of_each_queue(app: sqlq.App, noop: Any) -> None:
    """They lie together, and SQLite writes whole pages: from 100 queues that were filled in turn it drains
    half as many a second otherwise."""
    for many in ("abc", "abc", "ac", "ac", "a", "a", "a"):
        app.enqueue_many([noop.new().set(queue=name) for name in many])
    claimer = Claimer(app.database, "me", WorkerOptions(None, 10, 60_000))
    first = [job.queue for job in claimer.claim(6)]
    assert sorted(first[:3]) == sorted(first[3:]) == ["a", "b", "c"]
    assert Counter(job.queue for job in claimer.claim(6)) == {"a": 4, "c": 2}, "it fills turns of empty ones"
    assert [job.queue for job in claimer.claim(6)] == ["a"]
    assert claimer.claim(6) == []


def test_a_lifo_queue_runs_the_newest_of_each_priority_first(app: sqlq.App, noop: Any) -> None:
    stack = [app.enqueue(noop.new().set(queue="stack")).id for _ in range(4)]
    urgent = [app.enqueue(noop.new().set(queue="stack", priority=5)).id for _ in range(2)]
    later = app.enqueue(noop.new().set(queue="stack", delay="1h"))
    queue = [app.enqueue(noop.new().set(queue="queue")).id for _ in range(3)]
    options = WorkerOptions(("queue", "stack"), 10, 30_000)
    claims = Claimer(app.database.for_loops, "me", options, newest_first=frozenset({"stack"}))
    assert [job.id for job in claims.claim(4)] == [*queue, urgent[1]]
    assert [job.id for job in claims.claim(3)] == [urgent[0], stack[3], stack[2]]
    newer = app.enqueue(noop.new().set(queue="stack"))
    assert [job.id for job in claims.claim(10)] == [newer.id, stack[1], stack[0]]
    assert claims.claim(10) == []
    assert app.jobs.get(later.id).state == "scheduled", "never early"


def test_the_app_sets_the_order_of_a_queue(database_url: str) -> None:
    ran: list[int] = []
    with closing(sqlq.App(database_url, queues={"stack": {"order": "lifo", "max_attempts": 2}})) as app:
        task = app.task(name="t", queue="stack")(ran.append)
        assert task.max_attempts == 2
        app.enqueue_many([task.new(number) for number in range(3)])
        app.worker(drain=True, concurrency=1).run()
    assert ran == [2, 1, 0]


@needs("row_locks")
def test_claims_after_the_cursor_take_due_jobs_in_order(
    app: sqlq.App, noop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "MAX_REST_SECONDS", 3600.0)
    # all due at the same time: their ids order them
    one_transaction = app.enqueue_many([noop.new() for _ in range(8)])
    urgent = app.enqueue_many([noop.new().set(priority=5) for _ in range(3)])
    claimer = Claimer(app.database.for_loops, "somebody", WorkerOptions(("default",), 10, 30_000))
    claimed = claimer.claim(4)
    assert [job.id for job in claimed] == [*(job.id for job in urgent), one_transaction[0].id]
    for _ in range(2):
        claimer._cursor.note(claimed, 3600.0)
    early = app.enqueue(noop.new().set(available_at=datetime.now(UTC) - timedelta(hours=1)))
    later = app.enqueue(noop.new().set(delay="1h"))
    with app.database.begin() as conn:
        conn.execute(text("SELECT 1 FROM jobs WHERE id = :id FOR UPDATE"), {"id": one_transaction[2].id})
        # what is locked is somebody else's
        assert [job.id for job in claimer.claim(3)] == [one_transaction[i].id for i in (1, 3, 4)]
    last = app.enqueue(noop.new().set(priority=5))
    claimed = claimer.claim(2)
    assert [job.id for job in claimed] == [last.id, one_transaction[5].id]
    app.queues.pause("default")
    assert claimer.claim(10) == []
    app.queues.resume("default")
    claimer._cursor.note(claimed, 3600.0)
    assert [job.id for job in claimer.claim(10)] == [one_transaction[i].id for i in (6, 7)]
    assert claimer.claim(10) == []
    # the head is not forgotten
    assert {job.id for job in claimer.claim(10)} == {early.id, one_transaction[2].id}
    assert app.jobs.get(later.id).attempts == 0


@needs("postgresql")
@pytest.mark.parametrize("drain", [False, True])
def test_slow_claims_alone_run_every_job(app: sqlq.App, monkeypatch: pytest.MonkeyPatch, drain: bool) -> None:
    monkeypatch.setattr(claims, "DEAR_SECONDS", -1.0)
    monkeypatch.setattr(claims, "DEAR_SECONDS_A_JOB", 0.0)
    if drain:  # it may not end because the next claim from the head is not due yet
        monkeypatch.setattr(claims, "ANEW_ONCE_IN", 1e9)
        monkeypatch.setattr(claims, "MAX_REST_SECONDS", 1e9)
    ran: list[int] = []

    @app.task(name="t", backoff="0s")
    def task(n: int) -> None:
        if n == 1_900:
            early = datetime.now(UTC) - timedelta(hours=1)
            options: list[Any] = [{"available_at": early}, {"priority": 9}, {"queue": "other"}]
            app.enqueue_many([task.new(2_000 + i).set(**each) for i, each in enumerate(options)])
        ran.append(n)

    app.enqueue_many([task.new(i) for i in range(2_000)])
    if drain:
        app.worker(drain=True).run()
    else:
        with working(app):
            wait_until(lambda: len(ran) == 2_003, timeout=30, what="all done")
    assert sorted(ran) == list(range(2_003))


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
    assert deaths("died").release(app.database) == float("inf")
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
    executors = executor.Executor(1, lambda job: None, lambda job, _: released.append(job), lambda: False)
    old.claimed_at = time.monotonic() - 2
    executors.offer([old, new])
    executors.release_unstarted()
    assert released == [old, new]


@pytest.mark.parametrize("how", ["released", "paused"])
def test_a_limited_job_that_never_started_keeps_its_place(app: sqlq.App, engine: Engine, how: str) -> None:
    task = app.task(name="call", limit=sqlq.Limit("stripe", running=1))(lambda: None)
    first, second = (app.enqueue(task.new()) for _ in range(2))
    with engine.begin() as conn:  # so that they were due one after the other
        conn.execute(text(f"UPDATE jobs SET due_at = due_at - {span(engine, 60)} WHERE id = {first.id}"))
    admit.look(app.database)
    assert app.jobs.get(first.id).due_at is None
    if how == "released":
        settle(app, claim(app), Released())
    else:
        app.queues.pause("default")
        admit.sweep(app.database, "")
        app.queues.resume("default")
    assert app.jobs.get(first.id).state == "blocked"
    admit.look(app.database, ["stripe"])
    assert [job.id for job in claim(app)] == [first.id]
    assert app.jobs.get(second.id).state == "blocked"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock that claims go by."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(claims, "monotonic", lambda: clock.now)
    return clock


def test_slow_claims_take_fewer_jobs(
    app: sqlq.App, noop: Any, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    app.enqueue_many([noop.new() for _ in range(20)])
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
    monkeypatch.setattr(claims, "CLAIM_BYTES", 1024**2)
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

    assert [room_for(100, 1), room_for(20, 62_500)] == [100, 100], "the payloads became large only now"
    assert [room_for(20, 62_500) for _ in range(3)] == [16, 16, 16]
    assert [room_for(40, 1) for _ in range(3)] == [16, 32, 64]


def test_a_late_claim_starts_its_jobs(
    app: sqlq.App, noop: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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
    made = app.enqueue_many([noop.new() for _ in range(2)])  # one claim takes both
    with working(app, concurrency=2, lease="2s") as at_work:
        wait_until(lambda: all(app.jobs.get(job.id).state == "finished" for job in made), what="all done")
        counts = at_work.counts
    assert (len(delayed), rescued) == (1, [])
    assert (counts.finished, counts.released, counts.lost) == (2, 0, 0)
    assert [(app.jobs.get(job.id).attempts, app.jobs.get(job.id).releases) for job in made] == [(1, 0)] * 2
    assert "lease lost" not in caplog.text


def test_a_released_and_reclaimed_job_does_not_count_as_lost(
    app: sqlq.App, noop: Any, caplog: pytest.LogCaptureFixture
) -> None:
    app.enqueue(noop.new())
    leases = app.worker()._leases
    (first,) = (Attempt(job, noop, 0.0) for job in claim(app))
    leases.hold([first])
    first.ended = True
    settle(app, first.claimed, Released())
    claim(app)
    leases.beat()
    assert "lease lost" not in caplog.text
    first.ended = False
    leases.beat()
    assert "lease lost" in caplog.text, "what has not ended is"
