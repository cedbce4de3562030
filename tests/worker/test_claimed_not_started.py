"""A claimed job that has not started is distinguished from one that runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Engine, event, text

import sqlq
from sqlq.admin.doctor import doctor, queue
from sqlq.model.job import ClaimedJob
from sqlq.store.workers import workers
from sqlq.worker.attempt.attempt import Attempt
from sqlq.worker.maintain import services
from sqlq.worker.maintain.services import Held
from tests.kit import for_each, working
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a worker look each fifth of a second for what it holds."""
    monkeypatch.setattr(services, "HELD_SECONDS", 0.2)
    monkeypatch.setattr(services, "HELD_BUSY_SECONDS", 0.2)
    monkeypatch.setattr(services, "HELD_IDLE_SECONDS", 0.2)


@contextmanager
def blocked(app: sqlq.App) -> Iterator[tuple[int, int, threading.Event]]:
    """A worker whose event loop one handler blocks, while it holds another; their ids, and what lets it
    go."""
    started, go_on = threading.Event(), threading.Event()

    @app.task(name="blocks")
    async def blocks() -> None:
        started.set()
        go_on.wait(60)

    @app.task(name="waits")
    async def waits() -> None: ...

    first = app.enqueue(blocks.new()).id
    with working(app, concurrency=2):
        try:
            assert started.wait(60)
            second = app.enqueue(waits.new()).id
            wait_until(
                lambda: app.jobs.get(second).started is False, what="the job is known not to have started"
            )
            yield first, second, go_on
        finally:
            go_on.set()
        wait_until(lambda: app.jobs.get(second).state == "finished")
        assert app.jobs.get(second).started is None


def noted(engine: Engine) -> list[str | None]:
    with engine.connect() as conn:
        return list(conn.scalars(text("SELECT held_jobs FROM sqlq_workers")))


def test_a_job_that_waits_behind_a_blocked_loop_does_not_run(app: sqlq.App, engine: Engine) -> None:
    with blocked(app) as (first, second, _):
        runs, held = app.jobs.get(first), app.jobs.get(second)
        assert (runs.state, runs.started, runs.history[-1].outcome) == ("running", True, "running")
        assert (held.state, held.started, held.history[-1].outcome) == ("running", False, "claimed")
        assert [(job.id, job.started) for job in app.jobs.list()] == [(second, False), (first, True)]
        (worker,) = app.workers.list()
        assert {job.id: job.started for job in worker.jobs} == {first: True, second: False}
        assert noted(engine) == [f"[{second}]"]


def test_the_doctor_names_a_worker_that_holds_jobs_for_long(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    with blocked(app):

        def said() -> list[str]:
            found = doctor.Doctor(app.database).examine()
            return [each.said for each in found if "without starting" in each.said]

        assert said() == [], "not for a moment"
        monkeypatch.setattr(queue, "LONG_HELD_S", 0.0)
        (line,) = said()
        assert "has held 1 job for over" in line


def test_a_workers_row_drops_jobs_that_it_no_longer_holds(app: sqlq.App, engine: Engine) -> None:
    with blocked(app) as (_, _, go_on):
        assert noted(engine) != [None]
        go_on.set()
        wait_until(lambda: noted(engine) == [None], what="the worker's row names no job")


def test_a_worker_writes_no_held_jobs_while_jobs_start(app: sqlq.App, engine: Engine) -> None:
    statements: list[str] = []

    def collect(conn: Any, cursor: Any, statement: str, *_: Any) -> None:
        statements.append(statement)

    with app.database.begin() as conn:
        workers.register(conn, id="w", host="box", pid=7, version="1", queues=None, concurrency=2)
    event.listen(app.database.engine, "before_cursor_execute", collect)
    found: list[Any] = []
    held = Held(app.database, "w", lambda before: found, lambda jobs: 0)
    for _ in range(3):
        assert held.run() == services.HELD_BUSY_SECONDS
    assert statements == []
    found.append(Attempt(ClaimedJob(7, 1, "q", "t", "{}", 1, 5), None, 0.0))
    for _ in range(3):
        held.run()
    assert len([each for each in statements if each.startswith("UPDATE")]) == 1
    assert noted(engine) == ["[7]"]


@for_each("written", ["no json", "7", '{"a": 1}', '["x", null]', ""])
def test_a_foreign_value_in_a_workers_row_names_no_job(written: str) -> None:
    assert workers.held_in(written) == []
