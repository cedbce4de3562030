"""A stopped worker ends soon after its grace time, whatever the database does.

The database is away, swallows messages, has no tables any more, or keeps them locked. The log names jobs
whose outcome could not be written. They run again when their leases have run out.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import NullPool, create_engine, make_url, text
from sqlalchemy.exc import DBAPIError, OperationalError

import sqlq
from sqlq.database.database import Database
from sqlq.database.timeouts import waits_while
from sqlq.errors import SchemaVersionError
from sqlq.worker.ipc.parent import ORPHANED_MS
from sqlq.worker.lifecycle.stop import Grace
from tests.kit import needs, wait_until
from tests.kit.databases import SERVERS
from tests.kit.processes import ROOT, is_alive, run_program
from tests.kit.proxy import Proxy
from tests.kit.scenario import Scenario
from tests.programs import play
from tests.programs.notes import notes

pytestmark = pytest.mark.integration

GRACE_SECONDS, SOON_SECONDS = 1.0, 5.0
BUSY_SECONDS = 5.0
"""Seconds that a loaded machine may take beyond that."""
Breaks = Callable[[str, Proxy, ExitStack], object]


def is_away(url: str, proxy: Proxy, until_the_end: ExitStack) -> None:
    proxy.target = 1  # where nobody listens
    proxy.drop()


def swallows(url: str, proxy: Proxy, until_the_end: ExitStack) -> None:
    proxy.deaf()


def has_no_tables(url: str, proxy: Proxy, until_the_end: ExitStack) -> None:
    schema = make_url(url).database if url.startswith("mariadb") else "public CASCADE"
    while True:  # the worker reads tables meanwhile, and one of the two loses a deadlock
        try:
            with administrator(url) as conn:
                conn.execute(text(f"DROP SCHEMA {schema}"))
            return
        except OperationalError as error:
            if "deadlock" not in str(error):
                raise


def is_locked(url: str, proxy: Proxy, until_the_end: ExitStack) -> None:
    conn = until_the_end.enter_context(administrator(url))
    lock = text(LOCKS[make_url(url).get_backend_name()])
    try:
        conn.execute(lock)
    except OperationalError:  # a look of the worker's that reads both tables won a deadlock
        conn.rollback()
        conn.execute(lock)


LOCKS = {
    "sqlite": "BEGIN IMMEDIATE",
    "postgresql": "LOCK TABLE jobs, sqlq_workers IN ACCESS EXCLUSIVE MODE",
    "mariadb": "LOCK TABLES jobs WRITE, sqlq_workers WRITE",
}


@contextmanager
def administrator(url: str) -> Iterator[Any]:
    engine = create_engine(url, poolclass=NullPool)
    with engine.begin() as conn:
        yield conn


WAYS = [is_away, swallows, has_no_tables, is_locked]


@pytest.mark.parametrize(
    ("database_url", "breaks"),
    [*((server, breaks) for server in SERVERS for breaks in WAYS), ("sqlite", is_locked)],
    indirect=["database_url"],
)
def test_a_worker_in_a_thread_ends_soon_after_its_grace_time(
    database_url: str, proxy: Proxy, breaks: Breaks, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    app = sqlq.App(database_url if database_url.startswith("sqlite") else proxy.url(database_url))
    began, go = threading.Event(), threading.Event()

    @app.task(name="wait")
    def wait() -> None:
        began.set()
        go.wait()

    job = app.enqueue(wait.new())
    worker = app.worker(concurrency=1, grace=f"{GRACE_SECONDS}s").start()
    with ExitStack() as until_the_end:
        assert began.wait(30)
        breaks(database_url, proxy, until_the_end)
        go.set()
        wait_until(lambda: list(worker._settler._pending) == [(job.id, 1)], what="the outcome on its way")
        told = time.monotonic()
        worker.stop()
        with suppress(SchemaVersionError):  # a look at the tables' version may have come before the stop
            assert worker.join("30s"), "it does not end"
        took = time.monotonic() - told
    app.close()
    assert took < GRACE_SECONDS + SOON_SECONDS + BUSY_SECONDS
    assert f"could not be written before leaving: {job.id};" in caplog.text


@needs("server")
@pytest.mark.variants
@pytest.mark.parametrize("breaks", WAYS)
@pytest.mark.parametrize("dies", [False, True], ids=["told", "orphaned"])
def test_worker_processes_end_soon_after_their_grace_time(
    tmp_path: Path, database_url: str, proxy: Proxy, breaks: Breaks, *, dies: bool
) -> None:
    """By themselves, and not because their supervisor kills them."""
    grace = ("--grace", f"{GRACE_SECONDS}s")
    with (
        ExitStack() as until_the_end,
        Scenario(tmp_path / "play", database_url, "play", anew=True) as scenario,
        scenario.working(*grace, url=proxy.url(database_url)) as worker,
    ):
        job = scenario.enqueue("waits")
        wait_until(lambda: scenario.started(job), what="the job running")
        (child,) = worker.children()
        breaks(database_url, proxy, until_the_end)
        scenario.touch("go")
        told = time.monotonic()
        worker.process.send_signal(signal.SIGKILL if dies else signal.SIGTERM)
        worker.process.wait(40)
        wait_until(lambda: not is_alive(child), timeout=40, what="the worker process gone")
        took = time.monotonic() - told
        assert took < (ORPHANED_MS / 1000 if dies else GRACE_SECONDS) + SOON_SECONDS + BUSY_SECONDS
        assert worker.said("could not be written before leaving")
        assert not worker.said("did not end in time")


@needs("server")
def test_a_stopping_thread_waits_no_longer_for_the_database(database_url: str) -> None:
    sleep = "sleep" if database_url.startswith("mariadb") else "pg_sleep"
    with closing(Database(make_url(database_url))) as database:
        ends_at = time.monotonic() + 0.5
        with waits_while(lambda: ends_at - time.monotonic()):
            with pytest.raises(DBAPIError, match="no answer"), database.begin() as conn:
                conn.execute(text(f"SELECT {sleep}(25)"))
            assert time.monotonic() < ends_at + 20
        with database.begin() as conn:
            conn.execute(text(f"SELECT {sleep}(0.2)"))


def test_the_timeout_for_outcomes_ends_after_the_grace_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeated calls do not move its end."""
    monkeypatch.setattr("sqlq.worker.lifecycle.stop.LAST_SETTLES_SECONDS", 0.1)
    grace = Grace(50, lambda: None)
    assert grace.time_left() == float("inf")
    grace.stop(None)
    assert 0.0 < grace.time_left() <= 0.15
    wait_until(lambda: grace.time_left() == 0.0, timeout=10, what="its end")


@needs("cheap")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("handler", ["none", "own"])
def test_run_in_a_program_stops_in_good_order_at_a_signal(
    app: sqlq.App, tmp_path: Path, database_url: str, number: signal.Signals, handler: str
) -> None:
    """A handler of the program's own is called instead, and each one is there again afterwards."""
    job = app.enqueue(play.waits.new())
    environment = {**os.environ, "SQLQ_DATABASE_URL": database_url, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.programs.own_worker", handler]
    with subprocess.Popen(command, cwd=tmp_path, env=environment) as program:
        wait_until(lambda: notes(tmp_path), what="the job running")
        program.send_signal(number)
        wait_until(lambda: app.workers.list()[0].state == "stopping", what="it stopping")
        assert (tmp_path / "own").exists() is (handler == "own")
        (tmp_path / "go").touch()
        assert program.wait(30) == 5, "what follows run() goes on"
    assert app.jobs.get(job.id).state == "finished"


def test_a_child_forked_beside_a_worker_takes_signals() -> None:
    done = run_program("-W", "ignore::DeprecationWarning", "-m", "tests.programs.forks")
    assert done.returncode == 0, done.stderr
