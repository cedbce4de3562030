"""Every claimed job is started, settled or released, even without threads, files, processes or database."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import os
import resource
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import OperationalError

import sqlq
from sqlq.config.constants import MAX_RELEASES
from sqlq.errors import MissingFileError, SchemaVersionError
from sqlq.model.job import ClaimedJob
from sqlq.store.jobs import settle
from sqlq.store.workers import workers
from sqlq.worker.attempt import call
from sqlq.worker.attempt.attempt import Attempt, Target
from sqlq.worker.decide import Retire
from sqlq.worker.lifecycle import stop
from sqlq.worker.maintain import services
from sqlq.worker.run.isolated import IsolatedProcesses
from sqlq.worker.run.lease import Deadlines
from sqlq.worker.settle import settle as settling
from sqlq.worker.wait.wake import WatchingWake
from sqlq.worker.worker import Worker
from tests.kit import claim_on, execute, needs, refuse_threads, wait_until, worker_of, working

TARGET = Target()


def running(id: int, *, timeout_ms: int | None = None, isolated: bool = False) -> Attempt:
    claimed = ClaimedJob(id, 1, "q", "t", "{}", 1, 3, timeout_ms=timeout_ms)
    return Attempt(claimed, None, float("inf"), TARGET, isolated=isolated)


# -- a database that is not ready ----------------------------------------------------------------------------


@pytest.mark.parametrize("patient", [False, True, 0.2], ids=str)
def test_a_worker_ends_without_its_tables_unless_it_may_wait(
    empty_database_url: str, patient: bool | float
) -> None:
    app = sqlq.App(empty_database_url)
    with pytest.raises((SchemaVersionError, MissingFileError), match="sqlq migrate"):
        app.worker().run(patient=patient)
    app.close()


# -- threads and files that are short ------------------------------------------------------------------------


@contextmanager
def no_more_files() -> Iterator[None]:
    """Let this process open nothing more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(int(fd.name) for fd in Path("/proc/self/fd").iterdir()) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    filled = []
    try:
        with suppress(OSError):
            while True:
                filled.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for file in filled:
            os.close(file)


# Python's own event loop, broken off as it is made, complains that it was not closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_job_is_released_when_no_event_loop_can_be_made(
    app: sqlq.App, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task(name="t")
    async def handler() -> None:
        await asyncio.sleep(0)

    warm = app.task(name="warm")(lambda: None)
    with working(app, concurrency=2):
        first = app.enqueue(warm.new())
        wait_until(
            lambda: app.jobs.get(first.id).state == "finished",
            what="the worker at work, with its connections",
        )
        with no_more_files():
            made = app.enqueue_many([handler.new(), handler.new()])
            wait_until(lambda: "it is given back" in caplog.text, what="the jobs given back")
        wait_until(
            lambda: all(app.jobs.get(job.id).state == "finished" for job in made), what="both done afterwards"
        )
    assert all(app.jobs.get(job.id).attempts == 1 for job in made), "what did not start did not count"
    caplog.clear()  # its records keep the error, and that the loop
    gc.collect()


def test_a_slot_stays_when_its_thread_cannot_be_started(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch
) -> None:
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


# -- processes that start ------------------------------------------------------------------------------------

SLOW_START = """
import sys
from sqlq.worker.ipc.pipe import Pipe
link = Pipe.inherited(int(sys.argv[1]))
sys.stdin.readline()                     # until it is let go
link.send(up=True)
while (message := link.receive()) is not None and "leave" not in message:
    if "job" in message:
        link.send(began=True)
        link.send(outcome={"is": "Finished", "result": None, "note": None})
"""


class Crowd:
    """Jobs that need processes of their own, and a worker with four slots, which starts two at a time.

    The processes come up when a test lets them. `turns` grows by each turn of its loop that claims nothing.
    """

    def __init__(
        self, app: sqlq.App, monkeypatch: pytest.MonkeyPatch, jobs: int = 20, *, drain: bool
    ) -> None:
        self.app, self.task = app, app.task(name="t")(lambda: None)
        self.jobs = app.enqueue_many([self.task.new() for _ in range(jobs)])
        with app.database.begin() as conn:
            conn.execute(text("UPDATE jobs SET losses = 1"))
        self.turns = 0
        self.processes: list[subprocess.Popen[bytes]] = []
        isolates = IsolatedProcesses(self.spawn, at_a_time=2)
        self.worker = worker_of(app, concurrency=4, isolates=isolates, drain=drain)
        waits = self.worker._executors.wait_for_room

        def wait_for_room(low_water: int, seconds: float) -> None:
            self.turns += 1
            waits(low_water, 0.01)

        monkeypatch.setattr(self.worker._executors, "wait_for_room", wait_for_room)

    def spawn(self, fd: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", SLOW_START, str(fd)]
        self.processes.append(subprocess.Popen(command, pass_fds=[fd], stdin=subprocess.PIPE))
        return self.processes[-1]

    def let_go(self) -> None:
        for process in self.processes:
            if process.stdin and not process.stdin.closed:
                process.stdin.close()

    def states(self) -> list[tuple[str, int]]:
        return [(job.state, job.releases) for job in (self.app.jobs.get(job.id) for job in self.jobs)]

    def all_done(self) -> bool:
        self.let_go()
        return {state for state, _ in self.states()} == {"finished"}


@pytest.fixture
def crowd(app: sqlq.App, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Crowd]]:
    made: list[Crowd] = []

    def make(jobs: int = 20, *, drain: bool = False) -> Crowd:
        made.append(Crowd(app, monkeypatch, jobs, drain=drain))
        return made[-1]

    yield make
    for each in made:
        each.let_go()
        each.worker.stop()
        assert each.worker.join("20s")
        for process in each.processes:
            process.wait(10)


@pytest.mark.integration
@pytest.mark.slow
def test_few_subprocesses_start_at_a_time_while_other_jobs_run(
    app: sqlq.App, crowd: Callable[..., Crowd]
) -> None:
    """As after the death of a host, whose jobs all need a process of their own."""
    them = crowd(jobs=6)
    usual = app.enqueue_many([them.task.new() for _ in range(3)])
    them.worker.start()
    wait_until(
        lambda: all(app.jobs.get(job.id).state == "finished" for job in usual), what="the usual jobs done"
    )
    assert len(them.processes) == 2
    assert them.states() == [("running", 0)] * 6, "the oldest first; the others are held"
    wait_until(them.all_done, timeout=60, what="the lost jobs done")
    assert len(them.processes) <= 4, "a process that came up takes the next job"


@needs("cheap")
def test_jobs_that_wait_for_subprocesses_are_not_claimed_repeatedly(
    crowd: Callable[..., Crowd], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker claims as many as it has slots, and no more in search of others behind them.

    Such a search may be in vain, and comes after a while.
    """
    monkeypatch.setattr("sqlq.worker.worker.CROWDED_SECONDS", 3_600.0)
    them = crowd()
    them.worker.start()
    wait_until(lambda: them.turns > 5, what="turns of the loop without a claim")
    assert them.states() == [("running", 0)] * 4 + [("available", 0)] * 16
    wait_until(them.all_done, what="all done")
    assert them.states() == [("finished", 0)] * 20


@needs("cheap")
def test_a_drain_waits_for_jobs_that_wait_for_subprocesses(
    crowd: Callable[..., Crowd], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would leave jobs behind that it released, to be run later."""
    monkeypatch.setattr("sqlq.worker.run.executor.ISOLATED_UNSTARTED_SECONDS", 0.0)
    them = crowd(drain=True)
    them.worker.start()
    wait_until(lambda: them.turns > 5, what="turns of the loop without a claim")
    wait_until(them.all_done, what="all done")
    assert them.states() == [("finished", 0)] * 20
    assert them.worker.join("20s")


# -- deadlines -----------------------------------------------------------------------------------------------


def test_a_cancel_after_the_loop_is_closed_blocks_nothing() -> None:
    """It comes from a thread that has others to see to as well."""

    async def meanwhile() -> Callable[[], object]:
        return call._canceller()

    job = running(1)
    job.on_cancel(asyncio.run(meanwhile()))
    job.cancel()
    assert job.stop_requested


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


def test_a_handler_that_returns_past_its_timeout_has_timed_out(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Deadlines, "start", lambda self: None)  # whose thread would cancel it before

    @app.task(name="t", timeout="1ms", max_attempts=1)
    def handler() -> str:
        began = time.monotonic()
        while time.monotonic() < began + 0.002:
            pass
        return "done"

    job = app.enqueue(handler.new())
    assert app.worker(drain=True).run().failed == 1
    assert app.jobs.get(job.id).reason == "timeout"


def test_an_ended_attempt_does_not_count_as_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sqlq.worker.run.lease.OVERDUE_SECONDS", 0.0)
    stuck: list[int] = []
    deadlines = Deadlines(lambda job: stuck.append(job.id))
    ended, goes_on = running(1, timeout_ms=1), running(2, timeout_ms=1)
    for job in (ended, goes_on):
        job.mark_started()
    ended.ended = True
    deadlines.watch([ended, goes_on])
    deadlines.start()
    try:
        wait_until(lambda: 2 in stuck, what="the one that goes on")
    finally:
        deadlines.close()
    assert stuck == [2]


def test_a_cancelled_handler_past_its_timeout_counts_as_stuck(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sqlq.worker.run.lease.OVERDUE_SECONDS", 0.0)
    stuck: list[int] = []
    deadlines = Deadlines(lambda job: stuck.append(job.id))
    job = running(1, timeout_ms=200)
    job.mark_started()
    deadlines.watch([job])
    deadlines.start()
    try:
        deadlines.request_stop(job)
        wait_until(lambda: stuck == [1], timeout=20, what="the one that goes on past its timeout")
    finally:
        deadlines.close()
    assert job.timed_out


# -- outcomes while the database is away ---------------------------------------------------------------------


@pytest.mark.parametrize("way", ["max_jobs", "stuck"])
def test_a_process_that_retires_during_an_outage_waits_until_its_outcomes_are_written(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch, way: str
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
    worker = app.worker(concurrency=5, max_jobs=5 if way == "max_jobs" else None).start()
    for _ in range(3):
        assert refused.acquire(timeout=60)
    if way == "stuck":
        worker._retire(Retire("a handler does not stop"))
    wait_until(lambda: worker._retirement, what="it retiring")
    for _ in range(3):
        assert refused.acquire(timeout=60), "it tries on"
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
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    connect = sqlite3.connect

    def may_fail(*arguments: Any, **options: Any) -> Any:
        Blinks.query(sqlite3.SQLITE_CANTOPEN)
        return connect(*arguments, **options, factory=Blinks)

    monkeypatch.setattr(sqlite3, "connect", may_fail)  # which SQLAlchemy does not call
    monkeypatch.setattr(Blinks, "left", 3 if when == "starting" else 0)
    task = app.task(name="t")(lambda: None)
    with working(app):
        if when == "idle":
            assert app.result(app.enqueue(task.new()), "60s") is None
            Blinks.left = 3
        wait_until(lambda: not Blinks.left, timeout=20, what="it asking on")
        assert app.result(app.enqueue(task.new()), "60s") is None


@needs("file")
def test_a_file_that_is_gone_for_a_short_time_ends_no_worker(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has a sentence and no traceback about a file that is moved aside, for example to restore it."""
    caplog.set_level(logging.DEBUG, "sqlq.worker")
    commits = itertools.count()
    monkeypatch.setattr(WatchingWake, "commits", lambda self: next(commits))
    task = app.task(name="t")(lambda: None)
    file = Path(app.database.engine.url.database or "")
    with working(app):
        assert app.result(app.enqueue(task.new()), "60s") is None
        aside = file.rename(file.with_suffix(".aside"))

        def asked_on() -> bool:
            app.database.close_idle()  # so that the next query opens it
            return "operators want" in caplog.text and ": there is no database file" in caplog.text

        wait_until(asked_on, timeout=30, what="it asking on")
        aside.rename(file)
        assert app.result(app.enqueue(task.new()), "60s") is None
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


REFUSE = {
    "sqlite": ["CREATE TRIGGER refuse BEFORE INSERT ON {} BEGIN SELECT RAISE(ABORT, 'refused'); END"],
    "postgresql": [
        "CREATE OR REPLACE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'refused'; END $$",
        "CREATE TRIGGER refuse BEFORE INSERT ON {} FOR EACH ROW EXECUTE FUNCTION refuse()",
    ],
    "mariadb": [
        "CREATE TRIGGER refuse BEFORE INSERT ON {} FOR EACH ROW "
        "SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'refused'",
    ],
}


def test_a_refused_outcome_counts_while_the_supervisor_renews(
    app: sqlq.App, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """Else it would run for ever: as a job claimed without its worker's knowing it would go back
    uncounted."""
    ran: list[int] = []
    task = app.task(name="t", max_attempts=2, backoff="0s")(lambda: ran.append(1))
    with engine.begin() as conn:
        for statement in REFUSE[engine.dialect.name]:
            conn.exec_driver_sql(statement.format("finished_jobs"))
    job = app.enqueue(task.new())

    def supervise(worker: Any) -> bool:
        """Renew the jobs in the worker's name, as a supervisor does, and notify it."""
        sent_at = time.monotonic()
        with app.database.begin() as conn:
            _, renewed = workers.stand_in(conn, [worker.id], lease_ms=30_000)
        worker._leases.renewed_for_us(renewed[worker.id], sent_at, entered=True)
        return app.jobs.get(job.id).state == "failed"

    with working(app) as worker:
        wait_until(lambda: supervise(worker), timeout=60, what="the attempts spent")
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


def test_the_final_failure_of_a_lost_job_is_logged_with_its_exception(
    app: sqlq.App, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    task = app.task(name="t", max_attempts=1)(lambda: None)
    job = app.enqueue(task.new())
    with app.database.begin() as conn:
        claim_on(conn, limit=1, owner="gone", lease_ms=1_000)
    with engine.begin() as conn:
        conn.execute(text("UPDATE jobs SET lease_expires_at = reserved_at"))
    with working(app):
        wait_until(lambda: app.jobs.get(job.id).state == "failed", what="the rescue")
    (failed,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert failed.exc_info is not None
    assert isinstance(failed.exc_info[1], sqlq.errors.WorkerLostError)


# -- what a crash would run again ----------------------------------------------------------------------------


@needs("file")
def test_unwritten_outcomes_bound_the_started_jobs_on_sqlite(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that has run, and whose outcome is not written, runs again after a crash."""
    monkeypatch.setattr(settling, "MAX_UNWRITTEN_IN_A_FILE", 5)
    ran: list[int] = []
    task = app.task(name="t")(lambda: ran.append(1))
    locked, free = threading.Event(), threading.Event()
    settled = settle.settle

    def waits(*args: Any, **options: Any) -> Any:
        locked.set()
        assert free.wait(30)
        return settled(*args, **options)

    monkeypatch.setattr(settle, "settle", waits)
    worker = app.worker(concurrency=2)
    claim, held = worker._claimer.claim, threading.Event()

    def many(limit: int, **options: Any) -> Any:
        claimed = claim(100, **options)
        if claimed:
            held.set()
        return claimed

    monkeypatch.setattr(worker._claimer, "claim", many)
    app.enqueue_many([task.new() for _ in range(100)])
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        assert held.wait(20)
        assert locked.wait(20)
        wait_until(lambda: len(ran) >= 5, what="as many as may have run")
        wait_until(lambda: worker._executors.load()[0] == 0, what="what had started ended")
        assert len(ran) <= 5 + 2
    finally:
        free.set()
        wait_until(lambda: len(ran) == 100, what="all of them run")
        worker.stop()
        thread.join(20)


# -- threads that begin when they are first needed -----------------------------------------------------------


@pytest.fixture
def unswept(app: sqlq.App, monkeypatch: pytest.MonkeyPatch) -> Worker:
    """A worker without the sweeps that make up for what was not looked at."""
    monkeypatch.setattr(services.Unblock, "run", lambda self: 3600.0)
    return app.worker()


@pytest.fixture
def limited(app: sqlq.App) -> Any:
    return app.task(name="t", limit=sqlq.Limit("api", running=1))(lambda: None)


def are_finished(app: sqlq.App, number: int) -> bool:
    return len(app.jobs.list(state="finished")) == number


def test_a_step_is_unblocked_without_the_unblock_thread(
    app: sqlq.App,
    limited: Any,
    unswept: Worker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    flow = sqlq.Flow()
    flow.add(limited.new())
    app.enqueue(flow)
    app.enqueue(limited.new())
    refuse_threads(monkeypatch, "sqlq-flow")
    with caplog.at_level(logging.DEBUG, "sqlq.worker"), unswept:
        wait_until(lambda: are_finished(app, 2), what="the second of the key")
    assert "the thread sqlq-flow cannot be started now: can't start new thread" in caplog.text
    assert "settling jobs failed" not in caplog.text


@needs("cheap")
def test_admissions_begin_when_a_thread_can_be_started(
    app: sqlq.App, limited: Any, unswept: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = threading.Event()
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "sqlq-limit":
            refused.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    app.enqueue_many([limited.new(), limited.new()])
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        unswept.start()
        assert refused.wait(30)
    try:
        wait_until(lambda: are_finished(app, 2), what="both, admitted one after the other")
    finally:
        unswept.stop()
        assert unswept.join("30s")
