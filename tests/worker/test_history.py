"""The record that each attempt of a job leaves in its history."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, text

import sqlq
from sqlq.config.constants import ERROR_BYTES, MAX_RELEASES, NOTES_BYTES
from sqlq.model.history import NOTES, AttemptRecord
from sqlq.model.outcome import ErrorText, Released, Retried, Settlement
from sqlq.store.jobs import settle as settling
from tests.kit import claim_on, drain, execute, needs, wait_until


def acting(app: sqlq.App, *acts: Callable[[], object], **options: Any) -> sqlq.Job[Any]:
    """Enqueue a job of which each attempt does the next of these."""
    left = list(acts)

    @app.task(name="act", backoff="0s", **options)
    def act() -> Any:
        return left.pop(0)()

    return app.enqueue(act.new())


def raising(error: BaseException) -> Callable[[], object]:
    def act() -> object:
        raise error

    return act


def outcomes(app: sqlq.App, id: int) -> list[str]:
    return [line.outcome for line in app.jobs.get(id).history]


def stored(engine: Engine, id: int) -> str | None:
    with engine.connect() as conn:
        tables = ("jobs", "finished_jobs", "failed_jobs")
        union = " UNION ALL ".join(f"SELECT id, errors FROM {table}" for table in tables)
        found: str | None = conn.scalar(text(f"SELECT errors FROM ({union}) AS j WHERE id = :id"), {"id": id})
        return found


def take_from_its_worker(app: sqlq.App, why: str = "died") -> None:
    with app.database.begin() as conn:
        (job,) = claim_on(conn, limit=1, owner="w1")
        assert settling.lose(conn, [(job.id, job.lease_token)], why)


def test_a_first_attempt_that_finishes_leaves_no_record(app: sqlq.App, engine: Engine) -> None:
    job = acting(app, lambda: 7)
    assert app.jobs.get(job.id).history == ()
    drain(app)
    assert stored(engine, job.id) is None
    with engine.connect() as conn:
        assert conn.execute(text("SELECT start_ms FROM finished_jobs")).one() == (None,)
    (line,) = app.jobs.get(job.id).history
    assert (line.outcome, line.attempt, line.started_at) == ("finished", 1, None)
    assert line.claimed_at is not None
    assert line.ended_at is not None
    assert line.claimed_at <= line.ended_at
    assert line.worker is not None


def test_each_attempt_leaves_a_record(app: sqlq.App) -> None:
    began = datetime.now(UTC)
    job = acting(
        app,
        raising(ValueError("no van")),
        raising(sqlq.Snooze("0s")),
        raising(KeyError("box")),
        lambda: "sent",
    )
    take_from_its_worker(app)
    drain(app)
    done = app.jobs.get(job.id)
    assert done.state == "finished"
    assert [(line.outcome, line.attempt) for line in done.history] == [
        ("lost", 1),
        ("failed", 2),
        ("snoozed", 3),
        ("failed", 3),
        ("finished", 4),
    ]
    lost, failed, snoozed, _, finished = done.history
    assert (lost.worker, lost.reason, lost.message) == ("w1", "worker_lost", "worker w1 died")
    assert lost.started_at is None
    assert lost.claimed_at is not None
    assert (failed.exception, failed.message, failed.reason) == ("ValueError", "no van", "error")
    assert (snoozed.exception, snoozed.reason) == (None, None)
    for line in done.history[1:]:
        assert line.claimed_at is not None
        assert line.started_at is not None
        assert line.ended_at is not None
        assert began - timedelta(seconds=5) < line.claimed_at <= line.started_at <= line.ended_at
        assert line.worker == finished.worker
    assert failed.host is not None
    assert failed.host.split()[1] == "pid"
    assert [error["attempt"] for error in done.errors] == [1, 2, 3], "a snooze is no error"


def test_the_last_attempt_of_a_failed_job_is_in_its_history(app: sqlq.App) -> None:
    job = acting(app, raising(ValueError("1")), raising(ValueError("2")), max_attempts=2)
    drain(app)
    done = app.jobs.get(job.id)
    assert [(line.outcome, line.attempt, line.message) for line in done.history] == [
        ("failed", 1, "1"),
        ("failed", 2, "2"),
    ]
    last = done.history[-1]
    assert last.claimed_at is not None
    assert last.started_at is not None
    assert last.ended_at is not None
    assert last.claimed_at <= last.started_at <= last.ended_at
    assert last.ended_at == done.ended_at


def test_an_operators_retry_leaves_a_record(app: sqlq.App) -> None:
    job = acting(app, raising(ValueError("no van")), lambda: None, max_attempts=1)
    drain(app)
    before = datetime.now(UTC) - timedelta(milliseconds=1)
    assert app.jobs.retry([job.id]) == [job.id]
    assert outcomes(app, job.id) == ["failed", "put_back"]
    drain(app)
    failed, put_back, finished = app.jobs.get(job.id).history
    assert (failed.attempt, put_back.attempt, finished.attempt) == (1, None, 1)
    assert failed.started_at is not None, "what the failed row knew is kept"
    assert put_back.ended_at is not None
    assert put_back.ended_at >= before.replace(microsecond=0)
    assert (put_back.worker, put_back.claimed_at) == (None, None)
    assert len(app.jobs.get(job.id).errors) == 1


def test_a_release_by_a_stopping_worker_leaves_a_record(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sqlq.worker.run.executor.CANCELLED_SECONDS", 0.1)
    started, go_on = threading.Event(), threading.Event()

    def long() -> None:
        started.set()
        go_on.wait(30)

    job = acting(app, long, lambda: None)
    worker = app.worker(grace="0s")
    thread = threading.Thread(target=worker.run)
    thread.start()
    assert started.wait(30)
    worker.stop()
    thread.join(30)
    go_on.set()
    (line,) = app.jobs.get(job.id).history
    assert (line.outcome, line.attempt) == ("released", 1)
    assert line.started_at is not None
    drain(app)
    assert outcomes(app, job.id) == ["released", "finished"]
    assert app.jobs.get(job.id).history[-1].started_at is not None, "of a later claim the start is kept"


def test_an_unknown_task_leaves_a_record(app: sqlq.App, database_url: str) -> None:
    job = app.enqueue(app.named("shop.nowhere").new())
    drain(app)
    (line,) = app.jobs.get(job.id).history
    assert (line.outcome, line.reason, line.started_at) == ("released", "unknown_task", None)


def test_a_running_job_has_an_open_record(app: sqlq.App) -> None:
    job = acting(app, lambda: None)
    with app.database.begin() as conn:
        claim_on(conn, limit=1, owner="w1")
    (line,) = app.jobs.get(job.id).history
    assert (line.outcome, line.attempt, line.ended_at, line.worker) == ("running", 1, None, "w1")


def test_a_cancel_leaves_a_record_with_its_reason(app: sqlq.App) -> None:
    waiting = acting(app, lambda: None)
    app.jobs.cancel([waiting.id])
    (line,) = app.jobs.get(waiting.id).history
    assert (line.outcome, line.attempt, line.claimed_at) == ("cancelled", None, None)
    assert line.message == "cancelled on request"


def test_a_job_that_completes_itself_has_its_start_in_a_later_claim(app: sqlq.App, engine: Engine) -> None:
    def completes() -> None:
        with engine.begin() as conn:
            sqlq.current_job().complete(conn)

    job = acting(app, raising(sqlq.Snooze("0s")), completes)
    drain(app)
    assert outcomes(app, job.id) == ["snoozed", "finished"]
    assert app.jobs.get(job.id).history[-1].started_at is not None


def test_a_thousand_snoozes_leave_room_for_errors(app: sqlq.App, engine: Engine) -> None:
    job = acting(app, lambda: None)
    with app.database.begin() as conn:
        conn.execute(text("UPDATE jobs SET max_attempts = 100, queue = 'default'"))

    def settle(outcome: Any) -> None:
        with app.database.begin() as conn:
            (claimed,) = claim_on(conn, limit=1, owner="w" * 36)
            done = Settlement(claimed.id, claimed.lease_token, claimed.attempts, outcome)
            assert settling.settle(conn, [done])

    for _ in range(300):
        settle(Released(snoozed=True))
    full = stored(engine, job.id) or ""
    assert NOTES_BYTES < len(full) < NOTES_BYTES + 500
    settle(Retried(0, ErrorText("ValueError", "x" * 500)))
    found = app.jobs.get(job.id)
    assert found.history[-1].outcome == "failed", "an error has its line, also after many snoozes"
    assert found.releases == 300
    told = sum(line.outcome == "snoozed" for line in found.history)
    assert 50 < told < 300
    for _ in range(90):
        settle(Retried(0, ErrorText("ValueError", "x" * 500)))
    assert len(stored(engine, job.id) or "") < ERROR_BYTES + 1_000
    assert MAX_RELEASES > 300


def test_records_of_another_program_are_read_as_far_as_possible(app: sqlq.App, engine: Engine) -> None:
    job = acting(app, lambda: None)
    execute(
        engine,
        "UPDATE jobs SET errors = :errors",
        errors='[7, {"at": "2026-11-22T10:00:00", "attempt": "x", "note": "mine", "worker": 3}]',
    )
    first, second = app.jobs.get(job.id).history
    assert first == AttemptRecord("failed", message="7")
    assert second == AttemptRecord("failed", worker="3"), "a moment without a time zone is none"
    assert len(app.jobs.get(job.id).errors) == 2
    assert "mine" not in NOTES


@needs("postgresql")
def test_a_rescue_leaves_a_record(app: sqlq.App) -> None:
    """A rescue, by another worker: it knows when the job was claimed, and by whom."""
    job = acting(app, lambda: None)
    with app.database.begin() as conn:
        claim_on(conn, limit=1, owner="w1", lease_ms=1)

    def rescued() -> bool:
        with app.database.begin() as conn:
            return bool(settling.rescue(conn))

    wait_until(rescued)
    (line,) = app.jobs.get(job.id).history
    assert (line.outcome, line.attempt, line.worker) == ("lost", 1, "w1")
    assert line.claimed_at is not None
    assert line.ended_at is not None
    assert line.claimed_at <= line.ended_at + timedelta(seconds=5)
