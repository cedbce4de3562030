"""Middleware of attempts: its order, in every kind of process, and its influence on outcomes."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any, cast

import pytest

import sqlq
from sqlq.testing import drain
from tests.kit import for_each, handler_of, needs, wait_until
from tests.kit.processes import worker_process

SETTING: ContextVar[str] = ContextVar("SETTING", default="unset")


@pytest.fixture
def told() -> list[Any]:
    return []


@pytest.fixture(params=["def", "async def"])
def kind(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


def noting(told: list[Any], name: str) -> Any:
    @contextmanager
    def around(running: sqlq.JobContext) -> Iterator[None]:
        told.append(f"{name} before")
        yield
        told.append(f"{name} after")

    return around


# -- where and in which order --------------------------------------------------------------------------------


def test_middleware_runs_around_each_attempt_in_order_of_registration(
    app: sqlq.App, kind: str, told: list[Any]
) -> None:
    app.middleware(noting(told, "first"))

    @app.task(name="own", middleware=[noting(told, "own"), noting(told, "inner")])
    def own() -> None:
        told.append("handler")

    task = app.task(name="t", max_attempts=2, backoff="0s")(handler_of(kind, lambda: told.append("handler")))

    @app.middleware
    def second(running: sqlq.JobContext) -> Iterator[None]:
        assert running is sqlq.current_job()
        told.append(f"second before {running.task} {running.attempt}")
        yield
        told.append("second after")

    app.enqueue(task.new())
    assert drain(app).finished == 1
    assert told == [
        "first before", "second before t 1", "handler", "second after", "first after",
    ]  # fmt: skip
    told.clear()
    app.enqueue(own.new())
    assert drain(app).finished == 1
    assert told == [
        "first before", "second before own 1", "own before", "inner before",
        "handler", "inner after", "own after", "second after", "first after",
    ]  # fmt: skip


@needs("cheap")
def test_every_kind_of_middleware_is_accepted(app: sqlq.App, kind: str, told: list[Any]) -> None:
    class Tracing:
        def __init__(self, running: sqlq.JobContext) -> None:
            self.id = running.id

        def __enter__(self) -> None:
            told.append(("class", self.id))

        def __exit__(self, *error: object) -> None:
            told.append("class after")

    class Calling:
        def __call__(self, running: sqlq.JobContext) -> Iterator[None]:
            told.append("object")
            yield

    app.middleware(Tracing)
    app.middleware(lambda running: noting(told, f"lambda {running.task}")(running))
    app.middleware(noting(told, "contextmanager"))
    app.middleware(Calling())
    task = app.task(name="t")(handler_of(kind, lambda: told.append("handler")))
    job = app.enqueue(task.new())
    assert drain(app).finished == 1
    assert told == [
        ("class", job.id), "lambda t before", "contextmanager before", "object",
        "handler", "contextmanager after", "lambda t after", "class after",
    ]  # fmt: skip


def test_asynchronous_middleware_runs_around_async_def_handlers(app: sqlq.App, told: list[Any]) -> None:
    @app.middleware
    async def generator(running: sqlq.JobContext) -> AsyncIterator[None]:
        await asyncio.sleep(0)
        told.append(threading.current_thread().name)
        yield
        await asyncio.sleep(0)
        told.append("after")

    @app.middleware
    @asynccontextmanager
    async def decorated(running: sqlq.JobContext) -> AsyncIterator[None]:
        told.append("decorated")
        yield

    @app.middleware
    class Entered:
        def __init__(self, running: sqlq.JobContext) -> None: ...

        async def __aenter__(self) -> None:
            told.append("class")

        async def __aexit__(self, *error: object) -> None: ...

    app.enqueue(app.task(name="a")(handler_of("async def", lambda: told.append("handler"))).new())
    assert drain(app).finished == 1
    assert told == ["sqlq-loop", "decorated", "class", "handler", "after"]


def test_context_set_by_middleware_reaches_its_handler_alone(app: sqlq.App, kind: str) -> None:
    @app.middleware
    def setting(running: sqlq.JobContext) -> Iterator[None]:
        assert SETTING.get() == "unset"
        SETTING.set(f"job {running.id}")  # and does not reset it
        yield
        assert SETTING.get() == f"job {running.id}"

    task = app.task(name="t")(handler_of(kind, SETTING.get))
    jobs = app.enqueue_many([task.new() for _ in range(3)])
    assert app.worker(drain=True, concurrency=1).run().finished == 3
    assert [app.jobs.get(job.id).result for job in jobs] == [f"job {job.id}" for job in jobs]


def test_middleware_runs_around_a_coroutine_of_a_def_handler(app: sqlq.App, told: list[Any]) -> None:
    @app.middleware
    def setting(running: sqlq.JobContext) -> Iterator[None]:
        SETTING.set("seen")
        told.append("before")
        yield
        told.append("after")

    async def later() -> str:
        await asyncio.sleep(0)
        told.append("awaited")
        return SETTING.get()

    job = app.enqueue(app.task(name="t")(handler_of("def", later)).new())
    assert drain(app).finished == 1
    assert app.jobs.get(job.id).result == "seen"
    assert told == ["before", "awaited", "after"]


def test_a_task_may_decline_middleware(app: sqlq.App, told: list[Any]) -> None:
    app.middleware(noting(told, "app"))
    app.enqueue(app.task(name="t", middleware=None)(lambda: told.append("handler")).new())
    assert drain(app).finished == 1
    assert told == ["handler"]


PLAY = """
import os, sqlq

app = sqlq.App()

def note(what):
    fd = os.open("ran.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, f"{what} {os.getpid()}\\n".encode())
    os.close(fd)

@app.middleware
def around(running):
    note(f"before-{running.task}-{running.attempt}")
    try:
        yield
    except ZeroDivisionError as error:
        raise sqlq.Cancel("translated") from error
    finally:
        note(f"after-{running.task}-{running.attempt}")

async def asynchronous(running):
    note(f"async-{running.task}")
    yield

@app.task(isolate=True)
def alone():
    note("handler")
    1 / 0

@app.task(isolate=True, middleware=[asynchronous])
async def aalone():
    note("handler")
    1 / 0

@app.task(backoff="0s")
def dies():
    note("handler")
    if sqlq.current_job().attempt == 1:
        os._exit(1)
"""


def test_middleware_runs_in_isolated_processes(app: sqlq.App, database_url: str, tmp_path: Path) -> None:
    (tmp_path / "play.py").write_text(PLAY)
    new = [app.task(name=f"play.{name}")(lambda: None).new() for name in ("alone", "aalone", "dies")]
    states = []
    with worker_process(tmp_path, "play:app", database_url, "-c", "1") as worker:
        for job in new:
            id = app.enqueue(job).id
            wait_until(lambda id=id: app.jobs.get(id).ended_at, timeout=30, what="the job's end")  # type: ignore[misc]
            states.append(app.jobs.get(id).state)
        assert worker.stop() == 0
    assert states == ["cancelled", "cancelled", "finished"]
    lines = [line.split() for line in (tmp_path / "ran.txt").read_text().splitlines()]
    assert [what for what, _ in lines] == [
        "before-play.alone-1", "handler", "after-play.alone-1",
        "before-play.aalone-1", "async-play.aalone", "handler", "after-play.aalone-1",
        "before-play.dies-1", "handler",  # its process ends here
        "before-play.dies-2", "handler", "after-play.dies-2",
    ]  # fmt: skip
    assert lines[8][1] != lines[10][1], "the next attempt ran in a process of its own"


# -- outcomes ------------------------------------------------------------------------------------------------


class BusyError(Exception):
    pass


def test_middleware_changes_the_outcome(app: sqlq.App, kind: str) -> None:
    @app.middleware
    def translating(running: sqlq.JobContext) -> Iterator[None]:
        try:
            yield
        except BusyError as error:
            raise sqlq.Retry("0s") from error

    def busy() -> str:
        if sqlq.current_job().attempt == 1:
            raise BusyError("too many requests")
        return "done"

    job = app.enqueue(app.task(name="t", fail_on=BusyError)(handler_of(kind, busy)).new())
    counts = drain(app)
    assert (counts.retried, counts.finished) == (1, 1)
    done = app.jobs.get(job.id)
    assert (done.state, done.result, done.attempts) == ("finished", "done", 2)


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_exception_of_middleware_is_the_outcome_with_its_traceback(
    app: sqlq.App, kind: str, when: str, told: list[Any]
) -> None:
    @app.middleware
    def failing(running: sqlq.JobContext) -> Iterator[None]:
        if when == "before":
            raise BusyError("no context")
        yield
        raise BusyError("no context")

    task = app.task(name="t", max_attempts=1)(handler_of(kind, lambda: told.append("handler")))
    job = app.enqueue(task.new())
    assert drain(app).failed == 1
    done = app.jobs.get(job.id)
    assert (done.state, done.reason, done.message) == ("failed", "error", "no context")
    assert "in failing" in (done.traceback or "")
    assert told == ([] if when == "before" else ["handler"])


def test_a_stopped_job_is_released_when_middleware_swallows_its_exception(app: sqlq.App) -> None:
    started = threading.Event()

    @app.middleware
    def swallowing(running: sqlq.JobContext) -> Iterator[None]:
        try:
            yield
        except BaseException:
            pass

    @app.task(name="t")
    async def wait() -> None:
        started.set()
        await asyncio.sleep(60)

    job = app.enqueue(wait.new())
    worker = app.worker(grace="0s").start()
    assert started.wait(10)
    worker.stop()
    assert worker.join("10s")
    assert app.jobs.get(job.id).state == "available"
    assert worker.counts.released == 1


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_timeout_cancels_asynchronous_middleware(app: sqlq.App, where: str, told: list[Any]) -> None:
    @app.middleware
    async def slow(running: sqlq.JobContext) -> AsyncIterator[None]:
        if where == "before":
            await asyncio.sleep(60)
        yield
        await asyncio.sleep(60)

    @app.task(name="t", timeout="200ms", max_attempts=1)
    async def handler() -> None:
        told.append("handler")

    job = app.enqueue(handler.new())
    assert drain(app).failed == 1
    assert app.jobs.get(job.id).reason == "timeout"
    assert told == ([] if where == "before" else ["handler"])


# -- refused -------------------------------------------------------------------------------------------------


async def coroutine(running: sqlq.JobContext) -> None: ...
async def asynchronous(running: sqlq.JobContext) -> AsyncIterator[None]:
    yield


def nothing() -> Iterator[None]:
    yield


def two(running: sqlq.JobContext, more: int) -> Iterator[None]:
    yield


@for_each(
    ("given", "sentence"),
    [
        (7, "middleware is 7: it is a function that takes one argument, the running job"),
        (nullcontext(), "it is a function that.*each time it is called"),
        (noting([], "x")(None), "it is a function that"),
        (coroutine, "coroutine: it is a function that takes one argument"),
        (nothing, r"nothing\(\) -> .* cannot be called: middleware takes one argument"),
        (two, "cannot be called: middleware takes one argument, the running job"),
        (int, "middleware is builtins.int: it is a function that"),
    ],
)
def test_wrong_middleware_is_refused(given: Any, sentence: str) -> None:
    app = sqlq.App("sqlite://")
    with pytest.raises(sqlq.errors.ConfigurationError, match=sentence):
        app.middleware(given)
    with pytest.raises(sqlq.errors.ConfigurationError, match=sentence):
        app.task(name="t", middleware=[given])(lambda: None)
    assert not app.tasks


@for_each(
    ("given", "sentence"),
    [
        (two, "middleware of t is .*: it is a list of functions"),
        ("two", "middleware of t is 'two': it is a list of functions"),
        (False, "middleware of t is False: .*or None for nothing around this task"),
        ([asynchronous], r"middleware .*\.asynchronous cannot run around t, which is a def: make"),
    ],
)
def test_wrong_middleware_of_a_task_is_refused(given: Any, sentence: str) -> None:
    app = sqlq.App("sqlite://")
    with pytest.raises(sqlq.errors.ConfigurationError, match=sentence):
        app.task(name="t", middleware=given)(lambda: None)


@pytest.mark.parametrize("first", ["task", "middleware"])
def test_asynchronous_middleware_is_refused_beside_a_def_task(first: str) -> None:
    app = sqlq.App("sqlite://")
    app.task(name="without", middleware=None)(lambda: None)
    declare: list[Callable[[], Any]] = [
        lambda: app.task(name="t")(lambda: None),
        lambda: app.middleware(asynchronous),
    ]
    one, other = declare if first == "task" else reversed(declare)
    one()
    with pytest.raises(sqlq.errors.ConfigurationError, match="cannot run around t, which is a def: make"):
        other()
    assert [*app.tasks] == (["without", "t"] if first == "task" else ["without"])


def test_middleware_that_does_not_yield_is_named_by_the_failed_attempt(app: sqlq.App) -> None:
    app.middleware(cast("Any", lambda running: None))
    job = app.enqueue(app.task(name="shop.send", max_attempts=1)(lambda: None).new())
    drain(app)
    message = app.jobs.get(job).message or ""
    assert re.fullmatch(
        r"the middleware tests\..*lambda> returned None, which is no context manager: let it yield once",
        message,
    )


def test_middleware_cannot_be_registered_twice() -> None:
    app = sqlq.App("sqlite://")
    assert app.middleware(asynchronous) is asynchronous
    with pytest.raises(sqlq.errors.ConfigurationError, match=r"asynchronous a second time: register it once"):
        app.middleware(asynchronous)
