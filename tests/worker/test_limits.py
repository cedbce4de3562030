"""Limits, rates and serial keys: never more at a time, no slot lost, nobody kept waiting."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

import sqlq
from sqlq.errors import ConfigurationError
from sqlq.model.outcome import ErrorText, Released, Retried
from sqlq.store import schedules
from sqlq.store.blockers import LimitBlocker
from sqlq.store.jobs import settle as settling
from sqlq.store.limits import admit
from sqlq.store.workers import workers
from sqlq.testing.database import write_declared
from sqlq.worker.claim.claimer import Claimer
from sqlq.worker.maintain.services import Unblock
from sqlq.worker.settle.settle import Counts
from tests import kit

pytestmark = pytest.mark.each_database

ONE = sqlq.Limit("api", running=1)


def look(app: sqlq.App) -> int:
    """Look at the wakes that are due, as a worker does; return how many jobs were admitted."""
    return admit.look(app.database).number


def state(app: sqlq.App, id: int) -> str:
    return str(app.jobs.get(id).state)


def put_back(app: sqlq.App, held: list[Any], delay_ms: int) -> None:
    kit.settle(app, held, Retried(delay_ms, ErrorText("ValueError", "no")))


def lose_wakes(app: sqlq.App) -> None:
    kit.execute(app.database.engine, "DELETE FROM sqlq_wakes")


class Gauge:
    """An App with a task that notes its calls, and how many of an account run at a time."""

    def __init__(self, app: sqlq.App) -> None:
        self.app, self.lock = app, threading.Lock()
        self.running, self.most = Counter[str](), Counter[str]()
        self.called: list[Any] = []
        self.broken: set[Any] = set()

    def run(self, n: Any = None, account: str = "") -> None:
        """Be seen running for as long as another thread needs to be seen, too."""
        with self.lock:
            self.running[account] += 1
            self.most[account] = max(self.most[account], self.running[account])
            self.called.append(n)
        threading.Event().wait(0.005)
        with self.lock:
            self.running[account] -= 1
        if n in self.broken:
            raise ValueError("broken")

    def task(self, limit: int | sqlq.Limit | sqlq.Serial, **options: Any) -> Any:
        """Return a task under a limit, or of which no more jobs run at a time."""
        if isinstance(limit, int):
            limit = sqlq.Limit("stripe", running=limit)

        def call(n: Any = None, account: str = "") -> None:
            self.run(n, account)

        return self.app.task(name="call", limit=limit, **options)(call)

    def work(self, **options: Any) -> Counts:
        return self.app.worker(drain=True, **options).run()

    def calls(self) -> list[Any]:
        """Run what can run, and return with what it was called."""
        before = len(self.called)
        self.work(concurrency=6)
        return self.called[before:]


@pytest.fixture
def gauge(app: sqlq.App) -> Gauge:
    return Gauge(app)


def test_no_more_jobs_than_the_limit_run_at_a_time(gauge: Gauge) -> None:
    call = gauge.task(2)
    done = gauge.app.enqueue_many([call.new(n) for n in range(30)])
    assert {job.state for job in done} == {"blocked"}
    assert gauge.app.jobs.get(done[0].id).blocked_by == "limit"
    assert gauge.app.jobs.get(done[0].id).available_at is None
    assert gauge.work(concurrency=10).finished == 30
    assert sorted(gauge.called) == list(range(30))
    assert gauge.most[""] == 2


def test_two_admissions_at_once_grant_no_slot_twice(gauge: Gauge, app: sqlq.App) -> None:
    call = gauge.task(5)
    app.enqueue_many([call.new() for _ in range(100)])
    look(app)  # makes the key known
    for _ in range(10):
        held = kit.claim(app)
        assert len(held) == 5
        put_back(app, held, 0)
        together = threading.Barrier(4)

        def admitted(barrier: threading.Barrier = together) -> int:
            barrier.wait(60)
            return admit.look(app.database, ["stripe"], limit=0).number

        with ThreadPoolExecutor(4) as threads:
            assert sum(threads.map(lambda _: admitted(), range(4))) == 5


@kit.needs("sessions")
def test_an_admission_counts_after_it_has_waited_for_the_key(
    gauge: Gauge, app: sqlq.App, engine: Engine
) -> None:
    call = gauge.task(5)
    app.enqueue_many([call.new() for _ in range(20)])
    assert look(app) == 5
    put_back(app, kit.claim(app), 0)
    with engine.begin() as other, ThreadPoolExecutor(1) as threads:
        other.execute(text("SELECT 1 FROM sqlq_limits WHERE limit_key = 'stripe' FOR UPDATE"))
        admitting = threads.submit(admit.look, app.database, ["stripe"])
        kit.wait_until(lambda: kit.waiting_for_locks(engine))
        by_hand = "id IN (SELECT id FROM jobs WHERE blocked_by = 'limit' LIMIT 5)"
        other.execute(
            text(f"UPDATE jobs SET available_at = now(), blocked_by = NULL, due_at = NULL WHERE {by_hand}")
        )
        other.commit()
        assert admitting.result(60).number == 0


def test_a_job_that_waits_for_its_next_attempt_holds_no_slot(gauge: Gauge, app: sqlq.App) -> None:
    call = gauge.task(1)
    first = app.enqueue(call.new(0))
    look(app)
    put_back(app, kit.claim(app), 20)
    kit.wait_until(lambda: look(app) == 1, what="it admitted when it is due")
    put_back(app, kit.claim(app), 3_600_000)
    done = admit.look(app.database, ["stripe"])
    assert done.number == 0
    assert done.next_ms is not None
    assert 3_000_000 < done.next_ms <= 3_600_000
    app.enqueue_many([call.new(n) for n in range(1, 5)])
    gauge.work()
    assert gauge.called == [1, 2, 3, 4]
    job = app.jobs.get(first.id)
    assert (job.state, job.blocked_by, job.attempts) == ("blocked", "limit", 2)
    assert job.due_at is not None


@pytest.mark.parametrize(("wake", "admitted"), [("lost", [1, 4]), ("late", [5, 0])])
def test_a_sweep_before_the_wake_admits_one_by_one_where_none_has_the_limit(
    gauge: Gauge, app: sqlq.App, wake: str, admitted: list[int]
) -> None:
    call = gauge.task(5)
    app.enqueue_many([call.new() for _ in range(9)])
    if wake == "lost":
        lose_wakes(app)
    swept = admit.sweep(app.database, "")[0].number
    if wake == "lost":
        app.enqueue(call.new())  # which has the limit
    assert [swept, look(app)] == admitted


def test_jobs_of_a_paused_queue_hold_no_slots(gauge: Gauge) -> None:
    call = gauge.task(2)
    stuck = gauge.app.enqueue_many([call.new(n).set(queue="night") for n in range(5)])
    look(gauge.app)
    assert [str(gauge.app.jobs.get(job.id).state) for job in stuck].count("available") == 2
    gauge.app.queues.pause("night")
    gauge.app.enqueue_many([call.new(n) for n in range(10, 13)])
    assert admit.look(gauge.app.database, ["stripe"]).number == 0  # both slots are taken
    Unblock(gauge.app.database, LimitBlocker()).run()
    assert gauge.work().finished == 3
    assert {str(gauge.app.jobs.get(job.id).state) for job in stuck} == {"blocked"}
    gauge.app.queues.resume("night")
    Unblock(gauge.app.database, LimitBlocker()).run()
    assert gauge.work().finished == 5


def test_the_sweep_admits_jobs_of_a_lost_wake(gauge: Gauge) -> None:
    call = gauge.task(sqlq.Limit("key:{n}", running=1))
    gauge.app.enqueue_many([call.new(n) for n in range(7)])
    lose_wakes(gauge.app)
    assert look(gauge.app) == 0
    admitted: list[None] = []
    Unblock(gauge.app.database, LimitBlocker(), freed=lambda: admitted.append(None)).run()
    assert admitted == [None]
    assert gauge.work().finished == 7


def test_a_drain_runs_the_waiting_by_priority_then_age(gauge: Gauge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Unblock, "run", lambda self: 60.0)  # which might find it first
    call = gauge.app.task(name="call")(gauge.run)
    rare = sqlq.Limit("rare", running=1)  # of which the worker does not know
    rows = [(1, 0), (2, 0), (3, 5)]
    gauge.app.enqueue_many([call.new(n).set(limit=rare, priority=priority) for n, priority in rows])
    assert gauge.work(concurrency=4).finished == 3
    assert (gauge.called, gauge.most[""]) == ([3, 1, 2], 1)


def test_a_large_waiting_list_is_admitted_in_portions(gauge: Gauge, app: sqlq.App) -> None:
    call = gauge.task(2500)
    app.enqueue_many([call.new() for _ in range(3000)])
    done = [admit.look(app.database) for _ in range(4)]
    assert [each.number for each in done] == [1000, 1000, 500, 0]
    assert [each.has_more for each in done] == [True, True, False, False]


@kit.needs("sessions")
def test_an_enqueue_does_not_wait_for_another_of_its_key(gauge: Gauge, app: sqlq.App, engine: Engine) -> None:
    call = gauge.task(1)
    with Session(engine) as one, Session(engine) as two:
        two.execute(text("SET lock_timeout = '1ms'"))  # any wait would be an error
        app.enqueue(call.new(), session=one)
        app.enqueue(call.new(), session=two)
        two.commit()
        assert look(app) == 1
        app.enqueue(call.new(), session=two)
        two.commit()
        one.commit()
    assert kit.blocked(app) == 2


def test_jobs_without_a_limit_run_beside_a_full_waiting_list(gauge: Gauge, app: sqlq.App) -> None:
    """And a job that is retried waits for a slot, unlike them."""
    call, free = gauge.task(1), app.task(name="free")(lambda: None)
    ids = [job.id for job in app.enqueue_many([call.new(), free.new()])]
    look(app)
    kit.settle(app, kit.claim(app), kit.BOOM)
    assert app.jobs.retry(all=True) == ids
    assert [state(app, id) for id in ids] == ["blocked", "available"]
    assert gauge.work().finished == 2
    app.enqueue_many([call.new(n) for n in range(5)])
    look(app)
    kit.claim(app)  # by a worker that holds on to it
    app.enqueue_many([free.new() for _ in range(5)])
    assert gauge.work().finished == 5
    assert kit.blocked(app) == 4


def test_fairness_admits_a_new_tenant_early(gauge: Gauge, app: sqlq.App) -> None:
    app.fair(by="tenant:{n}", window=2)
    report = app.task(name="report")(gauge.run)
    app.enqueue_many([report.new("large") for _ in range(40)])
    look(app)
    app.enqueue(report.new("small"))
    gauge.work(concurrency=1)
    assert gauge.called.index("small") <= 6
    assert len(gauge.called) == 41


def test_the_limit_of_a_delayed_job_does_not_replace_a_newer_one(app: sqlq.App, engine: Engine) -> None:
    old = app.task(name="old", limit=sqlq.Limit("api", running=2))(lambda: None)
    app.enqueue(old.new().set(delay="1h"))
    assert look(app) == 0
    with_more = sqlq.App(app.database.engine.url.render_as_string(hide_password=False))
    new = with_more.task(name="new", limit=sqlq.Limit("api", running=5))(lambda: None)
    with_more.enqueue_many([new.new() for _ in range(9)])
    with_more.close()
    assert look(app) == 5
    kit.execute(engine, f"UPDATE sqlq_wakes SET at = at - {kit.span(engine, 7_200)}")
    look(app)
    (known,) = app.limits.list()
    assert known.max_running == 5


def test_the_job_of_a_schedule_has_its_named_limit(app: sqlq.App, engine: Engine) -> None:
    task = app.task(name="poll")(lambda: None)
    app.limit("api", running=4)
    app.schedule("polls", task.new().set(limit="api"), every="1h", catch_up="all")
    write_declared(app)
    hours = kit.span(engine, 36_000)
    kit.execute(engine, f"UPDATE sqlq_schedules SET last_at = last_at - {hours}, next_at = next_at - {hours}")
    assert len(schedules.tick(app.database).jobs) == 10
    assert look(app) == 4


def test_a_rate_leaves_one_wake_and_counts_from_the_last_start_when_it_changes(app: sqlq.App) -> None:
    """And not from when the next would have been by the rate before, which may be tomorrow."""
    task = app.task(name="call", limit=sqlq.Limit("api", rate="1/1d"))(lambda: None)
    app.enqueue_many([task.new() for _ in range(50)])
    for admitted in (1, 0, 0):  # each sweep, and each enqueue, looks
        assert look(app) == admitted
        admit.sweep(app.database, "")
        app.enqueue(task.new())
    look(app)
    assert kit.count(app.database.engine, "sqlq_wakes") == 1
    raised = app.limits.set("api", rate="20/1s")
    assert raised.next_start_seconds is not None
    assert raised.next_start_seconds <= 0.15
    kit.wait_until(lambda: look(app) > 0, what="the next one admitted")
    (before,) = app.limits.list()
    lowered = app.limits.set("api", rate="1/1h")
    assert before.next_start_seconds is not None
    assert lowered.next_start_seconds is not None
    assert lowered.next_start_seconds > timedelta(minutes=59).total_seconds()
    assert (lowered.running, look(app)) == (before.running, 0)


SLOWED = Released(3_600_000, snoozed=True, closes=True)


def an_hour_later(engine: Engine) -> None:
    """Let an hour pass for limits, wakes and jobs in line."""
    hour = kit.span(engine, 3_600)
    kit.execute(engine, f"UPDATE sqlq_limits SET closed_until = closed_until - {hour}")
    kit.execute(engine, f"UPDATE sqlq_wakes SET at = at - {hour}")
    kit.execute(engine, f"UPDATE jobs SET due_at = due_at - {hour}")


def test_a_slow_down_closes_the_key_for_all_until_its_time(app: sqlq.App, engine: Engine) -> None:
    task = app.task(name="call", limit=sqlq.Limit("api", running=3))(lambda: None)
    slowed, *others = [job.id for job in app.enqueue_many([task.new() for _ in range(5)])]
    assert look(app) == 3
    (held,) = kit.claim(app, limit=1)
    rescued = held._replace(lease_token=held.lease_token + 1)
    assert kit.settle(app, rescued, SLOWED) == set()
    assert app.limits.list()[0].closed_until is None, "a job that was lost closes nothing"
    assert kit.settle(app, held, SLOWED) == {slowed}
    app.enqueue(task.new())
    admit.sweep(app.database, "")
    assert (look(app), kit.claim(app), kit.blocked(app)) == (0, [], 6), "nothing is admitted, nor stays so"
    assert (app.jobs.get(slowed).attempts, state(app, slowed)) == (0, "blocked")
    assert "its limit api is closed, and opens in " in " ".join(app.jobs.why(others[0]))
    (closed,) = app.limits.list()
    assert app.limits.close("api", until="1m").closed_until == closed.closed_until, "the later end counts"
    an_hour_later(engine)
    assert look(app) == 3, "the wake of its end"
    assert [job.id for job in kit.claim(app)] == others[:3], "each in its place"


def test_an_operator_closes_and_opens_a_key(app: sqlq.App, engine: Engine) -> None:
    task = app.task(name="call", limit=sqlq.Limit("api", rate="100/1s"))(lambda: None)
    with pytest.raises(ConfigurationError, match="there is no limit of the key 'apo'"):
        app.limits.close("apo", until="1h")
    before = app.limits.close("api", until=datetime.now(UTC) + timedelta(hours=1))
    assert before.closed_until is not None
    app.enqueue_many([task.new() for _ in range(50)])
    assert look(app) == 0
    assert asyncio.run(app.limits.aopen("api")).closed_until is None
    (opened,) = app.limits.list()
    assert 0 < opened.running <= 11, "at its rate, for the next tenth of a second"
    asyncio.run(app.limits.aclose("api", until="1h"))
    assert (kit.blocked(app), look(app)) == (50, 0)
    an_hour_later(engine)
    kit.wait_until(lambda: look(app) > 0, what="the wake of its end, at the rate")


def test_a_worker_releases_what_it_holds_of_a_key_that_its_job_closes(
    gauge: Gauge, monkeypatch: pytest.MonkeyPatch
) -> None:
    @gauge.app.task(name="call", limit=sqlq.Limit("api", running=9))
    def call(n: int) -> None:
        gauge.called.append(n)
        raise sqlq.SlowDown("1h")

    monkeypatch.setattr(Claimer, "ahead", lambda *_: 9)
    gauge.app.enqueue_many([call.new(n) for n in range(9)])
    assert gauge.work(concurrency=1).released == 9
    assert (gauge.called, kit.blocked(gauge.app)) == ([0], 9)


def lose(app: sqlq.App, id: int) -> None:
    (dead,) = kit.claim(app)
    with app.database.begin() as conn:
        settling.lose(conn, [(dead.id, dead.lease_token)], "died")


def cancel_by_force(app: sqlq.App, id: int) -> None:
    kit.claim(app)
    app.jobs.cancel([id], force=True)


ENDS: dict[str, Callable[[sqlq.App, int], object]] = {
    "lost": lose,
    "cancelled": lambda app, id: app.jobs.cancel([id]),
    "cancelled_by_force": cancel_by_force,
    "skipped": lambda app, id: app.flows.skip(id),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_job_that_ends_without_a_settle_releases_its_slot(app: sqlq.App, end: str) -> None:
    task = app.task(name="call", limit=ONE, max_attempts=1)(lambda: None)
    first, then = app.enqueue(sqlq.group(task.new())).jobs[0], app.enqueue(task.new())
    assert look(app) == 1
    ENDS[end](app, first.id)
    assert (look(app), state(app, then.id)) == (1, "available")


@pytest.mark.parametrize("limit", [ONE, sqlq.Serial("api")], ids=["one", "serial"])
def test_an_expired_job_releases_its_slot(app: sqlq.App, engine: Engine, limit: Any) -> None:
    task = app.task(name="call", limit=limit)(lambda: None)
    late, then = app.enqueue(task.new().set(start_within="90s")), app.enqueue(task.new())
    kit.execute(engine, f"UPDATE jobs SET start_by = created_at WHERE id = {late.id}")
    app.worker(drain=True).run()
    assert (state(app, late.id), state(app, then.id)) == ("cancelled", "finished")


def served_by(app: sqlq.App, id: str, queues: list[str] | None) -> None:
    with app.database.begin() as conn:
        workers.register(conn, id=id, host="here", pid=1, version="0", queues=queues, concurrency=1)


@pytest.mark.parametrize("limit", [ONE, sqlq.Serial("api")], ids=["limit", "serial"])
def test_jobs_of_an_unserved_queue_stay_blocked(app: sqlq.App, limit: Any) -> None:
    task = app.task(name="call", limit=limit)(lambda: None)
    served_by(app, "one", ["default", "mail"])
    left = app.enqueue(task.new().set(queue="nobody"))
    then = app.enqueue(task.new())
    in_order = isinstance(limit, sqlq.Serial)
    assert look(app) == (0 if in_order else 1)
    assert state(app, left.id) == "blocked"
    assert state(app, then.id) == ("blocked" if in_order else "available")
    served_by(app, "two", ["nobody"])
    if not in_order:
        app.jobs.cancel([then.id])
    admit.sweep(app.database, "")
    assert state(app, left.id) == "available"


def test_a_queue_without_workers_releases_its_slots(app: sqlq.App) -> None:
    task = app.task(name="call", limit=ONE)(lambda: None)
    ids = [job.id for job in app.enqueue_many([task.new().set(queue="soon gone"), task.new()])]
    served_by(app, "one", ["default"])
    served_by(app, "two", ["soon gone"])
    assert look(app) == 1
    admit.sweep(app.database, "")
    assert state(app, ids[0]) == "available", "as long as one serves it"
    with app.database.begin() as conn:
        workers.leave(conn, "two")
    admit.sweep(app.database, "")
    assert [state(app, id) for id in ids] == ["blocked", "available"]


def test_jobs_of_a_key_run_in_the_order_of_their_ids(gauge: Gauge) -> None:
    book = gauge.task(sqlq.Serial("account:{account}"))
    later = [book.new(n, "a").set(priority=n) for n in range(8)]  # priorities do not change the order
    gauge.app.enqueue_many([*later, *(book.new(n, "b") for n in range(8, 16))])
    with ThreadPoolExecutor(2) as threads:
        for worker in [threads.submit(gauge.work, concurrency=6) for _ in range(2)]:
            worker.result(60)
    assert [n for n in gauge.called if n < 8] == list(range(8))
    assert [n for n in gauge.called if n >= 8] == list(range(8, 16))


def test_a_delayed_job_blocks_those_after_it_and_one_that_has_failed_does_not(gauge: Gauge) -> None:
    book = gauge.task(sqlq.Serial("account:{account}"), max_attempts=1)
    first = gauge.app.enqueue(book.new(10, "delayed").set(delay="1h"))
    gauge.app.enqueue(book.new(11, "delayed"))
    assert gauge.calls() == []
    gauge.app.jobs.cancel([first.id])
    assert gauge.calls() == [11]
    gauge.broken = {1}
    gauge.app.enqueue_many([book.new(n, "a") for n in range(3)])
    assert gauge.calls() == [0, 1, 2]
    gauge.broken.clear()
    gauge.app.enqueue(book.new(3, "a"))
    gauge.app.jobs.retry(all=True)  # whose id is the least again
    assert gauge.calls() == [1, 3]


@pytest.mark.parametrize("way", ["retried", "deleted"])
def test_a_failure_holds_the_key_until_it_is_retried_or_deleted(gauge: Gauge, way: str) -> None:
    book = gauge.task(sqlq.Serial("account:{account}", on_failure="hold"), max_attempts=1)
    gauge.broken = {1}
    gauge.app.enqueue_many([book.new(n, "a") for n in range(3)])
    gauge.app.enqueue(book.new(7, "b"))
    assert sorted(gauge.calls()) == [0, 1, 7]
    assert len(gauge.app.jobs.list(state="blocked")) == 1
    gauge.broken.clear()
    if way == "retried":
        gauge.app.jobs.retry(all=True)
    else:
        gauge.app.jobs.delete(all=True)
        assert look(gauge.app) == 1
    assert gauge.calls() == ([1, 2] if way == "retried" else [2])


def test_a_head_that_is_locked_is_not_overtaken(gauge: Gauge) -> None:
    book = gauge.task(sqlq.Serial("account:{account}"))
    first, second = gauge.app.enqueue_many([book.new(n, "a") for n in range(2)])
    admit.look(gauge.app.database, limit=0)
    if gauge.app.database.dialect.in_a_file:
        return  # nobody holds a row there while another writes
    with gauge.app.database.begin() as conn, ThreadPoolExecutor(1) as threads:
        conn.execute(text("SELECT 1 FROM jobs WHERE id = :id FOR UPDATE"), {"id": first.id})
        admitting = threads.submit(admit.look, gauge.app.database)
        # MariaDB refuses a locked row at once
        kit.wait_until(lambda: admitting.done() or kit.waiting_for_locks(gauge.app.database.engine))
        conn.commit()
        if refused := admitting.exception(60):
            assert "Lock wait timeout" in str(refused)
        else:
            assert admitting.result().number == 1
    assert look(gauge.app) == (1 if refused else 0)
    with gauge.app.database.begin() as conn:
        assert [job.id for job in kit.claim_on(conn, limit=9, lease_ms=1000)] == [first.id]
    assert gauge.app.jobs.get(second.id).state == "blocked"
