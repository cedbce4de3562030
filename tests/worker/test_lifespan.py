"""The lifespan of an App in each process: its thread or task, and its exit at each stop but a kill."""

from __future__ import annotations

import asyncio
import itertools
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import sqlq
from sqlq.testing import drain, inline
from sqlq.worker.lifecycle import stop
from tests.kit import for_each, needs, wait_until
from tests.kit.processes import WorkerProcess, worker_process

# -- in a worker of this process -----------------------------------------------------------------------------


def test_handlers_get_the_value_of_the_lifespan(app: sqlq.App) -> None:
    told: list[Any] = []

    @app.lifespan
    def pool() -> Iterator[dict[str, int]]:
        told.append("entered")
        yield {"size": 3}
        told.append("left")

    @app.task(name="d")
    def plain() -> Any:
        told.append("handler")
        return sqlq.current_job().lifespan

    @app.task(name="a")
    async def asynchronous() -> Any:
        return sqlq.current_job().lifespan

    jobs = [app.enqueue(plain.new()), app.enqueue(asynchronous.new())]
    assert drain(app).finished == 2
    assert [app.jobs.get(job.id).result for job in jobs] == [{"size": 3}] * 2
    assert told == ["entered", "handler", "left"]
    drain(app)
    assert told[-2:] == ["entered", "left"], "as long as the call lasts"


def test_an_asynchronous_lifespan_runs_in_one_task_on_the_handlers_loop(app: sqlq.App) -> None:
    told: list[Any] = []
    beaten = asyncio.Event()

    @app.lifespan
    async def clients() -> AsyncIterator[asyncio.AbstractEventLoop]:
        async def beat() -> None:
            for n in itertools.count():
                if n == 3:
                    beaten.set()
                await asyncio.sleep(0.001)

        try:
            async with asyncio.timeout(None), asyncio.TaskGroup() as group:
                beating = group.create_task(beat())
                yield asyncio.get_running_loop()
                told.append("leaving")
                beating.cancel()
        finally:
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
    with pytest.raises(
        sqlq.SqlqError, match=r"^the lifespan .*failing failed: OSError: no broker$"
    ) as caught:
        drain(app)
    assert isinstance(caught.value.__cause__, OSError)
    assert "in afailing" in caplog.text or "in failing" in caplog.text, "the log has its traceback"
    assert app.jobs.get(job.id).state == "available"
    assert app.workers.list() == []


def test_an_error_at_the_exit_of_the_lifespan_is_logged(
    app: sqlq.App, caplog: pytest.LogCaptureFixture
) -> None:
    @app.lifespan
    def noted() -> Iterator[None]:
        yield
        raise OSError("will not close")

    app.enqueue(app.task(name="t")(lambda: None).new())
    assert drain(app).finished == 1
    assert "noted failed when it was left" in caplog.text
    assert "will not close" in caplog.text


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


def test_inline_takes_a_lifespan_value() -> None:
    app = sqlq.App("sqlite://")

    @app.lifespan
    def never() -> Iterator[None]:
        raise AssertionError
        yield

    task = app.task(name="t")(lambda: sqlq.current_job().lifespan)
    with inline(app, lifespan={"fake": 1}) as ran:
        app.enqueue(task.new())
    assert ran.jobs[0].result == {"fake": 1}
    with inline(app) as ran:
        app.enqueue(task.new())
    assert ran.jobs[0].result is None


def takes(app: sqlq.App) -> Iterator[None]:
    yield


async def coroutine() -> None: ...


@for_each(
    ("given", "sentence"),
    [
        (None, "lifespan is None: it is a function that takes no arguments"),
        (takes, r"takes\(.*cannot be called: lifespan takes no arguments"),
        (coroutine, "coroutine: it is a function that takes no arguments"),
    ],
)
def test_a_wrong_lifespan_is_refused(given: Any, sentence: str) -> None:
    with pytest.raises(sqlq.errors.ConfigurationError, match=sentence):
        sqlq.App("sqlite://").lifespan(given)


def test_a_second_lifespan_is_refused() -> None:
    app = sqlq.App("sqlite://")
    assert app.lifespan(failing) is failing
    with pytest.raises(
        sqlq.errors.ConfigurationError, match=r"afailing, but .*\.failing is there already: enter both"
    ):
        app.lifespan(afailing)


# -- in processes of `sqlq work` -----------------------------------------------------------------------------

PLAY = """
import asyncio, os, time, sqlq

app = sqlq.App()

def note(what):
    fd = os.open("ran.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, f"{what} {os.getpid()}\\n".encode())
    os.close(fd)

if os.environ["PLAY"] == "def":
    @app.lifespan
    def life():
        note("enter")
        yield os.getpid()
        note("leave")

elif os.environ["PLAY"] == "async def":
    @app.lifespan
    async def life():
        note("enter")
        async with asyncio.timeout(None):
            yield os.getpid()
        await asyncio.sleep(0.01)
        note("leave")

else:
    @app.lifespan
    def life():
        note("enter")
        raise OSError("no broker")
        yield

@app.task
def work():
    note("job")
    return [sqlq.current_job().lifespan, os.getpid()]

@app.task(isolate=True)
async def alone():
    note("job")
    return [sqlq.current_job().lifespan, os.getpid()]

@app.task
def wait():
    note("job")
    while not os.path.exists("go"):
        time.sleep(0.01)
"""

Play = Callable[..., Any]


@pytest.fixture
def lines(tmp_path: Path) -> Callable[[], list[tuple[str, int]]]:
    (tmp_path / "play.py").write_text(PLAY)

    def lines() -> list[tuple[str, int]]:
        file = tmp_path / "ran.txt"
        found = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
        return [(what, int(pid)) for what, pid in found]

    return lines


def enqueue(app: sqlq.App, *names: str) -> list[int]:
    tasks = {name: app.task(name=f"play.{name}")(lambda: None) for name in sorted({*names})}
    return [app.enqueue(tasks[name].new()).id for name in names]


def whats(lines: list[tuple[str, int]]) -> dict[int, list[str]]:
    """Return the actions of each process, in order."""
    found: dict[int, list[str]] = {}
    for what, pid in lines:
        found.setdefault(pid, []).append(what)
    return found


@pytest.mark.variants
@pytest.mark.parametrize("kind", ["def", "async def"])
@pytest.mark.parametrize("stop", ["TERM", "--drain", "--max-jobs"])
@needs("cheap")
def test_the_lifespan_is_exited_at_each_kind_of_stop(
    app: sqlq.App, database_url: str, tmp_path: Path, lines: Play, monkeypatch: pytest.MonkeyPatch,
    kind: str, stop: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("PLAY", kind)
    options = {"TERM": [], "--drain": ["--drain"], "--max-jobs": ["--max-jobs", "1"]}[stop]
    (job,) = enqueue(app, "wait" if stop == "TERM" else "work")
    with worker_process(tmp_path, "play:app", database_url, *options, ready=False) as worker:
        if stop == "TERM":
            wait_until(lambda: "job" in [what for what, _ in lines()], 20)
            worker.process.send_signal(signal.SIGTERM)
            wait_until(lambda: worker.said("stopping"))
            (tmp_path / "go").touch()
        elif stop != "--drain":
            wait_until(lambda: "leave" in [what for what, _ in lines()], 20)
            wait_until(lambda: [what for what, _ in lines()].count("enter") == 2, 20)
            worker.process.send_signal(signal.SIGTERM)
        assert worker.process.wait(20) == 0, worker.log.read_text()
    did = list(whats(lines()).values())
    assert did[0] == ["enter", "job", "leave"]
    assert all(other == ["enter", "leave"] for other in did[1:])
    if stop != "TERM":
        pid = next(iter(whats(lines())))
        assert app.jobs.get(job).result == [pid, pid]


@needs("cheap")
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_each_subprocess_has_its_own_lifespan(
    app: sqlq.App, database_url: str, tmp_path: Path, lines: Play, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("PLAY", kind)
    jobs = enqueue(app, "alone", "work")
    with worker_process(tmp_path, "play:app", database_url, "--drain", ready=False) as worker:
        assert worker.process.wait(30) == 0, worker.log.read_text()
    (first, pid), (second, other) = (app.jobs.get(id).result for id in jobs)
    assert (first, second) == (pid, other)
    assert pid != other
    assert whats(lines()) == {pid: ["enter", "job", "leave"], other: ["enter", "job", "leave"]}


@needs("cheap")
def test_a_failed_lifespan_ends_the_command_with_one_sentence(
    app: sqlq.App, database_url: str, tmp_path: Path, lines: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAY", "failing")
    worker = WorkerProcess(tmp_path, "play:app", database_url)
    assert worker.process.wait(20) == 1
    said = worker.log.read_text().splitlines()
    assert said[-1] == "sqlq: the lifespan play.life failed: OSError: no broker"
    assert "Traceback (most recent call last):" in said
    assert lines() == [("enter", pid) for _, pid in lines()][:1], "one process, and no other after it"
