"""A worker that ends by itself, because of its memory or because nothing comes.

Another runs in a thread of a program: start, wait until it is ready, stop.
"""

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
from sqlq.worker.lifecycle import stop
from sqlq.worker.lifecycle.stop import resident_bytes
from sqlq.worker.options import WorkerOptions, checked_bytes, readable_bytes
from sqlq.worker.settle.settle import Counts
from sqlq.worker.supervise.supervisor import Supervisor
from tests.kit import for_each, needs, supervising, wait_until

# -- memory --------------------------------------------------------------------------------------------------


@for_each(
    ("given", "number"),
    [
        ("400MB", 400_000_000),
        ("400M", 400_000_000),
        ("400mb", 400_000_000),
        (" 1.5 GB ", 1_500_000_000),
        ("400MiB", 419_430_400),
        ("2K", 2_000),
        (7, 7),
    ],
)
def test_sizes_are_read_in_bytes(given: str | int, number: int) -> None:
    assert checked_bytes(given, "max_rss") == number


@for_each("given", ["", "0", "400 apples", "-1MB", "MB", 0, -7, True, None, 1.5])
def test_a_bad_size_is_reported_in_one_sentence(given: Any) -> None:
    with pytest.raises(ConfigurationError, match='give a size such as "400MB"'):
        checked_bytes(given, "max_rss")


def test_a_size_is_formatted_for_people() -> None:
    assert [readable_bytes(number) for number in (1, 412_300_000, 1_540_000_000)] == [
        "1 MB",
        "412 MB",
        "1.5 GB",
    ]
    assert 1_000_000 < resident_bytes() < 1_000_000_000_000


@needs("cheap")
def test_a_bound_below_the_process_is_refused_before_anything_is_claimed(app: sqlq.App) -> None:
    job = app.enqueue(app.task(name="t")(lambda: None).new())
    with pytest.raises(ConfigurationError, match=r"max_rss is 1 MB: this process has \d+ MB before"):
        app.worker(max_rss="1MB", drain=True).run()
    assert app.jobs.get(job.id).attempts == 0
    assert app.workers.list(silent=True) == []


@needs("cheap")
def test_a_worker_that_has_grown_ends_after_its_running_jobs(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stop, "MEASURE_SECONDS", 0.0)
    size, go = [1_000], threading.Event()
    monkeypatch.setattr(stop, "resident_bytes", lambda: size[0])
    told: list[Any] = []

    @app.task(name="grows")
    def grows() -> None:
        size[0] = 3_000_000
        wait_until(lambda: worker._retirement)
        go.set()

    job = app.enqueue(grows.new())
    worker = app.worker(max_rss=2_000_000)
    monkeypatch.setattr(worker._supervision, "leaving", lambda why, replace: told.append((why, replace)))
    assert worker.run().finished == 1
    assert go.is_set()
    assert told == [("it has 3 MB in use, more than 2 MB", True)]
    assert app.jobs.get(job.id).state == "finished"


# -- nothing comes -------------------------------------------------------------------------------------------


def test_an_idle_worker_ends_after_max_idle(app: sqlq.App) -> None:
    task = app.task(name="t")(lambda: None)
    app.enqueue(task.new())
    assert app.worker(max_idle="300ms").run().finished == 1


@needs("cheap")
def test_a_worker_is_not_idle_before_its_first_poll(app: sqlq.App, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a busy machine, where the threads of a worker take long to start."""
    worker = app.worker(max_idle="100ms")
    start = worker._maintenance.start

    def late() -> None:
        time.sleep(0.3)  # noqa: TID251 - plays a start that takes long
        start()

    monkeypatch.setattr(worker._maintenance, "start", late)
    app.enqueue(app.task(name="t")(lambda: None).new())
    assert worker.run().finished == 1


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
def test_a_worker_runs_once(app: sqlq.App) -> None:
    worker = app.worker(drain=True)
    worker.run()
    with pytest.raises(ConfigurationError, match="has been started before"):
        worker.run()


@for_each("given", [0, -1, 1.5, "two"])
def test_max_jobs_is_a_whole_number(app: sqlq.App, given: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"max_jobs is .*: it must be a whole number from 1 to"):
        app.worker(max_jobs=given)


@needs("cheap")
def test_a_worker_stops_in_good_order_whatever_the_database_raises(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hook of the host may raise so, in place of the driver's error."""

    def raises(*given: Any, **more: Any) -> None:
        raise LookupError("the host's own")

    worker = app.worker(drain=True)
    monkeypatch.setattr(worker._control, "write", raises)
    monkeypatch.setattr("sqlq.store.workers.workers.leave", raises)
    app.enqueue(app.task(name="t")(lambda: None).new())
    assert worker.run().finished == 1


@needs("cheap")
def test_a_paused_or_busy_worker_is_not_idle(app: sqlq.App) -> None:
    started, go = threading.Event(), threading.Event()

    @app.task(name="long")
    def long() -> None:
        started.set()
        go.wait(30)

    app.enqueue(long.new())
    worker = app.worker(max_idle="50ms").start()
    assert started.wait(30)
    begun = time.monotonic()
    wait_until(lambda: (worker._bounds._worked_at or 0.0) > begun + 0.2)
    worker.pause()
    go.set()
    wait_until(lambda: not len(worker._leases))
    begun = time.monotonic()
    wait_until(lambda: (worker._bounds._worked_at or 0.0) > begun + 0.2)
    worker.resume()
    assert worker.join("30s")


REPORTS = """
import sys
from sqlq.worker.ipc.pipe import Pipe
link = Pipe.inherited(int(sys.argv[1]))
generation = link.receive()["generation"]
link.send(report={"counts": {}, "running": 1, "idle_ms": (5_000, 10)[generation]})
while (message := link.receive()) is not None and "stop" not in message:
    link.send(report={"counts": {}, "running": 0, "idle_ms": 1_000})
"""
"""A worker process without work: the first for long, the second since it was paused."""


def test_a_supervisor_stops_when_none_of_its_children_has_work(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sqlq.worker")
    command = [sys.executable, "-c", REPORTS]
    options = WorkerOptions(processes=2, lease_ms=30_000, grace_ms=0, max_idle_ms=1_000)
    supervisor = Supervisor(command, options, {})
    with supervising(supervisor) as code:
        wait_until(lambda: supervisor.running == 2, what="both reporting")
        assert supervisor.idle_ms == 10
        assert not code.done()
        supervisor.pause()
        assert code.result(60) == 0
    assert "stopping: nothing has come for 1 s" in caplog.text


# -- in a thread ---------------------------------------------------------------------------------------------


def test_a_worker_works_while_a_block_runs(app: sqlq.App) -> None:
    task = app.task(name="t")(lambda: None)
    with app.worker() as worker:
        assert [each.id for each in app.workers.list()] == [worker.id]
        job = app.enqueue(task.new())
        wait_until(lambda: app.jobs.get(job.id).state == "finished")
    assert app.workers.list() == []


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
    with pytest.raises(TimeoutError, match="not ready within 10 ms"):
        worker.wait_until_ready("10ms")
    enter.set()
    worker.wait_until_ready()
    assert worker.join("1ms") is False
    worker.stop()
    assert worker.join("30s") is True
    with pytest.raises(ConfigurationError, match="has been started before"):
        worker.start()


@needs("cheap")
def test_a_failed_lifespan_is_raised_by_the_worker_block(app: sqlq.App) -> None:
    @app.lifespan
    def fails() -> Iterator[None]:
        raise ValueError("no model here")
        yield

    with pytest.raises(sqlq.SqlqError, match="no model here"), app.worker():
        pytest.fail("it is not ready")


@needs("cheap")
def test_an_exception_of_the_worker_block_is_raised(app: sqlq.App) -> None:
    with pytest.raises(KeyError, match="mine"), app.worker() as worker:
        raise KeyError("mine")
    assert worker.join() is True


@needs("cheap")
def test_a_handler_that_ends_as_it_is_released_is_settled_once(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, go = threading.Event(), threading.Event()

    @app.task(name="t")
    def handler() -> None:
        started.set()
        go.wait(60)

    app.enqueue(handler.new())
    worker = app.worker(grace="0s")
    settle, settled = worker._settler.settle, []

    def while_it_ends(job: Any, outcome: Any) -> None:
        settled.append(outcome)
        go.set()
        assert worker._executors.wait_idle(60)
        settle(job, outcome)

    monkeypatch.setattr(worker._settler, "settle", while_it_ends)
    with worker:
        assert started.wait(60)
    assert len(settled) == 1
    assert worker.counts == Counts(released=1)
