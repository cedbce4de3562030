"""Rows inserted by plain SQL take missing options from their task when they are claimed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import Engine, text

import sqlq
from sqlq.store.jobs import settle
from sqlq.worker.claim.claimer import Claimer
from sqlq.worker.options import WorkerOptions
from tests.faults import guard
from tests.kit import drain, execute

pytestmark = pytest.mark.each_database


@pytest.fixture(autouse=True)
def guarded(engine: Engine) -> None:
    guard.install(engine, owners_may_be_known_dead=True)


def insert(engine: Engine, **columns: Any) -> int:
    names, values = ", ".join(columns), ", ".join(f":{name}" for name in columns)
    return int(execute(engine, f"INSERT INTO jobs ({names}) VALUES ({values}) RETURNING id", **columns))


def shown(engine: Engine, id: int) -> Any:
    with engine.connect() as conn:
        query = text("SELECT state, attempts, max_attempts FROM job_states WHERE id = :id")
        return conn.execute(query, {"id": id}).one()


def test_a_row_takes_timeout_and_attempts_from_its_task(app: sqlq.App, engine: Engine) -> None:
    """Unless it has its own, of which a timeout of zero is none."""

    @app.task(name="t", timeout="100ms", max_attempts=1, aliases=["was.t"])
    async def slow(ends: bool = False) -> bool:
        await (asyncio.sleep(0.2) if ends else asyncio.Event().wait())
        return sqlq.current_job().should_stop()

    for name in ("t", "was.t"):
        job = insert(engine, task=name)
        assert tuple(shown(engine, job)) == ("available", 0, None)
        assert app.jobs.list()[0].max_attempts is None
        assert (app.jobs.get(job).max_attempts, app.jobs.get(job).timeout_ms) == (1, 100), "what applies"
        assert drain(app).failed == 1
        assert tuple(shown(engine, job)) == ("failed", 1, 1)
        done = app.jobs.get(job)
        assert (done.reason, done.max_attempts) == ("timeout", 1)
        assert "longer than its timeout of 100 ms" in str(done.message)
    own = {"task": "t", "payload": '{"kwargs": {"ends": true}}'}
    ids = [insert(engine, **own, timeout_ms=timeout_ms) for timeout_ms in (0, 60_000)]
    assert drain(app).finished == 2
    assert [app.jobs.get(id).result for id in ids] == [False, False]


def test_a_row_takes_headers_backoff_and_retention_from_its_task(
    app: sqlq.App, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """An unreadable backoff, too, is that of the task."""
    seen: list[Any] = []

    @app.task(name="t", headers={"a": "task"}, backoff="1h", retention="2h", max_attempts=2)
    def fails() -> None:
        seen.append(dict(sqlq.current_job().headers))
        sqlq.current_job().progress(1)
        raise ValueError("no")

    plain, unreadable = insert(engine, task="t"), insert(engine, task="t", backoff="soon")
    drain(app)
    own = insert(engine, task="t", headers='{"b":"row"}', backoff='"0s"', retention_ms=60_000, max_attempts=3)
    drain(app)
    assert seen == [{"a": "task"}, {"a": "task"}, *[{"b": "row"}] * 3]
    assert app.jobs.get(unreadable).state == "scheduled"
    assert "the backoff 'soon' in its row cannot be read" in caplog.text
    assert (app.jobs.get(plain).state, app.jobs.get(plain).retention_ms) == ("scheduled", 7_200_000)
    assert (app.jobs.get(own).state, app.jobs.get(own).retention_ms) == ("failed", 60_000)


def test_a_rescue_counts_attempts_by_the_tasks_option(app: sqlq.App, engine: Engine) -> None:
    """The rescuer knows no tasks: an operator's command, or a supervisor."""
    app.task(name="once", max_attempts=1)(lambda: None)
    app.task(name="twice", max_attempts=2)(lambda: None)
    ids = [insert(engine, task=name) for name in ("once", "twice", "nobody.knows")]
    database = app.database.for_loops
    claimer = Claimer(database, "dead", WorkerOptions(("default",), 3, 30_000), tasks=app.tasks)
    assert [job.max_attempts for job in claimer.claim(3)] == [1, 2, 5]
    guard.advance(engine, 60_000)
    with app.database.begin() as conn:
        rescued = {lost.id: lost.failed for lost in settle.rescue(conn)}
    assert rescued == dict(zip(ids, (True, False, False), strict=True))
    expected = [("failed", 1, 1), ("available", 1, 2), ("available", 1, None)]
    assert [tuple(shown(engine, id)) for id in ids] == expected
    assert app.jobs.get(ids[0]).reason == "worker_lost"


def test_odd_names_find_their_tasks_though_these_are_added_later(app: sqlq.App, engine: Engine) -> None:
    claimer = Claimer(app.database.for_loops, "me", WorkerOptions(("default",), 99, 30_000), tasks=app.tasks)
    names = ["it's", 'a "b" c', "a\\b", "$.a[0]", "%s %(x)s", "ключ 😀", "\x01"]
    for attempts, name in enumerate(names, start=10):
        app.task(name=name, max_attempts=attempts)(lambda: None)
        insert(engine, task=name)
        assert [(job.task, job.max_attempts) for job in claimer.claim(1)] == [(name, attempts)]
