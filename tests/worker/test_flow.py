"""How a worker goes about its queues: order, fairness, share, stopping."""

from __future__ import annotations

import asyncio
import threading
import time
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, event, text

import sqlq
from sqlq.config.durations import milliseconds
from sqlq.store.jobs import operate
from sqlq.worker.maintain import services
from sqlq.worker.maintain.services import Prune
from sqlq.worker.options import OPTIONS
from sqlq.worker.wait import wake
from tests.kit import NOW, drain, execute, for_each, span, wait_until, working
from tests.kit.workers import listening


def test_jobs_start_by_priority_then_when_due_then_id(app: sqlq.App, engine: Engine) -> None:
    order: list[str] = []
    task = app.task(name="t")(order.append)
    soon = [task.new(f"p0-{i}") for i in range(5)]
    app.enqueue_many(
        [
            *soon,
            task.new("p9").set(priority=9),
            task.new("p-100").set(priority=-100),
            task.new("p100").set(priority=100),
        ]
    )
    early = app.enqueue(task.new("p0-early"))
    minute = span(engine, 60)
    execute(engine, f"UPDATE jobs SET available_at = available_at - {minute} WHERE id = :id", id=early.id)
    drain(app, concurrency=1)
    assert order == ["p100", "p9", "p0-early", *(f"p0-{i}" for i in range(5)), "p-100"]


def test_queues_are_served_in_the_order_given(app: sqlq.App) -> None:
    order: list[str] = []
    task = app.task(name="t")(order.append)
    app.enqueue_many(
        [
            task.new(q).set(queue=q, priority=p)
            for q, p in [("low", 100), ("high", 0), ("mid", 50)]
            for _ in range(3)
        ]
    )
    drain(app, queues=["high", "mid", "low"], concurrency=1)
    assert order == ["high"] * 3 + ["mid"] * 3 + ["low"] * 3


def test_only_the_queues_named_are_served(app: sqlq.App) -> None:
    task = app.task(name="t")(lambda: None)
    mine, other = app.enqueue(task.new().set(queue="mine")), app.enqueue(task.new().set(queue="other"))
    drain(app, queues=["mine"])
    assert (app.jobs.get(mine.id).state, app.jobs.get(other.id).state) == ("finished", "available")


def test_a_busy_queue_does_not_starve_a_quiet_one(app: sqlq.App) -> None:
    """Every queue has its turn: the quiet one's job comes long before the busy one is empty."""
    order: list[str] = []
    task = app.task(name="t")(order.append)
    app.enqueue_many([task.new("busy").set(queue="busy", priority=100) for _ in range(200)])
    app.enqueue(task.new("quiet").set(queue="quiet", priority=-100))
    drain(app, concurrency=2)
    assert order.index("quiet") < 100


def test_a_paused_queue_is_not_served(app: sqlq.App, engine: Engine) -> None:
    task = app.task(name="t")(lambda: None)
    held, free = app.enqueue(task.new().set(queue="held")), app.enqueue(task.new().set(queue="free"))
    now = NOW[engine.dialect.name]
    execute(engine, f"INSERT INTO sqlq_queues (queue, paused_at) VALUES ('held', {now})")
    drain(app)
    drain(app, queues=["held", "free"])
    assert (app.jobs.get(held.id).state, app.jobs.get(free.id).state) == ("available", "finished")


def test_no_more_than_the_slots_run_at_a_time(app: sqlq.App) -> None:
    lock, running, most = threading.Lock(), 0, 0

    def enter(by: int) -> None:
        nonlocal running, most
        with lock:
            running += by
            most = max(most, running)

    @app.task(name="sync")
    def sync() -> None:
        enter(1)
        threading.Event().wait(0.002)
        enter(-1)

    @app.task(name="async")
    async def asynchronous() -> None:
        enter(1)
        await asyncio.sleep(0.002)
        enter(-1)

    app.enqueue_many([task.new() for _ in range(60) for task in (sync, asynchronous)])
    assert drain(app, concurrency=3).finished == 120
    assert most == 3


def test_coroutines_run_side_by_side(app: sqlq.App) -> None:
    together = 5
    barrier = asyncio.Barrier(together)

    @app.task(name="t")
    async def meet() -> None:
        await asyncio.wait_for(barrier.wait(), 10)

    app.enqueue_many([meet.new() for _ in range(together)])
    assert drain(app, concurrency=together).finished == together


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_handler_does_not_see_the_context_of_the_worker(app: sqlq.App, kind: str) -> None:
    tenant: ContextVar[str] = ContextVar("tenant", default="nobody's")

    @app.task(name="def")
    def look() -> str:
        return tenant.get()

    @app.task(name="async def")
    async def alook() -> str:
        return tenant.get()

    job = app.enqueue(app.tasks[kind].new())
    tenant.set("the caller's")
    assert drain(app).finished == 1
    assert app.result(job) == "nobody's"


def test_maintenance_finds_nothing_of_the_context_that_the_worker_was_run_in(app: sqlq.App) -> None:
    tenant: ContextVar[str] = ContextVar("tenant", default="nobody's")
    found: dict[str, str] = {}

    def executing(*given: Any) -> None:
        found[threading.current_thread().name] = tenant.get()

    tenant.set("the caller's")
    event.listen(Engine, "before_cursor_execute", executing)
    try:
        drain(app)
    finally:
        event.remove(Engine, "before_cursor_execute", executing)
    assert found["sqlq-maintenance"] == "nobody's"


def test_the_context_of_a_coroutine_does_not_reach_the_next_job(app: sqlq.App) -> None:
    setting: ContextVar[str] = ContextVar("setting", default="unset")
    seen: list[str] = []

    @app.task(name="sets")
    async def sets() -> None:
        seen.append(setting.get())
        setting.set("left behind")

    app.enqueue_many([sets.new()] * 5)
    app.worker(drain=True, concurrency=1).run()
    assert seen == ["unset"] * 5


def test_a_cancelled_coroutine_affects_no_other_job(app: sqlq.App) -> None:
    """Each has an asyncio task of its own: a cancel that comes too late ends with it."""
    ran: list[int] = []

    @app.task(name="cancels_itself", max_attempts=1)
    async def cancels_itself(number: int) -> None:
        ran.append(number)
        task = asyncio.current_task()
        assert task is not None
        task.cancel()

    app.enqueue_many([cancels_itself.new(number) for number in range(5)])
    counts = app.worker(drain=True, concurrency=1).run()
    assert ran == [0, 1, 2, 3, 4]
    assert counts.finished == 5


def test_a_second_worker_finds_its_share(app: sqlq.App, database_url: str) -> None:
    """A worker does not hold jobs without a slot: with long jobs, no more are reserved than run."""
    release = threading.Event()
    task = app.task(name="t")(lambda: release.wait(30))
    app.enqueue_many([task.new() for _ in range(10)])
    with working(app, concurrency=5):
        wait_until(lambda: len(app.jobs.list(state="running")) == 5, what="one worker's slots being full")
        assert len(app.jobs.list(state="available")) == 5
        other = sqlq.App(database_url)
        other.task(name="t")(lambda: release.wait(30))
        with working(other, concurrency=5):
            wait_until(
                lambda: len(app.jobs.list(state="running")) == 10, what="the second worker taking its share"
            )
            release.set()
            wait_until(lambda: len(app.jobs.list(state="finished")) == 10, what="all jobs finished")
        other.close()


def test_a_busy_worker_releases_jobs_that_it_cannot_start(app: sqlq.App) -> None:
    """After a run of short jobs a worker claims ahead. When the jobs turn long it releases some."""
    release = threading.Event()
    quick = app.task(name="quick")(lambda: None)
    slow = app.task(name="slow")(lambda: release.wait(120))
    app.enqueue_many([quick.new() for _ in range(1_000)] + [slow.new() for _ in range(300)])
    with working(app, concurrency=2):
        wait_until(
            lambda: len(app.jobs.list(state="finished", limit=2_000)) == 1_000,
            timeout=120,
            what="the quick jobs finished",
        )
        wait_until(
            lambda: len(app.jobs.list(state="running", limit=2_000)) == 2, what="only what runs being held"
        )
        given_back = [job for job in app.jobs.list(state="available", limit=2_000) if job.releases]
        assert all(job.attempts == 0 for job in given_back)
        release.set()
        wait_until(
            lambda: len(app.jobs.list(state="finished", limit=2_000)) == 1_300,
            timeout=120,
            what="all jobs finished",
        )


def test_a_resting_worker_releases_jobs_that_it_cannot_start(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It held all jobs there were, found no more, and rested: nothing called it."""
    monkeypatch.setitem(OPTIONS, "ahead", OPTIONS["ahead"]._replace(check=milliseconds))
    release = threading.Event()
    quick = app.task(name="quick")(lambda: None)
    slow = app.task(name="slow")(lambda: release.wait(120))
    app.enqueue_many([quick.new() for _ in range(300)] + [slow.new() for _ in range(10)])
    with working(app, concurrency=2, ahead="60s"):
        wait_until(
            lambda: len(app.jobs.list(state="running", limit=400)) == 10, what="all of them being held"
        )
        wait_until(lambda: len(app.jobs.list(state="running")) == 2, what="only what runs being held")
        release.set()
        wait_until(lambda: len(app.jobs.list(state="finished", limit=400)) == 310, what="all jobs finished")


def test_stopping_lets_running_jobs_finish(app: sqlq.App) -> None:
    began, release = threading.Event(), threading.Event()

    @app.task(name="t")
    def slow() -> None:
        began.set()
        release.wait(30)

    first, second = app.enqueue_many([slow.new(), slow.new()])
    worker = app.worker(concurrency=1)
    thread = threading.Thread(target=worker.run)
    thread.start()
    assert began.wait(10)
    worker.stop()
    release.set()
    thread.join(10)
    assert not thread.is_alive()
    assert app.jobs.get(first.id).state == "finished"
    assert (app.jobs.get(second.id).state, app.jobs.get(second.id).attempts) == ("available", 0)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_job_that_outlasts_the_grace_time_is_released_uncounted(
    app: sqlq.App, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not asynchronous:
        monkeypatch.setattr("sqlq.worker.run.executor.CANCELLED_SECONDS", 0.1)
    release, began = threading.Event(), threading.Event()

    async def sleeps() -> None:
        began.set()
        await asyncio.Event().wait()

    def waits() -> None:
        began.set()
        release.wait(30)

    task = app.task(name="t")(sleeps if asynchronous else waits)
    job = app.enqueue(task.new())
    worker = app.worker(grace="0s")
    thread = threading.Thread(target=worker.run)
    thread.start()
    assert began.wait(10)
    worker.stop()
    thread.join(10)
    assert not thread.is_alive()
    row = app.jobs.get(job.id)
    assert (row.state, row.attempts, row.releases) == ("available", 0, 1)
    assert worker.left_running is not asynchronous
    release.set()


def test_a_job_that_completed_itself_is_finished_after_the_grace_time(app: sqlq.App, engine: Engine) -> None:
    release, completed = threading.Event(), threading.Event()

    @app.task(name="t")
    def completes() -> None:
        with sqlq.current_job().completing(engine, "done"):
            pass
        completed.set()
        release.wait(30)

    told = listening(app)
    job = app.enqueue(completes.new())
    worker = app.worker(grace="0s")
    thread = threading.Thread(target=worker.run)
    thread.start()
    assert completed.wait(10)
    worker.stop()
    thread.join(20)
    assert not thread.is_alive()
    release.set()
    assert (app.jobs.get(job.id).result, worker.counts.finished) == ("done", 1)
    assert [event.name for event in told] == ["started", "finished"]


def test_the_second_stop_leaves_at_once(app: sqlq.App) -> None:
    began, release = threading.Event(), threading.Event()

    @app.task(name="t")
    def slow() -> None:
        began.set()
        release.wait(30)

    job = app.enqueue(slow.new())
    worker = app.worker(grace="1h")
    thread = threading.Thread(target=worker.run)
    thread.start()
    assert began.wait(10), "what is claimed and has not begun is given back"
    worker.stop()
    worker.stop()
    thread.join(5)
    assert not thread.is_alive()
    assert app.jobs.get(job.id).state == "running", "whoever rescues it takes over"
    release.set()


@pytest.mark.parametrize("most", [7, 700])
def test_max_jobs(app: sqlq.App, most: int) -> None:
    task = app.task(name="t")(lambda: None)
    app.enqueue_many([task.new() for _ in range(1_000)])
    assert app.worker(max_jobs=most).run().finished == most
    assert len(app.jobs.list(state="available", limit=2_000)) == 1_000 - most


def test_a_worker_registers_itself_and_leaves(app: sqlq.App, engine: Engine) -> None:
    def entered() -> list[Any]:
        with engine.connect() as conn:
            return list(conn.execute(text("SELECT pid, queues, concurrency FROM sqlq_workers")))

    with engine.connect() as conn:
        assert not list(conn.execute(text("SELECT 1 FROM sqlq_workers")))
    worker = app.worker(["mail"], concurrency=4)
    thread = threading.Thread(target=worker.run)
    thread.start()
    wait_until(entered, what="the worker being entered")
    assert entered()[0][1:] == ('["mail"]', 4)
    worker.stop()
    thread.join(10)
    assert entered() == []


def test_a_worker_refuses_an_unmigrated_database(empty_database_url: str) -> None:
    app = sqlq.App(empty_database_url)
    with pytest.raises((sqlq.errors.SchemaVersionError, sqlq.errors.ConfigurationError), match="migrate"):
        app.worker().run()
    app.close()


@for_each(
    ("options", "message"),
    [
        ({"queues": "mail"}, "give a list"),
        ({"queues": []}, "at least one queue"),
        ({"queues": [""]}, "not blank"),
        ({"concurrency": 0}, "from 1 to 1,000"),
        ({"lease": "1ms"}, "between 1 s and 24 h"),
        ({"lease": "soon"}, "30s"),
        ({"grace": 5}, "timedelta"),
        ({"max_jobs": 0}, "from 1 to"),
    ],
)
def test_bad_options_are_reported_in_one_sentence(
    app: sqlq.App, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(sqlq.errors.ConfigurationError, match=message):
        app.worker(**options)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a worker look again only when it is notified."""
    for name in ("FIRST_LOOK_SECONDS", "LOOK_AFTER_HINT_SECONDS", "POLL_SECONDS"):
        monkeypatch.setattr(wake, name, 3600.0)


@pytest.mark.usefixtures("patient")
def test_an_idle_worker_starts_a_new_job_before_its_next_poll(app: sqlq.App, engine: Engine) -> None:
    """A transaction of the caller's own notifies: on PostgreSQL by NOTIFY, on SQLite by data_version."""
    started: list[int] = []
    task = app.task(name="t")(started.append)
    with working(app):
        app.enqueue(task.new(0))
        wait_until(lambda: started == [0], what="the worker being at work")
        with engine.connect() as conn:
            app.enqueue(task.new(1), session=conn)
            conn.commit()
        wait_until(lambda: started == [0, 1], timeout=5, what="the job started by a hint")


@pytest.mark.usefixtures("patient")
def test_an_idle_worker_starts_a_delayed_job_when_it_is_due(app: sqlq.App, engine: Engine) -> None:
    """It looks once, when the notification comes, and reads when the job is due."""
    started: list[tuple[int, float]] = []
    task = app.task(name="t")(lambda number: started.append((number, time.time())))
    with working(app, queues=["default"]) as worker:
        app.enqueue(task.new(0))
        wait_until(lambda: bool(started), what="the worker being at work")
        due = datetime.now(UTC) + timedelta(seconds=1)
        with engine.connect() as conn:
            app.enqueue(task.new(2).set(delay="1h"), session=conn)
            app.enqueue(task.new(1).set(available_at=due, priority=-5), session=conn)
            conn.commit()

        def knows() -> bool:
            worker._wake.call()  # the notification may have come before the commit was visible
            return bool(worker._claimer.next_due < time.monotonic() + 60) or len(started) == 2

        wait_until(knows, what="the worker knowing when the next job is due")
        wait_until(lambda: len(started) == 2, timeout=20, what="the delayed job started")
    number, at = started[1]
    assert number == 1
    assert at >= due.timestamp() - 0.002, "not before it was due"


def test_finished_jobs_past_their_retention_are_pruned(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "SEEN_MS", 1)
    app = sqlq.App(database_url, retention="1ms")
    task = app.task(name="t")(lambda: None)
    app.enqueue_many([task.new() for _ in range(5)])
    drain(app)
    prune = Prune(app.database, retention_ms=1)

    def pruned() -> bool:
        prune.run()
        return not app.jobs.list()

    wait_until(pruned, what="the finished jobs gone")
    app.close()


def test_a_job_that_has_just_ended_is_not_pruned(database_url: str) -> None:
    app = sqlq.App(database_url, retention="0s")
    app.enqueue(app.task(name="t")(lambda: None).new())
    drain(app)
    prune = Prune(app.database, retention_ms=0)
    prune.run()
    prune.run()
    assert [job.state for job in app.jobs.list()] == ["finished"]
    app.close()


def test_jobs_with_their_own_retention_are_kept(database_url: str, engine: Engine) -> None:
    app = sqlq.App(database_url, retention="0s")
    task = app.task(name="t")(lambda: None)
    lasting = app.task(name="lasting", retention="1h")(lambda: None)

    @app.task(name="completing")
    def completing() -> None:
        with engine.begin() as conn:
            sqlq.current_job().complete(conn)

    with engine.begin() as conn:
        by_sql = conn.execute(text("INSERT INTO jobs (task) VALUES ('lasting') RETURNING id")).scalar_one()
    kept = [app.enqueue(task.new().set(retention="1h")).id, app.enqueue(lasting.new()).id]
    kept += [by_sql, app.enqueue(completing.new().set(retention="forever")).id]
    app.enqueue_many([task.new(), completing.new()])
    drain(app)
    with app.database.begin() as conn:
        assert operate.prune(conn, older_than_ms=0, limit=9) == 2
        assert operate.prune_expired(conn, limit=9) == 0
    assert sorted(job.id for job in app.jobs.list()) == sorted(kept)
    app.close()
