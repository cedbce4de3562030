"""Requests of operators to a worker, on every database: pause, resume, stop, restart, and cancel its jobs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import sqlq
from sqlq.errors import ConfigurationError
from sqlq.schema.types import now
from sqlq.store.workers import workers
from sqlq.worker.maintain import services
from sqlq.worker.maintain.services import PolledService, Service
from sqlq.worker.wait import poller
from tests.kit import wait_until, working

OBEYED_SECONDS = 2.0
BUSY_MACHINE = 6.0
"""How much longer a busy machine may take until it counts as a failure."""


class Held:
    """A task whose job runs until it is let go."""

    def __init__(self, app: sqlq.App) -> None:
        self.started, self.go = threading.Event(), threading.Event()
        self.stopped = False

        @app.task(name="held")
        def held() -> None:
            self.started.set()
            while not self.go.wait(0.01):
                if sqlq.current_job().should_stop():
                    self.stopped = True
                    return

        self.task = held


@pytest.fixture
def held(app: sqlq.App) -> Iterator[Held]:
    held = Held(app)
    yield held
    held.go.set()


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers look often where a test does not measure how soon they do."""
    monkeypatch.setattr(poller, "IDLE_POLL_SECONDS", 0.2)


def state(app: sqlq.App) -> str:
    (worker,) = app.workers.list()
    return worker.state


def is_idle(app: sqlq.App) -> bool:
    return [worker.state for worker in app.workers.list()] == ["idle"]


def test_a_paused_worker_claims_nothing_and_finishes_its_jobs(app: sqlq.App, held: Held, noop: Any) -> None:
    running = app.enqueue(held.task.new())
    with working(app) as worker:
        assert held.started.wait(20)
        worker.pause()
        wait_until(lambda: state(app) == "paused")
        waiting = app.enqueue(noop.new())
        held.go.set()
        wait_until(lambda: app.jobs.get(running.id).state == "finished")
        assert app.jobs.get(waiting.id).state == "available"
        worker.resume()
        wait_until(lambda: app.jobs.get(waiting.id).state == "finished")
        wait_until(lambda: is_idle(app))


@pytest.mark.usefixtures("often")
def test_only_the_newest_request_counts_and_once(app: sqlq.App) -> None:
    with working(app) as worker:
        wait_until(lambda: is_idle(app))
        app.workers.pause(all=True)
        wait_until(lambda: worker._control.is_paused)
        worker.resume()
        wait_until(lambda: is_idle(app))
        looked = worker._last_look.at()
        app.workers._database.run(lambda conn: workers._write(conn, [worker.id], cancels_at=now()))
        wait_until(lambda: worker._control._cancels_at is not None and worker._last_look.at() >= looked)
        assert not worker._control.is_paused, "the row still says pause, and it was obeyed before"


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("word", ["stop", "restart"])
def test_a_stopped_worker_in_a_program_ends_its_jobs(app: sqlq.App, held: Held, noop: Any, word: str) -> None:
    running = app.enqueue(held.task.new())
    worker = app.worker(grace="0s").start()
    assert held.started.wait(20)
    getattr(app.workers, word)(all=True)
    wait_until(lambda: state(app) == "stopping")
    waiting = app.enqueue(noop.new())
    held.go.set()
    assert worker.join("20s")
    assert [app.jobs.get(job.id).state for job in (running, waiting)] == ["finished", "available"]
    assert app.workers.list() == []


def test_a_running_job_sees_a_cancel_before_the_next_heartbeat(app: sqlq.App, held: Held) -> None:
    job = app.enqueue(held.task.new())
    with working(app, lease="1d"):
        assert held.started.wait(20)
        began = time.monotonic()
        assert app.jobs.cancel([job.id]) == {job.id: "requested"}
        wait_until(lambda: app.jobs.get(job.id).state == "cancelled")
        assert time.monotonic() - began < OBEYED_SECONDS + BUSY_MACHINE
    assert held.stopped


def test_a_worker_runs_each_service_of_the_maintenance(app: sqlq.App) -> None:
    known = {each for each in vars(services).values() if isinstance(each, type) and issubclass(each, Service)}
    run = {type(each) for each in app.worker()._maintenance._due}
    missing = {each.__name__ for each in known - run - {Service, PolledService}}
    assert not missing, f"worker/maintain/maintenance.py: Maintenance runs no {missing}"


@pytest.mark.usefixtures("often")
def test_a_pause_of_all_holds_for_later_queues_and_workers(app: sqlq.App, noop: Any) -> None:
    with working(app) as worker:
        wait_until(lambda: is_idle(app))
        assert app.queues.pause(all=True)
        assert not app.queues.pause(all=True)
        wait_until(lambda: worker._control.is_paused)
        jobs = app.enqueue_many([noop.new(), noop.new().set(queue="made later")])
        assert app.worker(drain=False, concurrency=1)._control.is_paused is False
        with working(app) as other:
            wait_until(lambda: other._control.is_paused, what="the second worker hearing of it as it starts")
            assert [app.jobs.get(job.id).state for job in jobs] == ["available", "available"]
            assert app.queues.resume(all=True)
            assert not app.queues.resume(all=True)
            wait_until(lambda: all(app.jobs.get(job.id).state == "finished" for job in jobs))


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("queue", ["default", None])
def test_a_pause_with_an_end_ends_by_itself(app: sqlq.App, noop: Any, queue: str | None) -> None:
    with working(app):
        wait_until(lambda: is_idle(app))
        if queue is None:
            app.queues.pause(all=True, duration="1s")
            wait_until(lambda: state(app) == "paused")
        else:
            app.queues.pause(queue, duration="1s")
        job = app.enqueue(noop.new())
        assert app.jobs.get(job.id).state == "available"
        wait_until(lambda: app.jobs.get(job.id).state == "finished")
    assert not app.queues.pauses().named
    assert app.queues.pauses().all is None


def test_the_last_end_of_a_pause_counts(app: sqlq.App) -> None:
    assert app.queues.pause("mail", duration="1h")
    assert app.queues.pauses().named["mail"].until is not None
    assert not app.queues.pause("mail")
    assert app.queues.pauses().named["mail"].until is None
    assert not app.queues.pause("mail", duration="1h")
    assert app.queues.resume("mail")
    assert app.queues.pause("mail")
    assert app.queues.pauses().named["mail"].until is None, "an end that was resumed before is forgotten"


def test_workers_are_called_by_name_host_process_or_id(app: sqlq.App) -> None:
    labels: dict[str, Any] = {"version": "0", "queues": None, "concurrency": 1}
    with app.database.begin() as conn:
        for id, host, pid, supervisor, name in (
            ("a", "x", 1, 10, "mail"),
            ("b", "x", 2, 10, "mail"),
            ("c", "x", 3, None, None),
            ("d", "y", 1, 10, None),
        ):
            workers.register(conn, id=id, host=host, pid=pid, supervisor_pid=supervisor, name=name, **labels)
    for names, expected in (
        (["mail"], "ab"),
        (["a"], "ab"),  # all processes of one supervisor are asked together
        (["x:2"], "ab"),
        (["y:10"], "d"),
        (["c"], "c"),
        (["x"], "abc"),
        (["c", "y"], "cd"),
    ):
        assert "".join(sorted(worker.id for worker in app.workers.pause(*names))) == expected, names
    with pytest.raises(ConfigurationError, match=r"no worker that is alive is called 'z'.*nobody was asked"):
        app.workers.stop("c", "z")
    with app.database.read() as conn:
        assert {row.asked for row in workers.entered(conn)} == {"pause"}
    for names, all in (([], False), (["c"], True)):
        with pytest.raises(ConfigurationError, match="by name, or all of them, and not both"):
            app.workers.restart(*names, all=all)
    with pytest.raises(ConfigurationError, match=r"name is \['mail'\]: it must be text"):
        app.workers.pause(["mail"])  # type: ignore[arg-type]
