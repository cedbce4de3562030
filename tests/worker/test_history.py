"""How far a job has come, and the record that each of its attempts leaves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

import sqlq
from sqlq.config.constants import ERROR_BYTES, MAX_RELEASES, NOTES_BYTES
from sqlq.model.history import NOTES, AttemptRecord
from sqlq.model.job import Progress
from sqlq.model.outcome import ErrorText, Outcome, Released, Retried
from sqlq.store.jobs import lease
from sqlq.store.jobs import settle as settling
from sqlq.store.jobs.lease import Note
from sqlq.worker.attempt import progress as progress_writer
from tests.kit import claim, drain, execute, handler_of, needs, refuse, run_one, settle, wait_until, working


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


def stored(engine: Engine, id: int) -> str | None:
    with engine.connect() as conn:
        tables = ("jobs", "finished_jobs", "failed_jobs")
        union = " UNION ALL ".join(f"SELECT id, errors FROM {table}" for table in tables)
        found: str | None = conn.scalar(text(f"SELECT errors FROM ({union}) AS j WHERE id = :id"), {"id": id})
        return found


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
    fails, snoozes, fails_again = map(raising, (ValueError("no van"), sqlq.Snooze("0s"), KeyError("box")))
    job = acting(app, fails, snoozes, fails_again, lambda: "sent")
    (held,) = claim(app, "w1")
    (line,) = app.jobs.get(job.id).history
    assert (line.outcome, line.attempt, line.ended_at, line.worker) == ("running", 1, None, "w1")
    with app.database.begin() as conn:
        assert settling.lose(conn, [(held.id, held.lease_token)], "died")
    drain(app)
    done = app.jobs.get(job.id)
    assert done.state == "finished"
    assert [(line.outcome, line.attempt) for line in done.history] == [
        *(("lost", 1), ("failed", 2), ("snoozed", 3), ("failed", 3), ("finished", 4)),
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


def test_an_operators_retry_leaves_a_record_and_so_does_a_cancel(app: sqlq.App) -> None:
    job = acting(app, raising(ValueError("no van")), max_attempts=1)
    drain(app)
    before = datetime.now(UTC) - timedelta(milliseconds=1)
    assert app.jobs.retry([job.id]) == [job.id]
    assert [line.outcome for line in app.jobs.get(job.id).history] == ["failed", "put_back"]
    app.jobs.cancel([job.id])
    failed, put_back, cancelled = app.jobs.get(job.id).history
    assert (failed.attempt, put_back.attempt, cancelled.attempt) == (1, None, None)
    assert (cancelled.claimed_at, cancelled.message) == (None, "cancelled on request")
    assert failed.started_at is not None, "what the failed row knew is kept"
    assert put_back.ended_at is not None
    assert put_back.ended_at >= before.replace(microsecond=0)
    assert (put_back.worker, put_back.claimed_at) == (None, None)
    assert len(app.jobs.get(job.id).errors) == 1


def test_a_thousand_snoozes_leave_room_for_errors(app: sqlq.App, engine: Engine) -> None:
    job = acting(app, lambda: None, max_attempts=100)

    def end(outcome: Outcome, times: int) -> None:
        for _ in range(times):
            (claimed,) = claim(app, "w" * 36)
            assert settle(app, claimed, outcome) == {job.id}

    end(Released(snoozed=True), 300)
    full = stored(engine, job.id) or ""
    assert NOTES_BYTES < len(full) < NOTES_BYTES + 500
    end(Retried(0, ErrorText("ValueError", "x" * 500)), 1)
    found = app.jobs.get(job.id)
    assert found.history[-1].outcome == "failed", "an error has its line, also after many snoozes"
    assert found.releases == 300
    assert 50 < sum(line.outcome == "snoozed" for line in found.history) < 300
    end(Retried(0, ErrorText("ValueError", "x" * 500)), 90)
    assert len(stored(engine, job.id) or "") < ERROR_BYTES + 1_000
    assert MAX_RELEASES > 300


def test_records_of_another_program_are_read_as_far_as_possible(app: sqlq.App, engine: Engine) -> None:
    job = acting(app, lambda: None)
    errors = '[7, {"at": "2026-11-22T10:00:00", "attempt": "x", "note": "mine", "worker": 3}]'
    execute(engine, "UPDATE jobs SET errors = :errors", errors=errors)
    first, second = app.jobs.get(job.id).history
    assert first == AttemptRecord("failed", message="7")
    assert second == AttemptRecord("failed", worker="3"), "a moment without a time zone is none"
    assert len(app.jobs.get(job.id).errors) == 2
    assert "mine" not in NOTES


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_progress_is_visible_while_the_job_runs(app: sqlq.App, engine: Engine, kind: str) -> None:
    go_on = threading.Event()
    note, cut = "\0\ud800" + "ü" * 1_000, "\u2400\ufffd" + "ü" * 253

    def say() -> None:
        for done in range(1, 26):
            sqlq.current_job().progress(done, of=100, note=note)
        go_on.wait(60)

    job = app.enqueue(app.task(name="t")(handler_of(kind, say)).new())
    last = Progress(25, 100, cut)
    with working(app):
        try:
            wait_until(lambda: app.jobs.get(job.id).progress == last, what="the last word in the row")
        finally:
            go_on.set()
        wait_until(lambda: app.jobs.get(job.id).ended_at, what="the end")
    assert app.jobs.get(job.id).progress == last
    with engine.connect() as conn:
        row = conn.execute(text("SELECT progress, progress_of, progress_note FROM job_states")).one()
    assert tuple(row) == (25, 100, cut)


@pytest.mark.parametrize("ending", ["returns", "fails", "is retried", "is cancelled", "completes itself"])
def test_the_last_progress_is_stored_however_the_job_ends(app: sqlq.App, engine: Engine, ending: str) -> None:
    def handler() -> None:
        job = sqlq.current_job()
        job.progress(1, of=3)
        # from here on the writer rests for a second
        wait_until(lambda: app.jobs.get(job.id).progress, timeout=10, what="the first progress in the row")
        for done in (2, 3):
            job.progress(done, of=3)
        match ending:
            case "fails" | "is retried":
                raise ValueError("no")
            case "is cancelled":
                raise sqlq.Cancel("enough")
            case "completes itself":
                with Session(engine) as session, session.begin():
                    job.complete(session)

    task = app.task(name="t", max_attempts=2 if ending == "is retried" else 1, backoff="1h")(handler)
    id = app.enqueue(task.new()).id
    drain(app)
    states = {"fails": "failed", "is retried": "scheduled", "is cancelled": "cancelled"}
    assert app.jobs.get(id).state == states.get(ending, "finished")
    assert app.jobs.get(id).progress == Progress(3, 3)


@pytest.mark.parametrize(
    ("said", "warning"),
    [
        (("x",), "could not convert"),
        ((float("nan"),), "are no numbers"),
        ((1, float("inf")), "are no numbers"),
        ((None,), "float()"),
    ],
)
def test_progress_that_is_no_number_is_ignored_with_a_warning(
    app: sqlq.App, caplog: pytest.LogCaptureFixture, said: Any, warning: str
) -> None:
    def report() -> None:
        for _ in range(2):
            sqlq.current_job().progress(*said)

    done = run_one(app, report)
    assert (done.state, done.progress) == ("finished", None)
    (line,) = (record for record in caplog.records if "progress" in record.getMessage())
    assert warning in line.getMessage()


def test_a_tight_loop_writes_once_a_second_at_most(app: sqlq.App, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[list[Note]] = []
    write = lease.note

    def counting(conn: Any, notes: Any, **options: Any) -> Any:
        written.append(list(notes))
        return write(conn, notes, **options)

    monkeypatch.setattr(lease, "note", counting)

    @app.task(name="t")
    def handler() -> None:
        for done in range(20_000):
            sqlq.current_job().progress(done)

    begun = time.monotonic()
    app.enqueue_many([handler.new() for _ in range(5)])
    assert drain(app).finished == 5
    most = 2 + (time.monotonic() - begun) / progress_writer.EVERY_SECONDS
    by_the_thread = len(written) - 5
    assert by_the_thread <= most + 5, "each job's last word, and one statement a second for all"


def test_progress_is_fenced(app: sqlq.App) -> None:
    """A worker that has lost the job writes nothing of it."""
    id = app.enqueue(app.task(name="t")(lambda: None).new()).id
    (job,) = claim(app)
    right, wrong = (id, job.lease_token), (id, job.lease_token + 1)
    with app.database.begin() as conn:
        assert lease.note(conn, [Note(*wrong, 1.0, None, None, None)]) == set()
        assert lease.note(conn, [Note(*right, 2.0, 4.0, "a", None)]) == {right}
        # nothing is set: a stored value stays, and a retention is written where there is none
        assert lease.note(conn, [Note(*right, None, None, None, 1_000)]) == {right}
        assert lease.note(conn, [Note(*right, None, None, None, 2_000)]) == {right}
    found = app.jobs.get(id)
    assert (found.progress, found.retention_ms) == (Progress(2, 4, "a"), 1_000)


@needs("file")
def test_progress_that_the_database_refuses_fails_no_job(
    app: sqlq.App, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """For example by another program's trigger."""
    refuse(engine, "UPDATE OF progress ON jobs", "NEW.progress IS NOT NULL", "no progress here")
    done = run_one(app, lambda: sqlq.current_job().progress(1))
    assert (done.state, done.progress) == ("finished", None)
    assert "no progress here" in caplog.text
