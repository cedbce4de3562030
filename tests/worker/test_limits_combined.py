"""Rates, serial keys, and limits beside other features: every end of a job releases its slot or turn."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from sqlalchemy import Engine, text

import sqlq
from sqlq.model.checks import Rule
from sqlq.model.outcome import ErrorText, Failed
from sqlq.store import schedules
from sqlq.store.limits import admit
from sqlq.store.limits.grant import Grant
from sqlq.store.workers import workers
from sqlq.testing.database import write_declared
from tests.kit import (
    claim,
    claim_on,
    count,
    execute,
    for_each,
    settle,
    span,
    wait_until,
    waiting_for_locks,
    working,
)

ONE = sqlq.Limit("api", running=1)


def look(app: sqlq.App) -> int:
    """Look at the wakes that are due, as a worker does; return how many jobs were admitted."""
    return admit.look(app.database).number


def state(app: sqlq.App, id: int) -> str:
    return str(app.jobs.get(id).state)


def served_by(app: sqlq.App, id: str, queues: list[str] | None) -> None:
    with app.database.begin() as conn:
        workers.register(conn, id=id, host="here", pid=1, version="0", queues=queues, concurrency=1)


# -- what a limit says ---------------------------------------------------------------------------------------


def test_the_limit_of_a_delayed_job_does_not_replace_a_newer_one(app: sqlq.App, engine: Engine) -> None:
    def call() -> None: ...

    old = app.task(name="old", limit=sqlq.Limit("api", running=2))(call)
    app.enqueue(old.new().set(delay="1h"))
    assert look(app) == 0
    with_more = sqlq.App(app.database.engine.url.render_as_string(hide_password=False))
    new = with_more.task(name="new", limit=sqlq.Limit("api", running=5))(call)
    with_more.enqueue_many([new.new() for _ in range(9)])
    with_more.close()
    assert look(app) == 5
    with engine.begin() as conn:
        earlier = f"- {span(engine, 7_200)}"
        conn.execute(text(f"UPDATE sqlq_wakes SET at = at {earlier}"))
    look(app)
    (known,) = app.limits.list()
    assert known.max_running == 5


def test_the_job_of_a_schedule_has_its_named_limit(app: sqlq.App, engine: Engine) -> None:
    task = app.task(name="poll")(lambda: None)
    app.limit("api", running=4)
    app.schedule("polls", task.new().set(limit="api"), every="1h", catch_up="all")
    write_declared(app)
    with engine.begin() as conn:
        earlier = f"- {span(engine, 36_000)}"
        conn.execute(
            text(f"UPDATE sqlq_schedules SET last_at = last_at {earlier}, next_at = next_at {earlier}")
        )
    assert len(schedules.tick(app.database).jobs) == 10
    assert look(app) == 4
    with pytest.raises(sqlq.EnqueueError, match="no limit of that name is declared"):
        app.schedule("others", task.new().set(limit="unknown"), every="1h")


# -- rates ---------------------------------------------------------------------------------------------------


def test_a_rate_that_is_raised_counts_from_the_last_start(app: sqlq.App) -> None:
    """And not from when the next would have been by the rate before, which may be tomorrow."""
    task = app.task(name="call", limit=sqlq.Limit("api", rate="1/1d"))(lambda: None)
    app.enqueue_many([task.new() for _ in range(5)])
    assert look(app) == 1
    assert look(app) == 0
    app.limits.set("api", rate="20/1s")
    (known,) = app.limits.list()
    assert known.next_start_seconds is not None
    assert known.next_start_seconds <= 0.15
    wait_until(lambda: look(app) > 0, what="the next one admitted")


def test_a_rate_that_a_deploy_raises_counts_at_once(app: sqlq.App) -> None:
    slow = app.task(name="slow", limit=sqlq.Limit("api", rate="1/1d"))(lambda: None)
    app.enqueue_many([slow.new() for _ in range(5)])
    assert look(app) == 1
    later = sqlq.App(app.database.engine.url.render_as_string(hide_password=False))
    quick = later.task(name="slow", limit=sqlq.Limit("api", rate="20/1s"))(lambda: None)
    later.enqueue(quick.new())
    later.close()
    wait_until(lambda: look(app) > 0, what="the next one admitted")


def test_a_rate_that_is_lowered_is_kept_at_once(app: sqlq.App) -> None:
    task = app.task(name="call", limit=sqlq.Limit("api", rate="1000/1s"))(lambda: None)
    app.enqueue_many([task.new() for _ in range(500)])
    assert look(app) > 50
    (before,) = app.limits.list()
    after = app.limits.set("api", rate="1/1h")
    assert before.next_start_seconds is not None
    assert after.next_start_seconds is not None
    assert after.next_start_seconds > timedelta(minutes=59).total_seconds()
    assert after.running == before.running
    assert look(app) == 0


def test_looks_at_an_exhausted_rate_leave_one_wake(app: sqlq.App) -> None:
    """Each sweep, and each enqueue, looks; a rate of one a day is used up all day long."""
    task = app.task(name="call", limit=sqlq.Limit("api", rate="1/1d"))(lambda: None)
    app.enqueue_many([task.new() for _ in range(3)])
    for _ in range(5):
        app.enqueue(task.new())
        look(app)
        admit.sweep(app.database, "")
    assert count(app.database.engine, "sqlq_wakes") == 1


@pytest.mark.parametrize("limit", [ONE, sqlq.Serial("api")], ids=["one", "serial"])
def test_an_expired_job_releases_its_slot(app: sqlq.App, engine: Engine, limit: Any) -> None:
    task = app.task(name="call", limit=limit)(lambda: None)
    late, then = app.enqueue(task.new().set(start_within="90s")), app.enqueue(task.new())
    execute(engine, f"UPDATE jobs SET start_by = created_at WHERE id = {late.id}")
    app.worker(drain=True).run()
    assert (state(app, late.id), state(app, then.id)) == ("cancelled", "finished")


# -- what ends a job without a worker ------------------------------------------------------------------------


def test_skipping_a_step_releases_its_slot(app: sqlq.App) -> None:
    task = app.task(name="call", limit=ONE)(lambda: None)
    flow = app.enqueue(sqlq.group(task.new()))
    then = app.enqueue(task.new())
    assert look(app) == 1
    app.flows.skip(flow.jobs[0].id)
    assert look(app) == 1
    assert state(app, then.id) == "available"


def test_skipping_a_failed_step_releases_its_serial_key(app: sqlq.App) -> None:
    task = app.task(name="book", limit=sqlq.Serial("account", on_failure="hold"))(lambda: None)
    flow = app.enqueue(sqlq.chain(task.new(), task.new()))
    assert look(app) == 1
    settle(app, claim(app), Failed("error", ErrorText("ValueError", "no")))
    other = app.enqueue(task.new())
    assert look(app) == 0, "the failed one holds the line"
    app.flows.skip(flow.jobs[0].id)
    assert look(app) == 1
    assert (state(app, flow.jobs[1].id), state(app, other.id)) == ("available", "blocked")


# -- queues that nobody serves -------------------------------------------------------------------------------


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
    left = app.enqueue(task.new().set(queue="soon gone"))
    then = app.enqueue(task.new())
    served_by(app, "one", ["default"])
    served_by(app, "two", ["soon gone"])
    assert look(app) == 1
    admit.sweep(app.database, "")
    assert state(app, left.id) == "available", "as long as one serves it"
    with app.database.begin() as conn:
        workers.leave(conn, "two")
    admit.sweep(app.database, "")
    assert (state(app, left.id), state(app, then.id)) == ("blocked", "available")


def test_all_queues_count_as_served_without_workers_or_with_one_for_all(app: sqlq.App) -> None:
    task = app.task(name="call", limit=sqlq.Limit("api", running=2))(lambda: None)
    app.enqueue(task.new().set(queue="mine"))
    assert look(app) == 1
    served_by(app, "one", ["other"])
    served_by(app, "all", None)
    app.enqueue(task.new().set(queue="mine"))
    assert look(app) == 1
    admit.sweep(app.database, "")
    assert {job.state for job in app.jobs.list()} == {"available"}


# -- rates ---------------------------------------------------------------------------------------------------


MOMENT = datetime(2030, 1, 1, tzinfo=UTC)
MS = timedelta(milliseconds=1)


def turn(rule: Rule, next_free_at: datetime | None = None) -> Grant:
    return Grant("api", rule, MOMENT, next_free_at, 1000)


@for_each(("rate", "period_ms"), [(100, 60_000), (7, 1_000), (3_000, 1_000), (1, 250)])
def test_starts_are_never_closer_than_the_rate(rate: int, period_ms: int) -> None:
    """Lot after lot, as wakes come: any window of one period has at most `rate` starts."""
    starts: list[datetime] = []
    moment, next_free_at = MOMENT, None
    for _ in range(200):
        lot = Grant("api", Rule(rate=rate, period_ms=period_ms), moment, next_free_at, 1000)
        lot.ids = list(range(lot.number))
        starts += [start for _, start in lot.starts() if start]
        next_free_at = lot.start(lot.number)
        (again,) = (wake.moment for wake in lot.again())
        assert again is not None
        moment = max(again, moment)
    period = timedelta(milliseconds=period_ms)
    assert starts == sorted(starts)
    for first, later in zip(starts, starts[rate:], strict=False):
        assert later - first >= period
    # and not much slower either: what is lost is less than a millisecond for each lot
    slowest = period * (len(starts) / rate) + MS * 200
    assert starts[-1] - starts[0] <= slowest


def test_no_start_is_granted_beyond_the_look_ahead() -> None:
    rule = Rule(rate=10, period_ms=1_000)
    assert turn(rule).number == 2  # now and in 100 ms
    assert turn(rule, MOMENT + 100 * MS).number == 1
    assert turn(rule, MOMENT + 101 * MS).number == 0
    assert turn(rule, MOMENT - timedelta(hours=1)).number == 2  # what was not used is not made up for


def test_a_rate_and_a_number_running_hold_together(app: sqlq.App) -> None:
    @app.task(name="call", limit=sqlq.Limit("api", running=3, rate="1000/1s"))
    def call() -> None: ...

    app.enqueue_many([call.new() for _ in range(50)])
    done = admit.look(app.database)
    assert done.number == 3
    assert admit.look(app.database, ["api"]).number == 0


def test_a_key_without_free_starts_has_a_next_wake(app: sqlq.App) -> None:
    @app.task(name="call", limit=sqlq.Limit("api", rate="20/1s"))
    def call() -> None: ...

    app.enqueue_many([call.new() for _ in range(9)])
    done = admit.look(app.database)
    assert done.number == 3  # at 0, 50 and 100 ms
    assert done.next_ms is not None
    assert done.next_ms <= 100  # half of what is granted ahead before the next is free


def test_workers_keep_a_rate(app: sqlq.App) -> None:
    @app.task(name="call", limit=sqlq.Limit("api", rate="50/1s"))
    def call(n: int) -> None: ...

    done = app.enqueue_many([call.new(n) for n in range(30)])
    worker = app.worker(concurrency=10)
    starts = run_until_finished(app, worker, [job.id for job in done])
    granted = sorted(starts)
    gaps = [later - earlier for earlier, later in pairwise(granted)]
    assert min(gaps) >= 20 * MS
    assert granted[-1] - granted[0] < timedelta(seconds=30)


def run_until_finished(app: sqlq.App, worker: Any, ids: list[int]) -> list[datetime]:
    """Run a worker until these jobs have finished; return when each was allowed to start."""
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(worker.run)
        wait_until(lambda: len(app.jobs.list(state="finished", limit=1000)) == len(ids), timeout=60)
        worker.stop()
        running.result(60)
    found = [app.jobs.get(id) for id in ids]
    for job in found:
        assert job.available_at is not None
        assert job.reserved_at is not None
        assert job.reserved_at >= job.available_at
    return [job.available_at for job in found if job.available_at is not None]


# -- serial keys ---------------------------------------------------------------------------------------------


class Books:
    """An App with accounts whose bookings are noted as they come."""

    def __init__(self, app: sqlq.App) -> None:
        self.app = app
        self.noted: list[tuple[Any, int]] = []
        self.broken: set[int] = set()
        self.once: set[int] = set()
        self.lock = threading.Lock()

    def task(self, **options: Any) -> sqlq.Task[..., None]:
        @self.app.task(name="book", **options)
        def book(account: str, n: int) -> None:
            with self.lock:
                self.noted.append((account, n))
            if n in self.broken:
                raise ValueError("broken")
            if n in self.once:
                self.once.discard(n)
                raise ValueError("not yet")

        return book

    def work(self, **options: Any) -> list[int]:
        before = len(self.noted)
        self.app.worker(drain=True, concurrency=6, **options).run()
        return [n for _, n in self.noted[before:]]

    def of(self, account: str) -> list[int]:
        return [n for name, n in self.noted if name == account]


@pytest.fixture
def books(app: sqlq.App) -> Books:
    return Books(app)


def test_jobs_of_a_key_run_in_the_order_of_their_ids(books: Books) -> None:
    book = books.task(limit=sqlq.Serial("account:{account}"))
    later = [book.new("a", n).set(priority=n) for n in range(8)]  # priorities do not change the order
    books.app.enqueue_many([*later, *(book.new("b", n) for n in range(8))])
    with ThreadPoolExecutor(2) as threads:
        for worker in [threads.submit(books.work) for _ in range(2)]:
            worker.result(60)
    assert books.of("a") == books.of("b") == list(range(8))


def test_later_jobs_wait_for_the_next_attempt(books: Books) -> None:
    book = books.task(limit=sqlq.Serial("account:{account}"), backoff="50ms")
    books.once = {1, 3}
    books.app.enqueue_many([book.new("a", n) for n in range(5)])
    with working(books.app, concurrency=5):
        wait_until(lambda: len(books.app.jobs.list(state="finished")) == 5)
    assert books.of("a") == [0, 1, 1, 2, 3, 3, 4]


def test_a_delayed_job_blocks_those_after_it(books: Books) -> None:
    book = books.task(limit=sqlq.Serial("account:{account}"))
    first = books.app.enqueue(book.new("a", 1).set(delay="1h"))
    books.app.enqueue(book.new("a", 2))
    assert books.work() == []
    books.app.jobs.cancel([first.id])
    assert books.work() == [2]


def test_the_next_job_runs_after_a_final_failure(books: Books) -> None:
    book = books.task(limit=sqlq.Serial("account:{account}"), max_attempts=1)
    books.broken = {1}
    books.app.enqueue_many([book.new("a", n) for n in range(3)])
    assert books.work() == [0, 1, 2]
    books.broken.clear()
    books.app.enqueue(book.new("a", 3))
    books.app.jobs.retry(all=True)  # whose id is the least again
    assert books.work() == [1, 3]


def test_a_failure_holds_the_key_until_it_is_retried(books: Books) -> None:
    book = books.task(limit=sqlq.Serial("account:{account}", on_failure="hold"), max_attempts=1)
    books.broken = {1}
    books.app.enqueue_many([book.new("a", n) for n in range(3)])
    books.app.enqueue(book.new("b", 7))
    assert sorted(books.work()) == [0, 1, 7]
    assert len(books.app.jobs.list(state="blocked")) == 1
    books.broken.clear()
    books.app.jobs.retry(all=True)
    assert books.work() == [1, 2]


def test_a_failure_holds_the_key_until_it_is_deleted(books: Books) -> None:
    book = books.task(limit=sqlq.Serial("account:{account}", on_failure="hold"), max_attempts=1)
    books.broken = {0}
    books.app.enqueue_many([book.new("a", n) for n in range(3)])
    assert books.work() == [0]
    books.app.jobs.delete(all=True)
    assert admit.look(books.app.database).number == 1
    assert books.work() == [1, 2]


def test_a_head_that_is_locked_is_not_overtaken(books: Books) -> None:
    book = books.task(limit=sqlq.Serial("account:{account}"))
    first, second = books.app.enqueue_many([book.new("a", n) for n in range(2)])
    admit.look(books.app.database, limit=0)
    if books.app.database.dialect.in_a_file:
        return  # nobody holds a row there while another writes
    with books.app.database.begin() as conn, ThreadPoolExecutor(1) as threads:
        conn.execute(text("SELECT 1 FROM jobs WHERE id = :id FOR UPDATE"), {"id": first.id})
        admitting = threads.submit(admit.look, books.app.database)
        wait_until(lambda: admitting.done() or waits(books.app))  # MariaDB refuses a locked row at once
        conn.commit()
        if refused := admitting.exception(60):
            assert "Lock wait timeout" in str(refused)
        else:
            assert admitting.result().number == 1
    assert admit.look(books.app.database).number == (1 if refused else 0)
    with books.app.database.begin() as conn:
        assert [job.id for job in claim_on(conn, limit=9, lease_ms=1000)] == [first.id]
    assert books.app.jobs.get(second.id).state == "blocked"


def waits(app: sqlq.App) -> bool:
    return bool(waiting_for_locks(app.database.engine))
