"""The effect of the options of workers, and how a program starts and stops one."""

from __future__ import annotations

import itertools
import logging
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

import sqlq
from sqlq.errors import ConfigurationError
from sqlq.store.workers import look as workers_look
from sqlq.store.workers import workers
from sqlq.worker.maintain.control import Control
from sqlq.worker.options import WorkerOptions
from sqlq.worker.settle.settle import Counts, Settler
from sqlq.worker.supervise.supervisor import Supervisor
from sqlq.worker.wait import poller
from tests.kit import execute, needs, supervising, wait_until, working


@needs("listen")
def test_a_host_polls_as_often_as_its_setting(app: sqlq.App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poller, "IDLE_POLL_SECONDS", 3600.0)
    ran: list[int] = []
    app.task(name="t")(lambda: ran.append(1))
    with working(app, poll="20ms") as worker:
        wait_until(lambda: worker._wake.is_resting, what="the worker resting")
        execute(app.database.engine, "INSERT INTO jobs (task) VALUES ('t')")  # with no notification
        wait_until(lambda: ran, what="a look at the job")


@needs("file")
def test_an_outage_is_no_time_without_work(app: sqlq.App, monkeypatch: pytest.MonkeyPatch) -> None:
    look, failures, worked = workers_look.due_in, itertools.count(), threading.Event()
    task = app.task(name="t")(worked.set)

    def away(*arguments: Any) -> dict[str, float]:
        if worked.is_set() and (failure := next(failures)) < 2:
            time.sleep(0.2)  # noqa: TID251 - plays an answer that takes long
            if failure == 1:
                app.enqueue(task.new())
            raise OperationalError("SELECT 1", {}, sqlite3.OperationalError("disk I/O error"))
        return look(*arguments)

    monkeypatch.setattr(workers_look, "due_in", away)
    app.enqueue(task.new())
    assert app.worker(max_idle="100ms").run().finished == 2


@needs("cheap")
def test_a_worker_stops_whatever_the_database_raises(app: sqlq.App, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook of the host may raise so, in place of the driver's error."""

    def raises(*given: Any, **more: Any) -> None:
        raise LookupError("the host's own")

    monkeypatch.setattr(Control, "write", raises)
    monkeypatch.setattr(workers, "leave", raises)
    app.enqueue(app.task(name="t")(lambda: None).new())
    assert app.worker(drain=True).run().finished == 1


def test_a_supervisor_stops_when_none_of_its_children_has_work(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sqlq.worker")
    command = [sys.executable, "-m", "tests.programs.children", "idle"]
    options = WorkerOptions(processes=2, lease_ms=30_000, grace_ms=0, max_idle_ms=1_000)
    supervisor = Supervisor(command, options, {})
    with supervising(supervisor) as code:
        wait_until(lambda: supervisor.running == 2, what="both reporting")
        assert supervisor.idle_ms == 10
        assert not code.done()
        supervisor.pause()
        assert code.result(60) == 0
    assert "stopping: nothing has come for 1 s" in caplog.text


@needs("cheap")
def test_a_worker_is_started_waited_for_and_stopped(app: sqlq.App) -> None:
    entering, enter = threading.Event(), threading.Event()

    @app.lifespan
    def slow() -> Iterator[None]:
        entering.set()
        enter.wait(30)
        yield

    worker = app.worker()
    with pytest.raises(ConfigurationError, match=r"not started: call start\(\)"):
        worker.wait_until_ready()
    assert worker.start() is worker
    assert entering.wait(30)
    assert [known.state for known in app.workers.list()] == ["starting"]
    with pytest.raises(TimeoutError, match="not ready within 10 ms"):
        worker.wait_until_ready("10ms")
    enter.set()
    worker.wait_until_ready()
    assert worker.join("1ms") is False
    worker.stop()
    assert worker.join("30s") is True
    for begin in (worker.start, worker.run):
        with pytest.raises(ConfigurationError, match="has been started before"):
            begin()
    with pytest.raises(KeyError, match="mine"), app.worker() as failed:
        raise KeyError("mine")
    assert failed.join() is True


@needs("cheap")
def test_a_job_ending_at_its_release_is_settled_once(app: sqlq.App, monkeypatch: pytest.MonkeyPatch) -> None:
    started, go = threading.Event(), threading.Event()

    @app.task(name="t")
    def handler() -> None:
        started.set()
        go.wait(60)

    app.enqueue(handler.new())
    worker = app.worker(grace="0s")
    settle, settled = Settler.settle, []

    def while_it_ends(settler: Settler, job: Any, outcome: Any) -> None:
        settled.append(outcome)
        go.set()
        assert worker._executors.wait_idle(30)
        settle(settler, job, outcome)

    monkeypatch.setattr(Settler, "settle", while_it_ends)
    with worker:
        assert started.wait(60)
    assert len(settled) == 1
    assert worker.counts == Counts(released=1)
