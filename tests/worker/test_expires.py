"""Waiting time that ends: a job that was not started in time is cancelled, and never runs."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Engine

import sqlq
from sqlq.model.outcome import Cancelled, Finished, Released
from sqlq.worker.attempt import call
from sqlq.worker.attempt.attempt import Attempt
from tests.kit import BOOM, NOW, claim, execute, settle, span, wait_until, working

REASON = "expired: it was not started in time"


def due(job: sqlq.JobDetails) -> datetime:
    assert job.available_at is not None
    return job.available_at


def make_late(engine: Engine, where: str = "1 = 1") -> None:
    """Let the time be over in which jobs had to be started."""
    earlier = f"{NOW[engine.dialect.name]} - {span(engine, 1)}"
    execute(engine, f"UPDATE jobs SET start_by = {earlier} WHERE {where}")


@pytest.fixture
def ran() -> list[int]:
    return []


@pytest.fixture
def task(app: sqlq.App, ran: list[int]) -> sqlq.Task[..., None]:
    return app.task(name="t", backoff="0s")(ran.append)


def test_start_within_counts_from_when_the_job_is_due(app: sqlq.App, task: sqlq.Task[..., None]) -> None:
    moment = datetime(2040, 1, 1, tzinfo=UTC)
    new, seconds = task.new(1), timedelta(seconds=1)
    batch = [
        (new, None),
        (new.set(start_within="90s"), 90 * seconds),
        (new.set(start_within="90s", delay="1h"), 90 * seconds),
        (new.set(start_within=timedelta(days=2), available_at=moment), timedelta(days=2)),
        (new.set(start_within="90s", unique_key="k", label="keyed"), 90 * seconds),
        (new.set(start_by=moment).set(start_within=None), None),
    ]
    alone = [app.jobs.get(app.enqueue(job.set(unique_key=None)).id) for job, _ in batch]
    together = [app.jobs.get(job.id) for job in app.enqueue_many([job for job, _ in batch])]
    for made in (alone, together):
        waits = [job.start_by and job.start_by - due(job) for job in made]
        assert waits == [expected for _, expected in batch]
    assert app.jobs.get(app.enqueue(new.set(start_by=moment)).id).start_by == moment
    alike = [app.jobs.get(job.id) for job in app.enqueue_many([new.set(start_within="5s")] * 3)]
    assert {job.start_by - due(job) for job in alike if job.start_by} == {5 * seconds}


@pytest.mark.parametrize("isolate", [False, True])
def test_a_late_worker_cancels_an_expired_job(
    app: sqlq.App, engine: Engine, ran: list[int], isolate: bool
) -> None:
    task = app.task(name="t", isolate=isolate)(ran.append)
    late, in_time = (app.enqueue(task.new(n).set(start_within="1h")) for n in (1, 2))
    unknown = app.enqueue(app.named("nobody.knows").new().set(start_within="1h"))
    make_late(engine, f"id <> {in_time.id}")
    app.worker(drain=True, queues=["other"]).run()
    assert app.jobs.get(late.id).state == "available", "until a worker claims it"
    app.worker(drain=True).run()
    assert ran == [2]
    for job in (late, unknown):
        found = app.jobs.get(job.id)
        assert (found.state, found.reason, found.error) == ("cancelled", REASON, REASON)
    assert app.jobs.get(in_time.id).state == "finished"


def test_an_operator_may_have_an_expired_job_run(app: sqlq.App, engine: Engine, ran: list[int]) -> None:
    job = app.enqueue(app.task(name="t")(ran.append).new(1).set(start_within="1h"))
    make_late(engine)
    (held,) = claim(app)
    settle(app, held, BOOM)
    assert app.jobs.retry([job.id]) == [job.id]
    assert app.jobs.get(job.id).start_by is None
    app.worker(drain=True).run()
    assert ran == [1]


def test_a_job_may_expire_without_a_slot(app: sqlq.App, task: sqlq.Task[..., None], ran: list[int]) -> None:
    """The worker judges by what was left when it claimed the job, and by its own clock since."""
    app.enqueue(task.new(1).set(start_within="1h"))
    (claimed,) = claim(app)
    assert -3_600_000 <= claimed.late_ms < -3_500_000
    for waited_s, expected in ((3_000, Finished()), (3_700, Cancelled(REASON))):
        running = Attempt(claimed, task, float("inf"))
        running.claimed_at -= waited_s
        assert call.execute(running) == expected
    assert ran == [1]


@pytest.mark.parametrize("first", [sqlq.Snooze("0s"), ValueError("no")], ids=("snoozed", "failed"))
def test_started_jobs_go_on_after_snooze_and_retry(app: sqlq.App, engine: Engine, first: Exception) -> None:
    """Neither a snooze nor a retry is a new start."""
    seen: list[int] = []

    @app.task(name="goes on", max_attempts=5, backoff="0s")
    def goes_on() -> None:
        seen.append(sqlq.current_job().attempt)
        make_late(engine, "start_by IS NOT NULL")
        if len(seen) == 1:
            raise first
        if len(seen) == 2:
            raise ValueError("no")

    job = app.enqueue(goes_on.new().set(start_within="1h"))
    with working(app):
        wait_until(lambda: app.jobs.get(job.id).ended_at, what="the end")
    expected = [1, 1, 2] if isinstance(first, sqlq.Snooze) else [1, 2, 3]
    assert (app.jobs.get(job.id).state, seen) == ("finished", expected)


@pytest.mark.parametrize("started", [True, False])
def test_a_job_released_before_its_start_still_expires(
    app: sqlq.App, engine: Engine, task: sqlq.Task[..., None], started: bool
) -> None:
    job = app.enqueue(task.new(1).set(start_within="1h"))
    (held,) = claim(app)
    settle(app, held, Released(0, in_time=started))
    assert (app.jobs.get(job.id).start_by is None) is started
    if not started:
        make_late(engine)
    app.worker(drain=True).run()
    assert str(app.jobs.get(job.id).state) == ("finished" if started else "cancelled")
