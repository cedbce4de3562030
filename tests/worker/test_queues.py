"""How a worker goes about its queues: order, fairness, share, services, stopping, single starts."""

from __future__ import annotations

import asyncio
import threading
from contextlib import closing
from contextvars import ContextVar
from typing import Any

import pytest
from sqlalchemy import Engine

import sqlq
from sqlq.config.durations import milliseconds
from sqlq.worker.maintain import services
from sqlq.worker.maintain.services import Prune
from sqlq.worker.options import OPTIONS
from sqlq.worker.settle.settle import Counts
from sqlq.worker.wait import wake
from sqlq.worker.worker import Worker
from tests.kit import drain, execute, handler_of, needs, span, wait_until, worker_of, working
from tests.kit.isolated import DEAF, Spawned
from tests.kit.workers import listening


def test_jobs_start_by_priority_then_when_due_then_id(app: sqlq.App, engine: Engine) -> None:
    """And queues are served in the order given, before that."""
    order: list[str] = []
    task = app.task(name="t")(order.append)
    soon = [task.new(f"p0-{i}") for i in range(5)]
    app.enqueue_many([*soon, *(task.new(f"p{n}").set(priority=n) for n in (9, -100, 100))])
    early = app.enqueue(task.new("p0-early"))
    minute = span(engine, 60)
    execute(engine, f"UPDATE jobs SET available_at = available_at - {minute} WHERE id = :id", id=early.id)
    for queue, priority in (("low", 100), ("high", 0), ("mid", 50)):
        app.enqueue_many([task.new(queue).set(queue=queue, priority=priority) for _ in range(3)])
    drain(app, queues=["high", "default", "mid", "low"], concurrency=1)
    by_priority = ["p100", "p9", "p0-early", *(f"p0-{i}" for i in range(5)), "p-100"]
    assert order == ["high"] * 3 + by_priority + ["mid"] * 3 + ["low"] * 3


def test_a_busy_queue_does_not_starve_a_quiet_one(app: sqlq.App) -> None:
    """Every queue has its turn: the quiet one's job comes long before the busy one is empty."""
    order: list[str] = []
    task = app.task(name="t")(order.append)
    app.enqueue_many([task.new("busy").set(queue="busy", priority=100) for _ in range(200)])
    app.enqueue(task.new("quiet").set(queue="quiet", priority=-100))
    drain(app, concurrency=2)
    assert order.index("quiet") < 100


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_handler_has_a_context_of_its_own(app: sqlq.App, kind: str) -> None:
    """It is not that of the worker's caller, nor that of the coroutine before."""
    setting: ContextVar[str] = ContextVar("setting", default="unset")
    seen: list[str] = []

    def sets() -> None:
        seen.append(setting.get())
        if kind == "async def":
            setting.set("left behind")

    app.enqueue_many([app.task(name="t")(handler_of(kind, sets)).new()] * 5)
    setting.set("the caller's")
    assert drain(app, concurrency=1).finished == 5
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
    assert (drain(app, concurrency=1).finished, ran) == (5, [0, 1, 2, 3, 4])


def wait_for(app: sqlq.App, number: int, state: str) -> None:
    wait_until(lambda: len(app.jobs.list(state=state, limit=2_000)) == number, what=f"{number} {state} jobs")


def test_a_second_worker_finds_its_share(app: sqlq.App, database_url: str) -> None:
    """A worker does not hold jobs without a slot: with long jobs, no more are reserved than run."""
    release = threading.Event()
    other = sqlq.App(database_url)
    for each in (app, other):
        each.task(name="t")(lambda: release.wait(30))
    app.enqueue_many([app.tasks["t"].new() for _ in range(10)])
    with working(app, concurrency=5):
        wait_for(app, 5, "running")
        wait_for(app, 5, "available")
        with working(other, concurrency=5):
            wait_for(app, 10, "running")
            release.set()
            wait_for(app, 10, "finished")
    other.close()


@pytest.fixture
def release(app: sqlq.App) -> threading.Event:
    """The event for which the task `slow` waits; `quick` waits for nothing."""
    release = threading.Event()
    app.task(name="quick")(lambda: None)
    app.task(name="slow")(lambda: release.wait(120))
    return release


def test_a_busy_worker_releases_jobs_that_it_cannot_start(app: sqlq.App, release: threading.Event) -> None:
    """After a run of short jobs a worker claims ahead. When the jobs turn long it releases some."""
    app.enqueue_many([app.tasks["quick"].new()] * 1_000 + [app.tasks["slow"].new()] * 300)
    with working(app, concurrency=2):
        wait_for(app, 1_000, "finished")
        wait_for(app, 2, "running")
        given_back = [job for job in app.jobs.list(state="available", limit=2_000) if job.releases]
        assert all(job.attempts == 0 for job in given_back)
        release.set()
        wait_for(app, 1_300, "finished")


def test_a_resting_worker_releases_jobs_that_it_cannot_start(
    app: sqlq.App, release: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It held all jobs there were, found no more, and rested: nothing called it."""
    monkeypatch.setitem(OPTIONS, "ahead", OPTIONS["ahead"]._replace(check=milliseconds))
    app.enqueue_many([app.tasks["quick"].new()] * 300 + [app.tasks["slow"].new()] * 10)
    with working(app, concurrency=2, ahead="60s"):
        wait_for(app, 10, "running")
        wait_for(app, 2, "running")
        release.set()
        wait_for(app, 310, "finished")


def test_a_job_that_completed_itself_is_finished_after_the_grace_time(app: sqlq.App, engine: Engine) -> None:
    release, completed = threading.Event(), threading.Event()

    def completes() -> None:
        with sqlq.current_job().completing(engine, "done"):
            pass
        completed.set()
        release.wait(30)

    told = listening(app)
    job = app.enqueue(app.task(name="t")(completes).new())
    with app.worker(grace="0s") as worker:
        assert completed.wait(10)
    release.set()
    assert (app.jobs.get(job.id).result, worker.counts.finished) == ("done", 1)
    assert [event.name for event in told] == ["started", "finished"]


def test_an_idle_worker_starts_a_new_job_before_its_next_poll(
    app: sqlq.App, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transaction of the caller's own notifies: on PostgreSQL by NOTIFY, on SQLite by data_version."""
    for name in ("FIRST_LOOK_SECONDS", "LOOK_AFTER_HINT_SECONDS", "POLL_SECONDS"):
        monkeypatch.setattr(wake, name, 3600.0)
    started: list[int] = []
    task = app.task(name="t")(started.append)
    with working(app):
        app.enqueue(task.new(0))
        wait_until(lambda: started == [0], what="the worker being at work")
        with engine.connect() as conn:
            app.enqueue(task.new(1), session=conn)
            conn.commit()
        wait_until(lambda: started == [0, 1], timeout=5, what="the job started by a hint")


def test_finished_jobs_past_their_retention_are_pruned(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    app.enqueue_many([app.task(name="t")(lambda: None).new()] * 5)
    drain(app)
    prune = Prune(app.database, retention_ms=0)
    prune.run()
    prune.run()
    assert len(app.jobs.list(state="finished")) == 5, "who waits for one sees its end"
    assert services.SEEN_MS / 1000 + (2 - services.MIN_RHYTHM_SHARE) * services.PRUNE_SECONDS < 60
    monkeypatch.setattr(services, "SEEN_MS", 1)

    def pruned() -> bool:
        prune.run()
        return not app.jobs.list()

    wait_until(pruned, what="the finished jobs gone")


def test_a_worker_of_a_service_leaves_the_jobs_of_another_one(app: sqlq.App) -> None:
    with (
        closing(sqlq.App(app.database.engine.url, service="shop")) as shop,
        closing(sqlq.App(app.database.engine.url, service="billing")) as billing,
    ):
        shop.enqueue_many([shop.task(name="send")(lambda: None).new()] * 5)
        charges = billing.enqueue_many([billing.task(name="charge")(lambda: None).new()] * 5)
        assert drain(shop) == drain(billing) == Counts(finished=5)
    assert {app.jobs.get(job.id).releases for job in charges} == {0}
    assert {job.queue for job in app.jobs.list(state="finished")} == {"shop", "billing"}


def test_a_worker_of_a_service_serves_the_queues_that_its_app_names(database_url: str) -> None:
    with closing(sqlq.App(database_url, service="shop", queues={"bulk": {"timeout": "1m"}})) as app:
        send = app.task(name="send", queue="mail")(lambda: None)
        plain = app.task(name="plain")(lambda: None)
        new = send.new()
        jobs = app.enqueue_many([new, new.set(queue="bulk"), plain.new(), new.set(queue="elsewhere")])
        assert app.jobs.get(jobs[2].id).queue == "shop"
        assert drain(app).finished == 3
        assert app.jobs.get(jobs[3].id).state == "available"
        assert drain(app, queues=["elsewhere"]).finished == 1
    with closing(sqlq.App(database_url, service="shop", defaults={"queue": "jobs-of-shop"})) as named:
        job = named.enqueue(named.task(name="t")(lambda: None).new())
        assert (job.queue, drain(named).finished) == ("jobs-of-shop", 1)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a worker that stops wait half as long for handlers that do not end."""
    monkeypatch.setattr("sqlq.worker.run.executor.CANCELLED_SECONDS", 0.5)


class Charge:
    """A handler that outlasts the grace time, in each of the ways it may do so."""

    def __init__(self) -> None:
        self.began, self.goes_on = threading.Event(), threading.Event()
        self.starts = 0

    def _begin(self) -> None:
        self.starts += 1
        self.began.set()

    async def is_cancelled(self) -> None:
        self._begin()
        await asyncio.Event().wait()

    def goes_on_in_its_thread(self) -> None:
        self._begin()
        self.goes_on.wait(30)

    def looks_and_returns(self) -> None:
        self._begin()
        wait_until(lambda: sqlq.current_job().should_stop(), what="it being asked to stop")


def outlast(app: sqlq.App, charge: Charge, **options: Any) -> Worker:
    """Run a worker until the handler has begun, and stop it without a grace time."""
    with app.worker(grace="0s", **options) as worker:
        assert charge.began.wait(30)
    return worker


HANDLERS = ["is_cancelled", "goes_on_in_its_thread", "looks_and_returns"]


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("handler", HANDLERS)
def test_a_job_that_outlasts_the_grace_time_is_released_uncounted(
    app: sqlq.App, engine: Engine, handler: str
) -> None:
    """Also in the last of its attempts."""
    charge = Charge()
    job = app.enqueue(app.task(name="t", max_attempts=2)(getattr(charge, handler)).new())
    execute(engine, "UPDATE jobs SET attempts = 1")
    told = listening(app)
    worker = outlast(app, charge)
    assert worker.left_running is (handler == "goes_on_in_its_thread")
    charge.goes_on.set()
    row = app.jobs.get(job.id)
    assert (row.state, row.attempts, row.releases) == ("available", 1, 1)
    assert [event.name for event in told] == ["started", "released"]


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(("handler", "by_sql"), [*((each, False) for each in HANDLERS), (HANDLERS[0], True)])
def test_a_job_with_one_attempt_fails_when_it_outlasts_the_grace_time(
    app: sqlq.App, engine: Engine, handler: str, by_sql: bool
) -> None:
    charge = Charge()
    alarm = app.task(name="alarm", queue="ops")(lambda ended: None)
    given: dict[str, Any] = {} if by_sql else {"max_attempts": 1}
    task = app.task(name="t", on_failure=alarm, **given)(getattr(charge, handler))
    if by_sql:
        columns = "(queue, task, payload, max_attempts)"
        execute(engine, f"INSERT INTO jobs {columns} VALUES ('default', 't', '{{}}', 1)")
    else:
        app.enqueue(task.new())
    worker = outlast(app, charge, queues=["default"])
    charge.goes_on.set()
    (failed,) = app.jobs.list(state="failed")
    assert (failed.reason, failed.attempts, failed.releases) == ("worker_lost", 1, 0)
    assert failed.error is not None
    assert "it starts only once" in failed.error
    assert worker.counts == Counts(failed=1)
    assert [job.task for job in app.jobs.list(state="available")] == ["alarm"]
    assert app.worker(drain=True, queues=["default"]).run() == Counts()
    assert charge.starts == 1


@needs("cheap")
def test_a_process_of_its_own_that_is_killed_at_a_stop_ran_once(app: sqlq.App) -> None:
    with closing((spawned := Spawned(DEAF)).isolates):
        job = app.enqueue(app.task(name="t", isolate=True, max_attempts=1)(lambda: None).new())
        told = listening(app)
        with worker_of(app, isolates=spawned.isolates, grace="0s") as worker:
            wait_until(lambda: told, what="it has started")
        assert (app.jobs.get(job.id).state, app.jobs.get(job.id).reason) == ("failed", "worker_lost")
        assert worker.counts == Counts(failed=1)
