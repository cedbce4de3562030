"""How far a job has come: seen while it runs and when it has ended, and never in its way."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

import sqlq
from sqlq.model.job import Progress
from sqlq.store.jobs import lease
from sqlq.store.jobs.lease import Note
from sqlq.testing import drain, inline
from sqlq.worker.attempt import progress as progress_writer
from tests.kit import claim, for_each, needs, wait_until, working


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_progress_is_visible_while_the_job_runs(app: sqlq.App, engine: Engine, kind: str) -> None:
    seen, go_on = threading.Event(), threading.Event()

    def say() -> None:
        for done in range(1, 26):
            sqlq.current_job().progress(done, of=100, note=f"row {done}")
        seen.set()

    async def asynchronous() -> None:
        say()
        await asyncio.to_thread(go_on.wait, 60)

    def plain() -> None:
        say()
        go_on.wait(60)

    job = app.enqueue(app.task(name="t")(asynchronous if kind == "async def" else plain).new())
    with working(app):
        try:
            found = wait_until(lambda: _if_done(app, job.id, 25), what="the last word in the row")
        finally:
            go_on.set()
        wait_until(lambda: app.jobs.get(job.id).ended_at, what="the end")
    assert found == Progress(25, 100, "row 25")
    assert app.jobs.get(job.id).progress == found
    with engine.connect() as conn:
        row = conn.execute(text("SELECT progress, progress_of, progress_note FROM job_states")).one()
    assert tuple(row) == (25, 100, "row 25")


def _if_done(app: sqlq.App, id: int, done: float) -> Progress | None:
    found = app.jobs.get(id).progress
    return found if found is not None and found.done == done else None


@pytest.mark.parametrize("ending", ["returns", "fails", "is retried", "is cancelled", "completes itself"])
def test_the_last_progress_is_in_the_row_however_the_job_ends(
    app: sqlq.App, engine: Engine, ending: str
) -> None:
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
    states = {
        "returns": "finished",
        "fails": "failed",
        "is retried": "scheduled",
        "is cancelled": "cancelled",
    }
    assert app.jobs.get(id).state == states.get(ending, "finished")
    assert app.jobs.get(id).progress == Progress(3, 3)


def test_a_retried_job_begins_without_progress(app: sqlq.App) -> None:
    @app.task(name="t", max_attempts=1)
    def fails() -> None:
        sqlq.current_job().progress(1)
        raise ValueError("no")

    id = app.enqueue(fails.new()).id
    drain(app)
    assert app.jobs.get(id).progress == Progress(1)
    app.jobs.retry([id])
    assert app.jobs.get(id).progress is None


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
    @app.task(name="t")
    def handler() -> None:
        sqlq.current_job().progress(*said)
        sqlq.current_job().progress(*said)

    id = app.enqueue(handler.new()).id
    assert drain(app).finished == 1
    assert app.jobs.get(id).progress is None
    (line,) = (record for record in caplog.records if "progress" in record.getMessage())
    assert warning in line.getMessage()


def test_a_note_is_scrubbed_and_cut(app: sqlq.App) -> None:
    @app.task(name="t")
    def handler() -> None:
        sqlq.current_job().progress(1, note="\0\ud800" + "ü" * 1_000)

    id = app.enqueue(handler.new()).id
    assert drain(app).finished == 1
    found = app.jobs.get(id).progress
    assert found is not None
    assert found.note == "\u2400\ufffd" + "ü" * 253


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


@needs("sessions")
def test_a_locked_row_delays_the_end_and_loses_no_progress(app: sqlq.App, engine: Engine) -> None:
    said, go_on = threading.Event(), threading.Event()

    @app.task(name="t")
    def handler() -> None:
        said.set()
        go_on.wait(60)
        sqlq.current_job().progress(7)

    id = app.enqueue(handler.new()).id
    with working(app) as worker:
        said.wait(60)
        with engine.begin() as conn:
            conn.execute(text("SELECT id FROM jobs WHERE id = :id FOR UPDATE"), {"id": id})
            go_on.set()
            wait_until(lambda: len(worker._settler._pending) == 1, what="the outcome waiting")
        wait_until(lambda: app.jobs.get(id).state == "finished", what="the end")
    assert app.jobs.get(id).progress == Progress(7)


def test_progress_that_the_database_refuses_fails_no_job(
    app: sqlq.App, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    with engine.begin() as conn:  # for example another program's trigger
        if engine.dialect.name == "sqlite":
            conn.exec_driver_sql(
                "CREATE TRIGGER refuse BEFORE UPDATE OF progress ON jobs WHEN NEW.progress IS NOT NULL "
                "BEGIN SELECT RAISE(ABORT, 'no progress here'); END"
            )
        elif engine.dialect.name == "mariadb":
            conn.exec_driver_sql(
                "CREATE TRIGGER refuse BEFORE UPDATE ON jobs FOR EACH ROW IF NEW.progress IS NOT NULL "
                "THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'no progress here'; END IF"
            )
        else:
            conn.exec_driver_sql(
                "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
                "RAISE EXCEPTION 'no progress here'; END $$"
            )
            conn.exec_driver_sql(
                "CREATE TRIGGER refuse BEFORE UPDATE ON jobs FOR EACH ROW WHEN (NEW.progress IS NOT NULL) "
                "EXECUTE FUNCTION refuse()"
            )
    task = app.task(name="t")(lambda: sqlq.current_job().progress(1))
    id = app.enqueue(task.new()).id
    assert drain(app).finished == 1
    assert (app.jobs.get(id).state, app.jobs.get(id).progress) == ("finished", None)
    assert "no progress here" in caplog.text


def test_progress_is_accepted_inline(app: sqlq.App) -> None:
    task = app.task(name="t")(lambda: sqlq.current_job().progress(1, of=2))
    with inline(app) as ran:
        app.enqueue(task.new())
    assert ran.jobs[0].state == "finished"


@for_each(
    ("progress", "share", "text"),
    [
        (Progress(25, 100), 0.25, "25 of 100"),
        (Progress(3, 12, "packing"), 0.25, "3 of 12 (25%): packing"),
        (Progress(0.5), None, "0.5"),
        (Progress(7, 0), None, "7 of 0"),
        (Progress(9, 3), 1.0, "9 of 3 (100%)"),
    ],
)
def test_progress_is_shown_with_its_share_and_text(
    progress: Progress, share: float | None, text: str
) -> None:
    assert (progress.share, str(progress)) == (share, text)


def test_progress_keeps_up_when_many_jobs_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that was noted while the last batch was written goes with the next one."""
    monkeypatch.setattr(progress_writer, "EVERY_SECONDS", 0.0)
    batches: list[int] = []
    begun, go_on = threading.Event(), threading.Event()

    def hand_over(jobs: Any) -> None:
        batches.append(len(jobs))
        begun.set()
        go_on.wait(30)

    pace = progress_writer.Pace(hand_over)
    pace.note(SimpleNamespace(right=(0, 1)))  # type: ignore[arg-type]
    assert begun.wait(30)
    for id in range(1, 2_501):
        pace.note(SimpleNamespace(right=(id, 1)))  # type: ignore[arg-type]
    go_on.set()
    wait_until(lambda: sum(batches) == 2_501, what="all handed over")
    pace.close()
    assert batches == [1, 2_500]
