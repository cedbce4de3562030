"""The lifespan of an App in each process: its thread or task, and its exit at each stop but a kill."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import sqlq
from sqlq.errors import ConfigurationError
from sqlq.testing import drain, inline
from sqlq.worker.lifecycle import stop
from tests.kit import needs, wait_until
from tests.kit.processes import worker_process
from tests.programs.lifespans import acts


def test_handlers_get_the_value_of_the_lifespan(app: sqlq.App) -> None:
    told: list[Any] = []

    @app.lifespan
    def pool() -> Iterator[dict[str, int]]:
        told.append("entered")
        yield {"size": 3}
        told.append("left")

    @app.task(name="t")
    def handler() -> Any:
        told.append("handler")
        return sqlq.current_job().lifespan

    job = app.enqueue(handler.new())
    assert drain(app).finished == 1
    assert app.jobs.get(job.id).result == {"size": 3}
    assert told == ["entered", "handler", "left"]
    drain(app)
    assert told[-2:] == ["entered", "left"], "as long as the call lasts"


def test_an_asynchronous_lifespan_runs_in_one_task_on_the_handlers_loop(app: sqlq.App) -> None:
    told: list[Any] = []
    beaten = asyncio.Event()

    @app.lifespan
    async def clients() -> AsyncIterator[asyncio.AbstractEventLoop]:
        async def beat() -> None:
            await asyncio.sleep(0.01)
            beaten.set()

        async with asyncio.timeout(None), asyncio.TaskGroup() as group:
            group.create_task(beat())
            yield asyncio.get_running_loop()
            told.append("leaving")
        told.append("left")

    @app.task(name="a")
    async def asynchronous() -> bool:
        await beaten.wait()
        return sqlq.current_job().lifespan is asyncio.get_running_loop()

    job = app.enqueue(asynchronous.new())
    assert drain(app).finished == 1
    assert app.jobs.get(job.id).result is True
    assert told == ["leaving", "left"]


def failing() -> Iterator[None]:
    raise OSError("no broker\nat all")
    yield


async def afailing() -> AsyncIterator[None]:
    raise OSError("no broker\nat all")
    yield


@pytest.mark.parametrize("lifespan", [failing, afailing])
def test_a_worker_whose_lifespan_fails_does_not_start(
    app: sqlq.App, lifespan: Any, caplog: pytest.LogCaptureFixture
) -> None:
    app.lifespan(lifespan)
    job = app.enqueue(app.task(name="t")(lambda: None).new())
    says = r"^the lifespan .*failing failed: OSError: no broker$"
    with pytest.raises(sqlq.SqlqError, match=says) as caught, app.worker():
        pytest.fail("it is not ready")
    assert isinstance(caught.value.__cause__, OSError)
    assert "in afailing" in caplog.text or "in failing" in caplog.text, "the log has its traceback"
    assert (app.jobs.get(job.id).state, app.workers.list()) == ("available", [])


def test_a_worker_whose_asynchronous_lifespan_ends_by_itself_retires(
    app: sqlq.App, caplog: pytest.LogCaptureFixture
) -> None:
    @app.lifespan
    async def clients() -> AsyncIterator[None]:
        async def lose_connection() -> None:
            raise ConnectionError("gone")

        async with asyncio.TaskGroup() as group:
            group.create_task(lose_connection())
            yield

    app.worker().run()
    assert "the lifespan has ended by itself" in caplog.text
    assert "ConnectionError: gone" in caplog.text


def hanging_when_left() -> Iterator[None]:
    yield
    threading.Event().wait(60)


async def ahanging_when_left() -> AsyncIterator[None]:
    yield
    threading.Event().wait(60)  # the loop stands still


def hanging_when_entered() -> Iterator[None]:
    threading.Event().wait(60)
    yield


@pytest.mark.parametrize("lifespan", [hanging_when_left, ahanging_when_left, hanging_when_entered])
def test_a_hanging_lifespan_ends_with_the_grace_time(
    app: sqlq.App, lifespan: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop, "MIN_END_SECONDS", 0.2)
    app.lifespan(lifespan)
    worker = app.worker(grace="100ms").start()
    if lifespan is not hanging_when_entered:
        wait_until(app.workers.list)
    worker.stop()
    assert worker.join("10s")
    assert worker.left_running
    assert "hanging_when" in caplog.text
    assert "does not end, and is left behind" in caplog.text


def test_an_error_at_the_lifespans_exit_is_logged(app: sqlq.App, caplog: pytest.LogCaptureFixture) -> None:
    @app.lifespan
    def noted() -> Iterator[None]:
        yield
        raise OSError("will not close")

    drain(app)
    assert "noted failed when it was left" in caplog.text
    assert "will not close" in caplog.text


def test_inline_takes_a_lifespan_value_and_an_app_one_lifespan() -> None:
    app = sqlq.App("sqlite://")
    assert app.lifespan(failing) is failing
    with pytest.raises(ConfigurationError, match=r"afailing, but .*\.failing is there already: enter both"):
        app.lifespan(afailing)
    task = app.task(name="t")(lambda: sqlq.current_job().lifespan)
    for value in ({"fake": 1}, None):
        with inline(app, lifespan=value) as ran:
            app.enqueue(task.new())
        assert ran.jobs[0].result == value


PLAY = "tests.programs.lifespans"


@pytest.mark.variants
@pytest.mark.parametrize("kind", ["def", "async def"])
@pytest.mark.parametrize("stop", ["TERM", "--max-jobs"])
@needs("cheap")
def test_the_lifespan_is_exited_at_each_kind_of_stop(
    app: sqlq.App, database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, stop: str
) -> None:
    monkeypatch.setenv("PLAY", kind)
    options = [] if stop == "TERM" else ["--max-jobs", "1"]
    app.enqueue(app.named(f"{PLAY}.wait").new())
    with worker_process(tmp_path, f"{PLAY}:app", database_url, *options, ready=False) as worker:
        wait_until(lambda: ["enter", "job"] in acts(tmp_path).values(), 20)
        if stop == "TERM":
            worker.process.send_signal(signal.SIGTERM)
            wait_until(lambda: worker.said("stopping"))
        (tmp_path / "go").touch()
        if stop == "--max-jobs":
            wait_until(lambda: ["enter"] in acts(tmp_path).values(), 20, what="another process in its place")
            worker.process.send_signal(signal.SIGTERM)
        assert worker.process.wait(20) == 0, worker.log.read_text()
    first, *others = acts(tmp_path).values()
    assert first == ["enter", "job", "leave"]
    assert others == [["enter", "leave"]] * len(others)


@needs("cheap")
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_each_subprocess_has_its_own_lifespan(
    app: sqlq.App, database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("PLAY", kind)
    jobs = [app.enqueue(app.named(f"{PLAY}.{task}").new()) for task in ("alone", "work")]
    with worker_process(tmp_path, f"{PLAY}:app", database_url, "--drain", ready=False) as worker:
        assert worker.process.wait(30) == 0, worker.log.read_text()
    (first, pid), (second, other) = (app.jobs.get(job.id).result for job in jobs)
    assert (first, second) == (pid, other)
    assert pid != other
    assert acts(tmp_path) == {pid: ["enter", "job", "leave"], other: ["enter", "job", "leave"]}
