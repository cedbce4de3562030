"""Listeners receive the outcomes of jobs, after the commit and never in the way, and metrics their counts."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.event import listens_for
from sqlalchemy.orm import Session

import sqlq
from sqlq import JobEvent
from sqlq.testing import drain
from sqlq.worker.ipc.parent import NoParent
from sqlq.worker.lifecycle import stop
from sqlq.worker.report.meter import Meter, Totals
from sqlq.worker.report.reporter import Reporter
from tests.kit import handler_of, needs, span, wait_until, worker_of, working
from tests.kit.processes import run_program, worker_process
from tests.kit.workers import listening


def names(told: list[JobEvent]) -> list[str]:
    return [event.name for event in told]


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_each_end_of_an_attempt_publishes_its_event(app: sqlq.App, kind: str) -> None:
    told = listening(app)
    signals: list[Exception] = [sqlq.Snooze("0s"), sqlq.Cancel("not wanted")]

    def fails() -> None:
        raise ValueError(f"attempt {sqlq.current_job().attempt}")

    def indecisive() -> None:
        raise signals.pop(0)

    options: dict[str, Any] = {"queue": "mail", "max_attempts": 2, "backoff": "0s"}
    handlers: dict[str, Callable[[], None]] = {"good": lambda: None, "bad": fails, "indecisive": indecisive}
    for name, body in handlers.items():
        app.enqueue(app.task(name=name, **options)(handler_of(kind, body)).new())
    drain(app)
    ends = {"good": ["finished"], "bad": ["retried", "failed"], "indecisive": ["snoozed", "cancelled"]}
    expected = [(task, end) for task, ended in ends.items() for each in ended for end in ("started", each)]
    assert Counter((event.task, event.name) for event in told) == Counter(expected)
    for event in told:
        assert (event.queue, event.max_attempts, event.worker) == ("mail", 2, None)
        assert abs(event.at - datetime.now(UTC)) < timedelta(seconds=30)
        assert event.seconds is None if event.name == "started" else 0 <= (event.seconds or 0) < 10
    of = {event.name: event for event in told if event.name != "started"}
    assert (of["finished"].error, of["finished"].reason, of["finished"].delay_seconds) == (None, None, None)
    assert (of["retried"].reason, of["retried"].delay_seconds, of["retried"].attempt) == ("error", 0.0, 1)
    failed = of["failed"]
    assert (failed.reason, failed.delay_seconds, failed.attempt) == ("error", None, 2)
    assert failed.error is not None
    assert (failed.error.exception, failed.error.message) == ("ValueError", "attempt 2")
    assert "in fails" in (failed.error.traceback or "")
    assert isinstance(failed.exception, ValueError)
    assert failed.exception.__traceback__ is not None
    assert (of["snoozed"].delay_seconds, of["cancelled"].reason) == (0.0, "not wanted")


def test_a_job_cancelled_by_force_publishes_one_lost_event_with_the_reason(app: sqlq.App) -> None:
    told, started, go_on = listening(app), threading.Event(), threading.Event()

    @app.task(name="t")
    def long() -> None:
        started.set()
        assert go_on.wait(20)

    job = app.enqueue(long.new())
    with working(app, lease="3s") as worker:
        assert started.wait(10)
        assert app.jobs.cancel([job.id], force=True) == {job.id: "cancelled"}
        wait_until(lambda: "lost" in names(told))
        go_on.set()
        wait_until(lambda: worker.counts.lost)
    assert names(told) == ["started", "lost"]
    assert told[-1].reason == "another worker has taken it, or an operator has cancelled it by force"


PLAY = """
import os, time, sqlq

app = sqlq.App()

@app.on("started", "finished", "failed", "rescued", "retried", "enqueued")
def note(events):
    fd = os.open("told.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for event in events:
        why = f"{event.reason} {event.exception!r}" if event.exception else f"{event.reason}"
        os.write(fd, f"{event.name} {event.task} {event.attempt} {why}\\n".encode())
    os.close(fd)

@app.task(max_attempts=2)
def dies():
    os._exit(3)

@app.task(isolate=True, max_attempts=1)
def alone():
    raise ValueError("no")

@app.task(isolate=True)
def enqueues():
    app.enqueue(alone.new())
"""


def test_events_of_isolated_jobs_and_of_dead_workers_are_published(
    app: sqlq.App, database_url: str, tmp_path: Path
) -> None:
    (tmp_path / "play.py").write_text(PLAY)
    file = tmp_path / "told.txt"

    def told() -> list[str]:
        return sorted(file.read_text().splitlines()) if file.exists() else []

    def failed() -> list[str]:
        return [line for line in told() if line.startswith("failed")]

    app.enqueue(app.task(name="play.enqueues")(lambda: None).new())
    with worker_process(tmp_path, "play:app", database_url) as worker:
        wait_until(lambda: len(told()) >= 5, 30, "the events")
        assert told() == [
            "enqueued play.alone 0 None",
            "failed play.alone 1 error ExecutionError('ValueError: no')",
            "finished play.enqueues 1 None",
            "started play.alone 1 None",
            "started play.enqueues 1 None",
        ]
        app.enqueue(app.task(name="play.dies", max_attempts=2)(lambda: None).new())
        wait_until(lambda: len(failed()) == 2, 30, "the events")
        assert worker.stop() == 0
    rescued = [line for line in told() if line.startswith("rescued")]
    assert len(rescued) == 1
    assert rescued[0].startswith("rescued play.dies 1 died: its process exited with code 3")
    assert failed()[1].startswith(
        "failed play.dies 2 worker_lost ExecutionError('sqlq.errors.WorkerLostError:"
    )


def test_enqueued_is_published_after_the_commit(app: sqlq.App, engine: Engine) -> None:
    told = listening(app, "enqueued")
    task = app.task(name="t", queue="mail", max_attempts=7)(lambda: None)

    def flushed() -> list[int]:
        assert app._events.flush(10)
        return [event.id for event in told]

    first = app.enqueue(task.new())
    assert flushed() == [first.id]
    (event,) = told
    assert (event.queue, event.attempt, event.max_attempts, event.delay_seconds) == ("mail", 0, 7, None)
    many = app.enqueue_many([task.new().set(unique_key="k", delay="5s"), task.new().set(unique_key="k")])
    assert flushed() == [first.id, many[0].id], "a duplicate is no new job"
    assert told[1].delay_seconds == 5.0
    told.clear()
    with Session(engine) as session:
        committed = app.enqueue(task.new(), session)
        assert flushed() == []
        session.commit()
        app.enqueue(task.new(), session)
        session.rollback()
        app.enqueue(task.new(), session)
    assert flushed() == [committed.id]
    with engine.connect() as conn:
        app.enqueue(task.new(), conn)
        conn.rollback()
        committed = app.enqueue(task.new(), conn)
        conn.commit()
    assert flushed()[1:] == [committed.id]


@pytest.mark.parametrize("first", ["before", "inside"])
def test_a_rolled_back_savepoint_drops_its_events(app: sqlq.App, engine: Engine, first: str) -> None:
    told = listening(app, "enqueued")
    task = app.task(name="t")(lambda: None)
    if engine.dialect.name == "sqlite":
        sqlq.configure_sqlite(engine)
    expected = []
    with Session(engine) as session, session.begin():
        if first == "before":
            expected.append(app.enqueue(task.new(), session).id)
        with session.begin_nested() as savepoint:
            app.enqueue(task.new(), session)
            with session.begin_nested():
                app.enqueue(task.new(), session)
            savepoint.rollback()
        with session.begin_nested():
            expected.append(app.enqueue(task.new(), session).id)
        expected.append(app.enqueue(task.new(), session).id)
    assert app._events.flush(10)
    assert [event.id for event in told] == expected


def test_a_commit_publishes_its_own_events_after_one_that_a_listener_refused(
    app: sqlq.App, noop: Any, engine: Engine
) -> None:
    told = listening(app, "enqueued")
    with engine.connect() as refused:
        app.enqueue(noop.new(), refused)

        @listens_for(engine, "commit")
        def refuse(conn: Connection) -> None:
            if conn is refused:
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            refused.commit()
    with engine.connect() as other:
        other.execute(text("SELECT 1"))
        other.commit()
        committed = app.enqueue(noop.new(), other)
        other.commit()
    assert app._events.flush(10)
    assert [each.id for each in told] == [committed.id]


def test_a_listener_that_raises_changes_nothing(app: sqlq.App, caplog: pytest.LogCaptureFixture) -> None:
    heard = itertools.count()

    @app.on("finished")
    def broken(events: list[JobEvent]) -> None:
        next(heard)
        raise SystemExit("broken")

    told = listening(app, "finished")
    task = app.task(name="t")(lambda: None)
    for _ in range(3):
        app.enqueue(task.new())
        assert drain(app).finished == 1
    assert len(told) == 3
    assert next(heard) == 3, "it is told on"
    lines = [record for record in caplog.records if "broken failed" in record.getMessage()]
    assert len(lines) == 1, "once a minute"
    assert lines[0].exc_info is not None


@needs("cheap")
def test_a_slow_listener_delays_no_job(app: sqlq.App) -> None:
    go_on = threading.Event()
    app.on("finished")(lambda events: go_on.wait(20))
    told = listening(app, "finished")
    app.enqueue_many([app.task(name="t")(lambda: None).new()] * 50)
    worker = app.worker(drain=True).start()
    wait_until(lambda: len(told) == 50, what="the jobs, and the other listener")
    assert not worker.join("500ms"), "run() waits for the listener within the grace time"
    go_on.set()
    assert worker.join("10s")


@needs("cheap")
def test_a_worker_stops_after_its_grace_time_despite_a_hung_listener(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop, "MIN_END_SECONDS", 0.2)
    hang = threading.Event()
    app.on("finished")(lambda events: hang.wait(30))
    app.enqueue(app.task(name="t")(lambda: None).new())
    began = time.monotonic()
    assert app.worker(drain=True, grace="100ms").run().finished == 1
    assert time.monotonic() - began < 10
    hang.set()


def test_no_event_is_made_without_listener_and_log_line(
    app: sqlq.App, noop: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[str] = []
    make = JobEvent.__init__

    def note(event: JobEvent, **fields: Any) -> None:
        made.append(fields["name"])
        make(event, **fields)

    monkeypatch.setattr(JobEvent, "__init__", note)
    caplog.set_level(logging.WARNING, "sqlq")
    app.on("failed")(lambda events: None)
    app.enqueue_many([noop.new() for _ in range(3)])
    assert drain(app).finished == 3
    assert made == []


def test_a_process_publishes_its_last_events_at_exit(database_url: str) -> None:
    program = (
        f"import sqlq; app = sqlq.App({database_url!r})\n"
        "app.on('enqueued')(lambda events: print(len(events), events[0].task, flush=True))\n"
        "app.enqueue(app.task(name='t')(lambda: None).new())\n"
    )
    done = run_program("-c", program, timeout=30)
    assert (done.returncode, done.stdout) == (0, "1 t\n"), done.stderr


class Choosy(logging.Handler):
    """A handler that lets its errors through, as pytest's does."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            raise RuntimeError("no traceback can be shown")


def test_a_worker_goes_on_when_a_log_handler_raises(
    app: sqlq.App, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise ValueError("no")

    monkeypatch.setattr(logging.getLogger("sqlq"), "handlers", [Choosy()])
    told = listening(app, "failed", "finished")
    task = app.task(name="fails", max_attempts=1)(fails)
    jobs = app.enqueue_many([task.new() for _ in range(3)])
    counts = app.worker(drain=True).run()
    assert counts.failed == 3
    assert {app.jobs.get(job.id).state for job in jobs} == {"failed"}
    assert names(told) == ["failed"] * 3, "the listeners are told all the same"
    lines = [record.getMessage() for record in caplog.records if "failed for good" in record.getMessage()]
    assert sum("a log handler raised RuntimeError" in line for line in lines) == 3


def test_a_settled_job_is_let_go_when_a_report_raises(app: sqlq.App, monkeypatch: pytest.MonkeyPatch) -> None:
    tell = Reporter.ended
    raised: list[bool] = []

    def ended(self: Reporter, *args: Any) -> None:
        if not raised:
            raised.append(True)
            raise RuntimeError("nothing can be told")
        tell(self, *args)

    monkeypatch.setattr(Reporter, "ended", ended)
    app.enqueue_many([app.task(name=f"t{n}")(lambda: None).new() for n in range(3)])
    assert app.worker(drain=True).run().finished == 3, "none is counted twice, and none is held for ever"
    assert raised
    assert [job.state for job in app.jobs.list()] == ["finished"] * 3


class WorkerRequest(NoParent):
    """The parent of a worker in a test that counts."""

    def __init__(self) -> None:
        self.totals = Totals()

    def meter(self, tasks: Any) -> Meter:
        return Meter(self.totals.add, tasks)


def test_a_wait_is_counted_from_when_the_job_was_due(app: sqlq.App) -> None:
    task = app.task(name="t")(lambda: None)
    app.enqueue(task.new())
    with app.database.begin() as conn:
        conn.exec_driver_sql(f"UPDATE jobs SET available_at = available_at - {span(conn, 60)}")
    asked = WorkerRequest()
    worker_of(app, drain=True, supervision=asked).run()
    _, seconds = asked.totals.now()[1]["wait", "t", "default"]
    assert 60 <= seconds < 120
