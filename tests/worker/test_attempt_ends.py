"""How attempts end: where and when the next one runs, what is logged, and what is kept of the job."""

from __future__ import annotations

import logging
import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import DataError

import sqlq
from sqlq.errors import ConfigurationError
from sqlq.payload.encryption import new_key
from sqlq.store.jobs import operate
from sqlq.store.jobs import settle as settling
from sqlq.worker.attempt.context import attempt_of
from sqlq.worker.maintain import services
from tests.kit import drain, for_each, wait_until, working

# -- the next attempt ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("signal", [sqlq.Retry, sqlq.Snooze])
def test_retry_and_snooze_take_the_time_of_the_next_attempt(app: sqlq.App, signal: Any) -> None:
    at = datetime.now(UTC) + timedelta(hours=2)

    @app.task(name="t")
    def task() -> None:
        raise signal(at)

    job = app.enqueue(task.new())
    drain(app)
    due = app.jobs.get(job.id).available_at
    assert due is not None
    assert abs(due - at) < timedelta(milliseconds=2), "by the database's clock"


@pytest.mark.parametrize("signal", [sqlq.Retry, sqlq.Snooze])
def test_a_past_time_means_at_once_and_a_naive_one_is_refused(signal: Any) -> None:
    assert signal(datetime(2020, 1, 1, tzinfo=UTC)).delay_ms == 0
    with pytest.raises(ConfigurationError, match="has no time zone"):
        signal(datetime(2030, 1, 1))  # noqa: DTZ001 - what is refused


def test_a_retry_names_the_queue_and_the_priority_of_the_next_attempt(app: sqlq.App) -> None:
    seen = []

    @app.task(name="t")
    def task() -> None:
        job = sqlq.current_job()
        seen.append((job.queue, attempt_of(job).claimed.priority))
        if len(seen) == 1:
            raise sqlq.Retry("0s", queue="slow", priority=-5)
        raise sqlq.Retry("1h", priority=7)

    job = app.enqueue(task.new())
    drain(app)
    assert seen == [("default", 0), ("slow", -5)]
    assert (app.jobs.get(job.id).queue, app.jobs.get(job.id).priority, app.jobs.get(job.id).attempts) == (
        "slow",
        7,
        2,
    )


@for_each("options", [{"priority": 101}, {"queue": "a,b"}, {"priority": True}])
def test_a_retry_into_no_queue_or_priority_is_refused(options: Any) -> None:
    with pytest.raises(ConfigurationError):
        sqlq.Retry("1s", **options)


def test_a_retry_into_a_queue_with_its_key_stays_in_its_queue(app: sqlq.App) -> None:
    @app.task(name="t")
    def task() -> None:
        raise sqlq.Retry("1h", queue="other")

    app.enqueue(task.new().set(unique_key="k", queue="other", delay="1h"))
    job = app.enqueue(task.new().set(unique_key="k"))
    drain(app)
    assert (app.jobs.get(job.id).queue, app.jobs.get(job.id).state) == ("default", "scheduled")


def test_a_running_job_knows_its_worker(app: sqlq.App) -> None:
    seen = []
    task = app.task(name="t")(lambda: seen.append(sqlq.current_job().worker))
    app.enqueue(task.new())
    with working(app) as worker:
        wait_until(lambda: seen, what="the job run")
        assert seen == [worker.id] == [known.id for known in app.workers.list()]


# -- what is logged ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "values", "reason"),
    [
        ("task, payload", "'t', 'no json'", "bad_payload"),
        ("task, unknown_since", "'nobody.knows', {long_ago}", "unknown_task"),
    ],
)
def test_a_job_that_could_not_begin_leaves_one_line_and_no_traceback(
    app: sqlq.App, engine: Engine, caplog: pytest.LogCaptureFixture, columns: str, values: str, reason: str
) -> None:
    caplog.set_level(logging.INFO, "sqlq")
    app.task(name="t")(lambda: None)
    long_ago = {"postgresql": "'2020-01-01+00'", "sqlite": "1577836800000", "mariadb": "'2020-01-01'"}[
        engine.dialect.name
    ]
    with engine.begin() as conn:
        said = values.format(long_ago=long_ago)
        id = conn.execute(text(f"INSERT INTO jobs ({columns}) VALUES ({said}) RETURNING id")).scalar_one()
    assert drain(app).failed == 1
    assert app.jobs.get(id).reason == reason
    (line,) = [record for record in caplog.records if getattr(record, "job_id", None) == id]
    assert line.exc_info is None
    assert reason in line.getMessage()


def test_a_job_with_a_bad_signature_leaves_one_line_and_no_traceback(
    app: sqlq.App, database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sqlq")
    encrypting = sqlq.App(database_url, keys=[new_key()])
    encrypting.task(name="t")(lambda: None)
    job = app.enqueue(app.task(name="t")(lambda: None).new())
    assert drain(encrypting).failed == 1
    encrypting.close()
    assert app.jobs.get(job.id).reason == "bad_signature"
    (line,) = [record for record in caplog.records if getattr(record, "job_id", None) == job.id]
    assert line.exc_info is None


def test_a_retry_keeps_its_queue_and_priority_where_its_error_is_refused(
    app: sqlq.App, engine: Engine
) -> None:
    with engine.begin() as conn:
        if engine.dialect.name == "sqlite":
            conn.exec_driver_sql(
                "CREATE TRIGGER refuse BEFORE UPDATE ON jobs WHEN NEW.errors LIKE '%poison%' "
                "BEGIN SELECT RAISE(ABORT, 'refused'); END"
            )
        else:
            conn.exec_driver_sql("ALTER TABLE jobs ADD CHECK (errors NOT LIKE '%%poison%%')")

    @app.task(name="t")
    def task() -> None:
        raise sqlq.Retry("1h", queue="other", priority=3) from ValueError("poison")

    job = app.enqueue(task.new())
    assert drain(app).retried == 1
    found = app.jobs.get(job.id)
    assert (found.queue, found.priority, found.attempts) == ("other", 3, 1)


def test_an_outcome_that_is_refused_leaves_the_others_of_its_batch_together(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, ran = 64, threading.Semaphore(0)
    batches: list[int] = []
    settle = settling.settle

    def noted(conn: Any, settlements: Any, **options: Any) -> Any:
        if not batches:  # the first batch waits until all have run, so that it is followed by a large one
            for _ in range(jobs):
                assert ran.acquire(timeout=60)
        batches.append(len(settlements))
        if any("poison" in str(one.outcome) for one in settlements):
            raise DataError("settle", None, ValueError("refused"))
        return settle(conn, settlements, **options)

    monkeypatch.setattr(settling, "settle", noted)

    @app.task(name="t")
    def task(value: str) -> str:
        ran.release()
        return value

    written = app.enqueue_many([task.new("good")] * (jobs - 1) + [task.new("poison")])
    with working(app, concurrency=jobs):
        wait_until(lambda: app.jobs.get(written[-1].id).state == "finished", what="the last one's end")
    assert [app.jobs.get(job.id).state for job in written] == ["finished"] * jobs
    assert app.jobs.get(written[0].id).result == "good"
    assert app.jobs.get(written[-1].id).result is None
    assert len(batches) < jobs // 2, batches


def test_a_signed_job_stays_in_its_queue(database_url: str, caplog: pytest.LogCaptureFixture) -> None:
    app = sqlq.App(database_url, keys=[new_key()])
    attempts = []

    @app.task(name="t")
    def task() -> None:
        attempts.append(sqlq.current_job().queue)
        if len(attempts) == 1:
            raise sqlq.Retry("0s", queue="other", priority=3)

    app.enqueue(task.new())
    assert drain(app).finished == 1
    app.close()
    assert attempts == ["default", "default"]
    assert "it stays in its queue" in caplog.text


# -- what is kept --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said_by", ["task", "job", "handler"])
def test_a_job_of_retention_zero_is_pruned_within_a_minute(
    app: sqlq.App, engine: Engine, said_by: str, caplog: pytest.LogCaptureFixture
) -> None:
    go = threading.Event()

    def handler() -> None:
        if said_by == "handler":
            with sqlq.current_job().completing(engine):
                pass
            assert go.wait(60)

    task = app.task(name="t", retention="forever" if said_by == "job" else "0s")(handler)
    new = task.new().set(retention="0s") if said_by == "job" else task.new()
    kept = app.enqueue(app.task(name="kept")(lambda: None).new())
    app.enqueue(new)

    def finished() -> list[int]:
        with engine.connect() as conn:
            return list(conn.scalars(text("SELECT id FROM finished_jobs")))

    def pruned(later_ms: int = 0) -> int:
        with app.database.begin() as conn:
            return operate.prune_expired(conn, limit=9, later_ms=later_ms)

    assert services.SEEN_MS / 1000 + (2 - services.MIN_RHYTHM_SHARE) * services.PRUNE_SECONDS < 60
    with working(app) as worker:
        wait_until(lambda: len(finished()) == 2, what="both finished")
        assert pruned(services.SEEN_MS) == 0
        wait_until(lambda: pruned() == 1, what="the pruned one")
        worker._leases.beat()
        assert finished() == [kept.id]
        go.set()
        wait_until(lambda: worker.counts.finished == 2, what="both counted")
    assert worker.counts.lost == 0
    assert "lost" not in caplog.text


def test_a_step_of_retention_zero_is_kept_for_its_followers(app: sqlq.App) -> None:
    done = []
    first = app.task(name="first", retention="0s")(lambda: 1)
    second = app.task(name="second")(lambda: done.append(1))
    flow = sqlq.Flow()
    step = flow.add(first.new())
    flow.add(second.new(), after=step)
    app.enqueue(flow)
    drain(app)
    assert done == [1]
