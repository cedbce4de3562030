"""Limits as workers keep them: never more at a time, no slot lost, nobody kept waiting."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

import sqlq
from sqlq.model.outcome import ErrorText, Retried, Settlement
from sqlq.store.blockers import LimitBlocker
from sqlq.store.jobs import settle
from sqlq.store.limits import admit as admission
from sqlq.worker.maintain.services import Unblock
from sqlq.worker.settle.settle import Counts
from tests.kit import claim, claim_on, needs, wait_until, waiting_for_locks, working
from tests.kit.hand import blocked

pytestmark = pytest.mark.each_database


class Gauge:
    """An App whose tasks note how many of a key run at a time."""

    def __init__(self, app: sqlq.App) -> None:
        self.app = app
        self.lock = threading.Lock()
        self.running: Counter[Any] = Counter()
        self.most: Counter[Any] = Counter()
        self.called: list[Any] = []

    def run(self, key: Any, what: Any = None) -> None:
        """Be seen running for as long as another thread needs to be seen, too."""
        with self.lock:
            self.running[key] += 1
            self.most[key] = max(self.most[key], self.running[key])
            self.called.append(what)
        threading.Event().wait(0.005)
        with self.lock:
            self.running[key] -= 1

    def task(self, running: int, key: str = "stripe", **options: Any) -> Any:
        """Return a task of which no more jobs run at a time."""

        def call(n: Any = None) -> None:
            self.run("stripe", n)

        return self.app.task(name="call", limit=sqlq.Limit(key, running=running), **options)(call)

    def work(self, **options: Any) -> Counts:
        return self.app.worker(drain=True, **options).run()


@pytest.fixture
def gauge(app: sqlq.App) -> Gauge:
    return Gauge(app)


def put_back(app: sqlq.App, held: list[Any], delay_ms: int) -> None:
    again = Retried(delay_ms, ErrorText("ValueError", "no"))
    with app.database.begin() as conn:
        settle.settle(
            conn, [Settlement(j.id, j.lease_token, j.attempts, again, limit_key=j.limit_key) for j in held]
        )


# -- at most so many at a time -------------------------------------------------------------------------------


def test_no_more_jobs_than_the_limit_run_at_a_time(gauge: Gauge) -> None:
    call = gauge.task(2)
    done = gauge.app.enqueue_many([call.new(n) for n in range(30)])
    assert {job.state for job in done} == {"blocked"}
    assert gauge.app.jobs.get(done[0].id).blocked_by == "limit"
    assert gauge.app.jobs.get(done[0].id).available_at is None
    assert gauge.work(concurrency=10).finished == 30
    assert sorted(gauge.called) == list(range(30))
    assert gauge.most["stripe"] == 2


def test_each_key_has_a_limit_of_its_own(gauge: Gauge) -> None:
    @gauge.app.task(name="bill", limit=sqlq.Limit("customer:{customer}", running=1))
    def bill(customer: int, n: int = 0) -> None:
        gauge.run(customer, n)

    gauge.app.enqueue_many([bill.new(n % 3, n=n) for n in range(12)])
    gauge.work(concurrency=6)
    assert gauge.most == {0: 1, 1: 1, 2: 1}
    assert sorted(gauge.called) == list(range(12))


def test_two_admissions_at_once_grant_no_slot_twice(gauge: Gauge, app: sqlq.App) -> None:
    call = gauge.task(5)
    app.enqueue_many([call.new() for _ in range(100)])
    admission.look(app.database)  # makes the key known
    for _ in range(10):
        held = claim(app)
        assert len(held) == 5
        put_back(app, held, 0)
        together = threading.Barrier(4)

        def admit(barrier: threading.Barrier = together) -> int:
            barrier.wait(60)
            return admission.look(app.database, ["stripe"], limit=0).number

        with ThreadPoolExecutor(4) as threads:
            assert sum(threads.map(lambda _: admit(), range(4))) == 5


@needs("sessions")
def test_an_admission_counts_after_it_has_waited_for_the_key(
    gauge: Gauge, app: sqlq.App, engine: Engine
) -> None:
    call = gauge.task(5)
    app.enqueue_many([call.new() for _ in range(20)])
    assert admission.look(app.database).number == 5
    put_back(app, claim(app), 0)
    with engine.begin() as other, ThreadPoolExecutor(1) as threads:
        other.execute(text("SELECT 1 FROM sqlq_limits WHERE limit_key = 'stripe' FOR UPDATE"))
        admitting = threads.submit(admission.look, app.database, ["stripe"])
        wait_until(lambda: waiting_for_locks(engine))
        by_hand = "id IN (SELECT id FROM jobs WHERE blocked_by = 'limit' LIMIT 5)"
        other.execute(
            text(f"UPDATE jobs SET available_at = now(), blocked_by = NULL, due_at = NULL WHERE {by_hand}")
        )
        other.commit()
        assert admitting.result(60).number == 0


# -- what holds no slot --------------------------------------------------------------------------------------


def test_a_job_that_waits_for_its_next_attempt_holds_no_slot(gauge: Gauge) -> None:
    failed = []

    @gauge.app.task(name="call", limit=sqlq.Limit("stripe", running=1), backoff="1h")
    def call(n: int) -> None:
        if n == 0:
            failed.append(n)
            raise ValueError("not yet")
        gauge.run("stripe", n)

    done = gauge.app.enqueue_many([call.new(n) for n in range(5)])
    gauge.work()
    assert gauge.called == [1, 2, 3, 4]
    job = gauge.app.jobs.get(done[0].id)
    assert (job.state, job.blocked_by, job.attempts) == ("blocked", "limit", 1)
    assert job.due_at is not None


@pytest.mark.parametrize("signal", [sqlq.Retry(delay="0s"), sqlq.Snooze("0s")])
def test_a_retry_or_snooze_waits_for_its_turn_again(gauge: Gauge, signal: Exception) -> None:
    @gauge.app.task(name="call", limit=sqlq.Limit("stripe", running=2))
    def call(n: int) -> None:
        again = n not in gauge.called
        gauge.run("stripe", n)
        if again:
            raise signal

    gauge.app.enqueue_many([call.new(n) for n in range(8)])
    gauge.work(concurrency=6)
    assert Counter(gauge.called) == dict.fromkeys(range(8), 2)
    assert gauge.most["stripe"] <= 2


def test_a_released_job_is_admitted_when_it_is_due(gauge: Gauge, app: sqlq.App) -> None:
    call = gauge.task(1)
    app.enqueue(call.new())
    admission.look(app.database)
    put_back(app, claim(app), 20)
    wait_until(lambda: admission.look(app.database).number == 1)
    put_back(app, claim(app), 3_600_000)
    done = admission.look(app.database, ["stripe"])
    assert done.number == 0
    assert done.next_ms is not None
    assert 3_000_000 < done.next_ms <= 3_600_000


def test_a_key_without_a_known_limit_admits_one_by_one(gauge: Gauge, app: sqlq.App) -> None:
    call = gauge.task(5)
    app.enqueue_many([call.new() for _ in range(9)])
    with app.database.begin() as conn:
        conn.execute(text("DELETE FROM sqlq_wakes"))
    assert admission.sweep(app.database, "")[0].number == 1
    app.enqueue(call.new())  # which has the limit
    assert admission.look(app.database).number == 4


def test_a_sweep_that_comes_before_the_wake_knows_the_limit(gauge: Gauge, app: sqlq.App) -> None:
    call = gauge.task(5)
    app.enqueue_many([call.new() for _ in range(9)])
    assert admission.sweep(app.database, "")[0].number == 5
    assert admission.look(app.database).number == 0


def test_a_retried_job_waits_for_a_slot(gauge: Gauge) -> None:
    broken = {1}

    @gauge.app.task(name="call", limit=sqlq.Limit("stripe", running=1), max_attempts=1)
    def call(n: int) -> None:
        gauge.run("stripe", n)
        if n in broken:
            raise ValueError("broken")

    @gauge.app.task(name="free", max_attempts=1)
    def free() -> None:
        if broken:
            raise ValueError("broken")

    done = [gauge.app.enqueue(call.new(1)), gauge.app.enqueue(free.new())]
    gauge.work()
    broken.clear()
    assert gauge.app.jobs.retry(all=True) == [job.id for job in done]
    assert [str(gauge.app.jobs.get(job.id).state) for job in done] == ["blocked", "available"]
    assert gauge.work().finished == 2


def test_a_job_that_fails_with_its_worker_releases_its_slot(gauge: Gauge) -> None:
    call = gauge.task(1, max_attempts=1)
    gauge.app.enqueue_many([call.new(n) for n in range(2)])
    admission.look(gauge.app.database)
    with gauge.app.database.begin() as conn:
        (dead,) = claim_on(conn, limit=9)
        settle.lose(conn, [(dead.id, dead.lease_token)], "died")
    assert admission.look(gauge.app.database).number == 1


@pytest.mark.parametrize("force", [False, True])
def test_a_cancelled_job_releases_its_slot(gauge: Gauge, force: bool) -> None:
    call = gauge.task(1)
    first, _ = gauge.app.enqueue_many([call.new(n) for n in range(2)])
    admission.look(gauge.app.database)
    if force:
        claim(gauge.app)
    assert gauge.app.jobs.cancel([first.id], force=force) == {first.id: "cancelled"}
    assert admission.look(gauge.app.database).number == 1
    assert gauge.work().finished == 1
    assert gauge.called == [1]


def test_jobs_of_a_paused_queue_hold_no_slots(gauge: Gauge) -> None:
    call = gauge.task(2)
    stuck = gauge.app.enqueue_many([call.new(n).set(queue="night") for n in range(5)])
    admission.look(gauge.app.database)
    assert [str(gauge.app.jobs.get(job.id).state) for job in stuck].count("available") == 2
    gauge.app.queues.pause("night")
    gauge.app.enqueue_many([call.new(n) for n in range(10, 13)])
    assert admission.look(gauge.app.database, ["stripe"]).number == 0  # both slots are taken
    Unblock(gauge.app.database, LimitBlocker()).run()
    assert gauge.work().finished == 3
    assert {str(gauge.app.jobs.get(job.id).state) for job in stuck} == {"blocked"}
    gauge.app.queues.resume("night")
    Unblock(gauge.app.database, LimitBlocker()).run()
    assert gauge.work().finished == 5


# -- nothing is lost -----------------------------------------------------------------------------------------


def test_the_sweep_admits_jobs_of_a_lost_wake(gauge: Gauge) -> None:
    call = gauge.task(1, "key:{n}")
    gauge.app.enqueue_many([call.new(n) for n in range(7)])
    with gauge.app.database.begin() as conn:
        conn.execute(text("DELETE FROM sqlq_wakes"))
    assert admission.look(gauge.app.database).number == 0
    admitted: list[None] = []
    Unblock(gauge.app.database, LimitBlocker(), freed=lambda: admitted.append(None)).run()
    assert admitted == [None]
    assert gauge.work().finished == 7


def test_a_sweep_continues_where_it_stopped(gauge: Gauge, app: sqlq.App) -> None:
    call = gauge.task(1, "key:{n}")
    app.enqueue_many([call.new(n) for n in range(5)])
    with app.database.begin() as conn:
        conn.execute(text("DELETE FROM sqlq_wakes"))
    place, numbers = "", list[int]()
    while place or not numbers:
        done, place = admission.sweep(app.database, place, limit=2)
        numbers.append(done.number)
    assert numbers == [2, 2, 1]


def test_an_idle_worker_admits_enqueued_jobs(gauge: Gauge) -> None:
    call = gauge.task(1)
    with working(gauge.app):
        for n in range(3):
            job = gauge.app.enqueue(call.new(n))
            wait_until(lambda job=job: gauge.app.jobs.get(job.id).state == "finished")  # type: ignore[misc]


def test_a_drain_runs_all_jobs_of_a_waiting_list(gauge: Gauge, monkeypatch: pytest.MonkeyPatch) -> None:
    @gauge.app.task(name="call")
    def call(n: int) -> None:
        gauge.run("rare", n)

    monkeypatch.setattr(Unblock, "run", lambda self: 60.0)  # which might find it first
    rare = sqlq.Limit("rare", running=1)  # of which the worker does not know
    gauge.app.enqueue_many([call.new(n).set(limit=rare) for n in range(4)])
    assert gauge.work(concurrency=4).finished == 4
    assert gauge.most["rare"] == 1


def test_a_limited_job_keeps_its_delay(gauge: Gauge) -> None:
    call = gauge.task(1)
    later = gauge.app.enqueue(call.new(1).set(delay="1h"))
    soon = gauge.app.enqueue(call.new(2).set(delay="100ms"))
    assert gauge.app.jobs.get(later.id).due_at is not None
    with working(gauge.app):
        wait_until(lambda: gauge.app.jobs.get(soon.id).state == "finished")
    done = gauge.app.jobs.get(soon.id)
    assert done.reserved_at is not None
    assert (done.reserved_at - done.created_at).total_seconds() >= 0.1
    assert gauge.app.jobs.get(later.id).state == "blocked"


def test_the_waiting_list_is_ordered_by_priority_then_age(gauge: Gauge) -> None:
    call = gauge.task(1)
    gauge.app.enqueue_many([call.new(1), call.new(2), call.new(3).set(priority=5)])
    gauge.work(concurrency=4)
    assert gauge.called == [3, 1, 2]


def test_a_large_waiting_list_is_admitted_in_portions(gauge: Gauge, app: sqlq.App) -> None:
    call = gauge.task(2500, "wide")
    app.enqueue_many([call.new() for _ in range(3000)])
    done = [admission.look(app.database) for _ in range(4)]
    assert [(each.number, each.has_more) for each in done] == [
        (1000, True),
        (1000, True),
        (500, False),
        (0, False),
    ]


# -- nobody waits --------------------------------------------------------------------------------------------


@needs("sessions")
def test_an_enqueue_does_not_wait_for_another_of_its_key(gauge: Gauge, app: sqlq.App, engine: Engine) -> None:
    call = gauge.task(1)
    with Session(engine) as one, Session(engine) as two:
        two.execute(text("SET lock_timeout = '1ms'"))  # any wait would be an error
        app.enqueue(call.new(), session=one)
        app.enqueue(call.new(), session=two)
        two.commit()
        assert admission.look(app.database).number == 1
        app.enqueue(call.new(), session=two)
        two.commit()
        one.commit()
    assert blocked(app) == 2


def test_a_rollback_leaves_no_job_and_no_wake(gauge: Gauge, app: sqlq.App, engine: Engine) -> None:
    call = gauge.task(1)
    with Session(engine) as session:
        app.enqueue(call.new(), session=session)
        app.enqueue_many([call.new(), call.new().set(delay="5m")], session=session)
        assert session.scalar(text("SELECT count(*) FROM sqlq_wakes")) == 3
        session.rollback()
        assert session.scalar(text("SELECT count(*) FROM sqlq_wakes")) == 0
        assert session.scalar(text("SELECT count(*) FROM jobs")) == 0


# -- with others ---------------------------------------------------------------------------------------------


def test_a_step_waits_for_its_parents_and_then_for_a_slot(gauge: Gauge) -> None:
    @gauge.app.task(name="call", limit=sqlq.Limit("stripe", running=1))
    def call(what: str) -> str:
        gauge.run("stripe", what)
        return what

    flow = sqlq.Flow()
    first = flow.add(call.new("first"))
    last = flow.add(call.new("last"), after=[first, flow.add(call.new("second"))])
    done = gauge.app.enqueue(flow)
    assert [job.state for job in done.jobs] == ["blocked"] * 3
    assert [gauge.app.jobs.get(job.id).blocked_by for job in done.jobs] == ["limit", "limit", "flow"] or (
        gauge.app.jobs.get(done.job(last).id).blocked_by == "flow"
    )
    gauge.work(concurrency=5)
    assert gauge.called[-1] == "last"
    assert gauge.most["stripe"] == 1


def test_jobs_without_a_limit_run_beside_a_full_waiting_list(gauge: Gauge) -> None:
    call = gauge.task(1)

    @gauge.app.task(name="free")
    def free(n: int) -> None:
        gauge.run("free", n)

    gauge.app.enqueue_many([call.new(n) for n in range(5)])
    admission.look(gauge.app.database)
    claim(gauge.app)  # by a worker that holds on to it
    gauge.app.enqueue_many([free.new(n) for n in range(5)])
    assert gauge.work().finished == 5
    assert blocked(gauge.app) == 4


def test_a_unique_key_and_a_limit_go_together(gauge: Gauge) -> None:
    call = gauge.task(1)
    first = gauge.app.enqueue(call.new(1).set(unique_key="a"))
    again = gauge.app.enqueue(call.new(1).set(unique_key="a"))
    both = gauge.app.enqueue_many([call.new(2).set(unique_key="b"), call.new(3)])
    assert (first.created, again.created, again.id) == (True, False, first.id)
    assert {job.state for job in (first, again, *both)} == {"blocked"}
    assert gauge.work().finished == 3


def test_inline_and_eager_jobs_ignore_limits(gauge: Gauge) -> None:
    call = gauge.task(1)
    gauge.app.enqueue(call.new(1), eager=True)
    with sqlq.testing.inline(gauge.app):
        gauge.app.enqueue_many([call.new(2), call.new(3)])
    assert gauge.called == [1, 2, 3]


def test_fairness_admits_a_new_tenant_early(gauge: Gauge) -> None:
    gauge.app.fair(by="tenant:{tenant}", window=2)

    @gauge.app.task(name="report")
    def report(tenant: str) -> None:
        gauge.run(tenant, tenant)

    @gauge.app.task(name="sweep_up")
    def sweep_up() -> None: ...

    assert sweep_up.limit is None
    gauge.app.enqueue_many([report.new("large") for _ in range(40)])
    admission.look(gauge.app.database)
    gauge.app.enqueue(report.new("small"))
    gauge.work(concurrency=1)
    assert gauge.called.index("small") <= 6
    assert len(gauge.called) == 41


def test_fairness_names_an_argument(app: sqlq.App) -> None:
    with pytest.raises(sqlq.errors.ConfigurationError, match="by is 'tenant', which names no argument"):
        app.fair(by="tenant", window=3)
