"""`max_attempts=1`: a started job never starts again, and one that has not started is released."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

import sqlq
from sqlq.model.job import ClaimedJob
from sqlq.model.outcome import Released
from sqlq.worker.attempt.attempt import Attempt
from sqlq.worker.attempt.call import execute
from sqlq.worker.settle.settle import Counts
from sqlq.worker.worker import Worker
from tests.kit import needs, wait_until, worker_of
from tests.kit.isolated import Spawned
from tests.kit.workers import listening

DEAF = """
import sqlq, sys, threading
from sqlq.worker.attempt.attempt import Target
from sqlq.worker.run.isolated import serve
from sqlq.worker.ipc.pipe import Pipe
app = sqlq.App("sqlite:///none.db")
app.task(name="t", isolate=True)(lambda: threading.Event().wait())
serve(Pipe.inherited(int(sys.argv[1])), Target(tasks=app.tasks))
"""

Handler = Callable[[], Any]


@pytest.fixture(autouse=True)
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
    worker = app.worker(grace="0s", **options)
    thread = threading.Thread(target=worker.run)
    thread.start()
    assert charge.began.wait(30)
    worker.stop()
    thread.join(30)
    assert not thread.is_alive()
    return worker


HANDLERS = ["is_cancelled", "goes_on_in_its_thread", "looks_and_returns"]


@pytest.mark.parametrize(
    ("handler", "by_sql"), [*((handler, False) for handler in HANDLERS), (HANDLERS[0], True)]
)
def test_a_job_with_one_attempt_fails_when_it_outlasts_the_grace_time(
    app: sqlq.App, engine: Engine, handler: str, by_sql: bool
) -> None:
    charge = Charge()
    alarm = app.task(name="alarm", queue="ops")(lambda ended: None)
    given: dict[str, Any] = {} if by_sql else {"max_attempts": 1}
    task = app.task(name="t", on_failure=alarm, **given)(getattr(charge, handler))
    if by_sql:
        with engine.begin() as conn:
            row = "INSERT INTO jobs (queue, task, payload, max_attempts) VALUES ('default', 't', '{}', 1)"
            conn.execute(text(row))
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
    spawned = Spawned(DEAF)
    try:
        job = app.enqueue(app.task(name="t", isolate=True, max_attempts=1)(lambda: None).new())
        told = listening(app)
        worker = worker_of(app, isolates=spawned.isolates, grace="0s")
        with worker:
            wait_until(lambda: told, what="it has started")
        assert (app.jobs.get(job.id).state, app.jobs.get(job.id).reason) == ("failed", "worker_lost")
        assert worker.counts == Counts(failed=1)
    finally:
        spawned.isolates.close()


def test_a_handler_that_ends_after_its_job_failed_changes_nothing(app: sqlq.App, engine: Engine) -> None:
    charge = Charge()
    refused: list[str] = []
    over = threading.Event()

    @app.task(name="t", max_attempts=1)
    def completes() -> None:
        charge.goes_on_in_its_thread()
        try:
            with Session(engine) as session, session.begin():
                sqlq.current_job().complete(session, "done")
        except sqlq.errors.LeaseLostError as error:
            refused.append(str(error))
        over.set()

    job = app.enqueue(completes.new())
    outlast(app, charge)
    charge.goes_on.set()
    assert over.wait(30)
    assert len(refused) == 1
    assert app.jobs.get(job.id).state == "failed"


def test_a_claimed_job_that_has_not_started_is_released(app: sqlq.App) -> None:
    charge = Charge()
    task = app.task(name="t", max_attempts=1)(charge.goes_on_in_its_thread)
    first, second = app.enqueue_many([task.new(), task.new()])
    worker = app.worker(grace="0s", concurrency=1)
    with app.database.begin() as conn:
        conn.execute(text("UPDATE jobs SET priority = 1 WHERE id = :id"), {"id": first.id})
    held: list[ClaimedJob] = []
    claim = worker._claimer.claim

    def two(limit: int, **more: Any) -> list[ClaimedJob]:
        held.extend(claimed := claim(2, **more))
        return claimed

    worker._claimer.claim = two  # type: ignore[method-assign]
    thread = threading.Thread(target=worker.run)
    thread.start()
    assert charge.began.wait(30)
    worker.stop()
    thread.join(30)
    charge.goes_on.set()
    assert {job.id for job in held} == {first.id, second.id}
    row = app.jobs.get(second.id)
    assert (row.state, row.attempts, row.releases) == ("available", 0, 1)
    assert app.jobs.get(first.id).state == "failed"


@pytest.mark.parametrize("handler", HANDLERS)
def test_the_last_of_several_attempts_is_released_at_a_stop(app: sqlq.App, handler: str) -> None:
    charge = Charge()
    job = app.enqueue(app.task(name="t", max_attempts=2)(getattr(charge, handler)).new())
    with app.database.begin() as conn:
        conn.execute(text("UPDATE jobs SET attempts = 1"))
    outlast(app, charge)
    charge.goes_on.set()
    row = app.jobs.get(job.id)
    assert (row.state, row.attempts, row.releases) == ("available", 1, 1)


def test_a_snooze_of_a_job_with_one_attempt_runs_again(app: sqlq.App) -> None:
    seen: list[int] = []

    @app.task(name="t", max_attempts=1)
    def waits_for_its_turn() -> None:
        seen.append(sqlq.current_job().releases)
        if len(seen) < 3:
            raise sqlq.Snooze("0s")

    app.enqueue(waits_for_its_turn.new())
    assert app.worker(drain=True).run() == Counts(finished=1, released=2)
    assert seen == [0, 1, 2]


def claimed(app: sqlq.App, handler: Handler) -> Attempt:
    task = app.task(name="t", max_attempts=1)(handler)
    job = ClaimedJob(1, 1, "default", "t", '{"args": []}', 1, 1)
    return Attempt(job, task, float("inf"))


@needs("cheap")
def test_a_job_released_before_it_began_does_not_start(app: sqlq.App) -> None:
    """A slot may take up its job after the worker has released it: another worker may run it by then."""
    ran: list[str] = []
    running = claimed(app, lambda: ran.append("charged"))
    running.cancel()
    outcome = execute(running)
    assert (type(outcome), ran) == (Released, [])
