"""Every claimed job is started, settled or released, even without threads, files, processes or database."""

from __future__ import annotations

import asyncio
import itertools
import logging
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import OperationalError

import sqlq
from sqlq.config.constants import MAX_RELEASES
from sqlq.errors import MissingFileError, SchemaVersionError
from sqlq.schema import version
from sqlq.store.jobs import settle
from sqlq.store.workers import workers
from sqlq.worker.claim.claimer import Claimer
from sqlq.worker.lifecycle import stop
from sqlq.worker.maintain import services
from sqlq.worker.run.executor import Executor
from sqlq.worker.settle import settle as settling
from sqlq.worker.wait.wake import WatchingWake
from tests.kit import execute, needs, refuse, refuse_threads, wait_until, working
from tests.kit.isolated import Spawned


@pytest.mark.parametrize("patient", [False, True, 0.2], ids=str)
def test_a_worker_ends_without_tables_unless_it_waits(empty_database_url: str, patient: bool | float) -> None:
    app = sqlq.App(empty_database_url)
    with pytest.raises((SchemaVersionError, MissingFileError), match="sqlq migrate"):
        app.worker().run(patient=patient)
    app.close()


@pytest.fixture
def looking_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    version.log_newer.cache_clear()  # each test has a database of its own
    monkeypatch.setattr(services, "SCHEMA_SECONDS", 0.02)
    monkeypatch.setattr(services.SchemaWatch, "first_wait", 0.02)


@pytest.mark.usefixtures("looking_all_the_time")
def test_a_newer_revision_is_logged_once(
    app: sqlq.App, noop: Any, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sqlq")
    said = f"at revision 0701, newer than the {version.HEAD} of this sqlq, which works with them"
    with app.worker():
        execute(engine, "UPDATE sqlq_version SET version_num = '0701'")
        wait_until(lambda: said in caplog.text, timeout=30, what="the line")
        job = app.enqueue(noop.new())
        wait_until(lambda: app.jobs.get(job.id).state == "finished", what="a job done after that")
    assert [r.__dict__["event"] for r in caplog.records].count("schema_newer") == 1


@pytest.mark.usefixtures("looking_all_the_time")
@pytest.mark.parametrize(
    ("revision", "sentence"),
    [
        (
            "'0702', oldest_code = '0702'",
            f"at revision 0702, newer than the {version.HEAD} this sqlq knows: install the newer sqlq here",
        ),
        ("'0000'", f"older than the {version.HEAD} this sqlq needs: run"),
    ],
    ids=["too new", "too old"],
)
def test_a_worker_left_behind_stops_in_good_order(
    app: sqlq.App, engine: Engine, revision: str, sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    began, go = threading.Event(), threading.Event()

    @app.task(name="t")
    def slow() -> str:
        began.set()
        go.wait(20)
        return "done all the same"

    job = app.enqueue(slow.new())
    worker = app.worker().start()
    try:
        assert began.wait(30)
        execute(engine, f"UPDATE sqlq_version SET version_num = {revision}")
        wait_until(lambda: "stopping:" in caplog.text, timeout=30, what="the worker stopping")
    finally:
        go.set()
    with pytest.raises(SchemaVersionError, match=sentence):
        worker.join("20s")
    assert [r.__dict__.get("event") for r in caplog.records].count("schema_changed") == 1
    execute(engine, f"UPDATE sqlq_version SET version_num = '{version.HEAD}', oldest_code = '0001'")
    assert app.jobs.get(job.id).result == "done all the same"


def test_a_job_is_released_when_no_event_loop_can_be_made(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task(name="t")
    async def handler() -> None:
        await asyncio.sleep(0)

    def no_files() -> Any:
        raise OSError(24, "Too many open files")

    with working(app, concurrency=2):
        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "new_event_loop", no_files)
            jobs = [app.enqueue(handler.new()).id for _ in range(2)]
            wait_until(lambda: "it is given back" in caplog.text, timeout=30, what="the jobs given back")
        wait_until(lambda: all(app.jobs.get(id).state == "finished" for id in jobs), what="both done")
    assert all(app.jobs.get(id).attempts == 1 for id in jobs), "what did not start did not count"


def test_a_slot_stays_when_its_thread_cannot_start(app: sqlq.App, monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(2, timeout=60)
    task = app.task(name="t")(together.wait)
    with working(app, concurrency=2):
        with monkeypatch.context() as patch:
            refuse_threads(patch, "sqlq-slot")
            jobs = [app.enqueue(task.new()).id for _ in range(2)]
            wait_until(lambda: all(app.jobs.get(id).releases for id in jobs), what="both released")
        wait_until(lambda: all(app.jobs.get(id).state == "finished" for id in jobs), what="both at a time")


def test_a_job_that_cannot_start_anywhere_is_not_released_for_ever(
    app: sqlq.App, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_threads(monkeypatch, "sqlq-slot")
    job = app.enqueue(app.task(name="t", max_attempts=1)(lambda: None).new())
    execute(engine, f"UPDATE jobs SET releases = {MAX_RELEASES}")
    assert app.worker(drain=True).run().failed == 1
    assert app.jobs.get(job.id).message == f"given back {MAX_RELEASES} times without finishing"


@needs("cheap")
@pytest.mark.parametrize("drain", [False, True])
def test_jobs_that_wait_for_subprocesses_keep_their_place(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch, drain: bool
) -> None:
    """The worker claims as many as it has slots, and no more in search of others behind them.

    A drain releases none: it would leave them behind, to be run later.
    """
    monkeypatch.setattr("sqlq.worker.worker.CROWDED_SECONDS", 3_600.0)
    monkeypatch.setattr("sqlq.worker.run.executor.ISOLATED_UNSTARTED_SECONDS", 0.0 if drain else 3_600.0)
    spawned, may_start, turns = Spawned(at_a_time=2), threading.Event(), list[int]()
    fork, waits = spawned.spawn, Executor.wait_for_room

    def late(fd: int) -> Any:
        assert may_start.wait(60)
        return fork(fd)

    def counted(executor: Executor, low_water: int, seconds: float) -> None:
        turns.append(low_water)
        waits(executor, low_water, 0.01)

    def states() -> list[tuple[str, int]]:
        return [(job.state, job.releases) for job in reversed(app.jobs.list())]

    spawned.spawn = late
    monkeypatch.setattr(Executor, "wait_for_room", counted)
    task = app.task(name="t", isolate=True)(lambda: None)
    app.enqueue_many([task.new() for _ in range(20)])
    with working(app, concurrency=4, isolates=spawned.isolates, drain=drain):
        try:
            wait_until(lambda: len(turns) > 5, what="turns of the loop without a claim")
            if not drain:
                assert states() == [("running", 0)] * 4 + [("available", 0)] * 16
        finally:
            may_start.set()
        wait_until(lambda: states() == [("finished", 0)] * 20, what="all done")


@needs("one_writer")
def test_a_handler_that_holds_the_write_lock_times_out(
    app: sqlq.App, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services.Rescue, "run", lambda self: 60.0)
    sqlq.configure_sqlite(engine, immediate=True)

    @app.task(name="t", timeout="300ms", max_attempts=1)
    async def handler() -> None:
        with engine.begin() as conn:
            conn.execute(text("DELETE FROM jobs WHERE false"))
            await asyncio.sleep(60)

    with working(app, lease="1s"):
        job = app.enqueue(handler.new())
        wait_until(lambda: app.jobs.get(job.id).state == "failed", timeout=30, what="the timeout")
    assert app.jobs.get(job.id).reason == "timeout"


def test_a_process_that_retires_during_an_outage_waits_until_its_outcomes_are_written(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no deadline: no stop was requested."""
    monkeypatch.setattr(stop, "LAST_SETTLES_SECONDS", 0.1)
    monkeypatch.setattr(stop, "STATEMENT_SECONDS", 0.1)
    monkeypatch.setattr("sqlq.worker.threads.loop.MAX_WAIT_SECONDS", 0.2)
    away, refused = threading.Event(), threading.Semaphore(0)
    settled = settle.settle

    def answers(*args: Any, **options: Any) -> Any:
        if away.is_set():
            refused.release()
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR
            raise OperationalError("COMMIT", {}, error, connection_invalidated=True)
        return settled(*args, **options)

    monkeypatch.setattr(settle, "settle", answers)
    task = app.task(name="t", max_attempts=1)(away.set)
    made = app.enqueue_many([task.new() for _ in range(5)])
    worker = app.worker(concurrency=5, max_jobs=5).start()
    for _ in range(6):
        assert refused.acquire(timeout=30), "it tries on"
    assert not worker.join("1ms")
    away.clear()
    assert worker.join("20s")
    assert [app.jobs.get(job.id).state for job in made] == ["finished"] * 5


class Blinks(sqlite3.Connection):
    """SQLite, which does not answer the next queries."""

    left = 0

    def execute(self, *arguments: Any) -> Any:
        self.query(sqlite3.SQLITE_IOERR)
        return super().execute(*arguments)

    @classmethod
    def query(cls, code: int) -> None:
        if cls.left:
            cls.left -= 1
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = code
            raise error


@needs("file")
@pytest.mark.parametrize("when", ["starting", "idle"])
def test_a_disk_error_does_not_end_a_worker(
    app: sqlq.App, noop: Any, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    connect = sqlite3.connect

    def may_fail(*arguments: Any, **options: Any) -> Any:
        Blinks.query(sqlite3.SQLITE_CANTOPEN)
        return connect(*arguments, **options, factory=Blinks)

    monkeypatch.setattr(sqlite3, "connect", may_fail)  # which SQLAlchemy does not call
    monkeypatch.setattr(Blinks, "left", 3 if when == "starting" else 0)
    with working(app):
        if when == "idle":
            assert app.result(app.enqueue(noop.new()), "60s") is None
            Blinks.left = 3
        wait_until(lambda: not Blinks.left, timeout=20, what="it asking on")
        assert app.result(app.enqueue(noop.new()), "60s") is None


@needs("file")
def test_a_file_that_is_gone_for_a_short_time_ends_no_worker(
    app: sqlq.App, noop: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has a sentence and no traceback about a file that is moved aside, for example to restore it."""
    caplog.set_level(logging.DEBUG, "sqlq.worker")
    commits = itertools.count()
    monkeypatch.setattr(WatchingWake, "commits", lambda self: next(commits))
    file = Path(app.database.engine.url.database or "")
    with working(app):
        assert app.result(app.enqueue(noop.new()), "60s") is None
        aside = file.rename(file.with_suffix(".aside"))

        def asked_on() -> bool:
            app.database.close_idle()  # so that the next query opens it
            return "operators want" in caplog.text and ": there is no database file" in caplog.text

        wait_until(asked_on, timeout=30, what="it asking on")
        aside.rename(file)
        assert app.result(app.enqueue(noop.new()), "60s") is None
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_refused_outcome_counts_while_the_supervisor_renews(
    app: sqlq.App, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """Else it would run for ever: as a job claimed without its worker's knowing it would go back
    uncounted."""
    ran: list[int] = []
    task = app.task(name="t", max_attempts=2, backoff="0s")(lambda: ran.append(1))
    refuse(engine, "INSERT ON finished_jobs")
    job = app.enqueue(task.new())

    def supervise(worker: Any) -> bool:
        """Renew the jobs in the worker's name, as a supervisor does, and notify it."""
        sent_at = time.monotonic()
        with app.database.begin() as conn:
            _, renewed = workers.stand_in(conn, [worker.id], lease_ms=30_000)
        worker._leases.renewed_for_us(renewed[worker.id], sent_at, entered=True)
        return app.jobs.get(job.id).state == "failed"

    with working(app) as worker:
        wait_until(lambda: supervise(worker), timeout=30, what="the attempts spent")
    assert len(ran) == 2
    done = app.jobs.get(job.id)
    assert (done.reason, done.attempts, done.releases) == ("worker_lost", 2, 0)
    assert "without its knowing" not in caplog.text


def test_a_worker_that_has_left_does_not_register_again(app: sqlq.App) -> None:
    """Its heartbeat and its supervisor go on until it has ended, and find no row of it."""
    with app.worker() as worker:
        assert [each.id for each in app.workers.list()] == [worker.id]
    assert app.workers.list() == []
    worker._leases.beat()  # as it does, too, where the supervisor finds no row
    assert app.workers.list() == []


@needs("file")
def test_unwritten_outcomes_bound_starts_on_sqlite(app: sqlq.App, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that has run, and whose outcome is not written, runs again after a crash."""
    monkeypatch.setattr(settling, "MAX_UNWRITTEN_IN_A_FILE", 5)
    ran: list[int] = []
    task = app.task(name="t")(lambda: ran.append(1))
    free, settled, claim = threading.Event(), settle.settle, Claimer.claim

    def waits(*args: Any, **options: Any) -> Any:
        assert free.wait(30)
        return settled(*args, **options)

    monkeypatch.setattr(settle, "settle", waits)
    monkeypatch.setattr(Claimer, "claim", lambda claimer, limit, **options: claim(claimer, 100, **options))
    app.enqueue_many([task.new() for _ in range(100)])
    with working(app, concurrency=2) as worker:
        try:
            wait_until(lambda: len(ran) >= 5, what="as many as may have run")
            wait_until(lambda: worker._executors.load().running == 0, what="what had started ended")
            assert len(ran) <= 5 + 2
        finally:
            free.set()
        wait_until(lambda: len(ran) == 100, what="all of them run")


@pytest.mark.parametrize("thread", ["sqlq-flow", "sqlq-limit"])
def test_blocked_jobs_are_freed_when_a_thread_can_be_started_again(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, thread: str
) -> None:
    monkeypatch.setattr(services.Unblock, "run", lambda service: 3600.0)  # which would make up for it
    caplog.set_level(logging.DEBUG, "sqlq.worker")
    task = app.task(name="t", limit=sqlq.Limit("api", running=1))(lambda: None)
    app.enqueue(sqlq.group(task.new()))
    app.enqueue(task.new())
    said = f"the thread {thread} cannot be started now: can't start new thread"
    with monkeypatch.context() as patch:
        refuse_threads(patch, thread)
        worker = app.worker().start()
        wait_until(lambda: said in caplog.text, timeout=30, what="a line in the log")
    wait_until(lambda: len(app.jobs.list(state="finished")) == 2, timeout=30, what="both run")
    worker.stop()
    assert worker.join("30s")
    assert "settling jobs failed" not in caplog.text
