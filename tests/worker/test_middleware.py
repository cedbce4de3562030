"""Middleware of attempts and of enqueues, and what travels with a job: headers, label, context variables.

Middleware runs around attempts in each kind of process, and changes outcomes.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

import sqlq
from sqlq.errors import EnqueueError
from sqlq.testing import drain, inline
from sqlq.worker.ipc.pipe import packed
from sqlq.worker.report.reporter import Reporter
from tests.kit import execute, handler_of, needs, rescue, run_one, wait_until
from tests.kit.processes import worker_process

SETTING: ContextVar[str] = ContextVar("SETTING", default="unset")


@pytest.fixture
def told() -> list[Any]:
    return []


@pytest.fixture(params=["def", "async def"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def noting(told: list[Any], name: str) -> Any:
    @contextmanager
    def around(running: sqlq.JobContext) -> Iterator[None]:
        told.append(f"{name} before")
        yield
        told.append(f"{name} after")

    return around


def test_middleware_runs_around_each_attempt_in_order(app: sqlq.App, kind: str, told: list[Any]) -> None:
    def handler() -> None:
        told.append("handler")

    app.middleware(noting(told, "first"))
    inner = [noting(told, "own"), noting(told, "inner")]
    task, own, declines = (
        app.task(name=name, **options)(handler_of(kind, handler))
        for name, options in (("t", {}), ("own", {"middleware": inner}), ("declines", {"middleware": None}))
    )

    @app.middleware
    def second(running: sqlq.JobContext) -> Iterator[None]:
        assert running is sqlq.current_job()
        told.append(f"second before {running.task} {running.attempt}")
        yield
        told.append("second after")

    for each, expected in (
        (task, ["first before", "second before t 1", "handler", "second after", "first after"]),
        (own, [
            "first before", "second before own 1", "own before", "inner before",
            "handler", "inner after", "own after", "second after", "first after",
        ]),
        (declines, ["handler"]),
    ):  # fmt: skip
        told.clear()
        app.enqueue(each.new())
        assert drain(app).finished == 1
        assert told == expected


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
    app.middleware(Calling())
    job = app.enqueue(app.task(name="t")(handler_of(kind, lambda: told.append("handler"))).new())
    assert drain(app).finished == 1
    before = [("class", job.id), "lambda t before", "object"]
    assert told == [*before, "handler", "lambda t after", "class after"]


def test_asynchronous_middleware_runs_around_async_def_handlers(app: sqlq.App, told: list[Any]) -> None:
    @app.middleware
    async def generator(running: sqlq.JobContext) -> AsyncIterator[None]:
        await asyncio.sleep(0)
        told.append(threading.current_thread().name)
        yield
        await asyncio.sleep(0)
        told.append("after")

    @app.middleware
    class Entered:
        def __init__(self, running: sqlq.JobContext) -> None: ...

        async def __aenter__(self) -> None:
            told.append("class")

        async def __aexit__(self, *error: object) -> None: ...

    app.middleware(asynccontextmanager(asynchronous))
    app.enqueue(app.task(name="a")(handler_of("async def", lambda: told.append("handler"))).new())
    assert drain(app).finished == 1
    assert told == ["sqlq-loop", "class", "handler", "after"]


@pytest.mark.parametrize("kind", ["def", "async def", "a coroutine of def"])
def test_context_set_by_middleware_reaches_its_handler_alone(app: sqlq.App, kind: str) -> None:
    @app.middleware
    def setting(running: sqlq.JobContext) -> Iterator[None]:
        assert SETTING.get() == "unset"
        SETTING.set(f"job {running.id}")  # and does not reset it
        yield
        assert SETTING.get() == f"job {running.id}"

    async def later() -> str:
        await asyncio.sleep(0)
        return SETTING.get()

    task = app.task(name="t")(handler_of(kind, later if kind == "a coroutine of def" else SETTING.get))
    jobs = app.enqueue_many([task.new() for _ in range(3)])
    assert app.worker(drain=True, concurrency=1).run().finished == 3
    assert [app.jobs.get(job.id).result for job in jobs] == [f"job {job.id}" for job in jobs]


class BusyError(Exception):
    pass


def test_a_retry_raised_by_middleware_is_the_outcome(app: sqlq.App, kind: str) -> None:
    @app.middleware
    def translating(running: sqlq.JobContext) -> Iterator[None]:
        try:
            yield
        except BusyError as error:
            raise sqlq.Retry("0s") from error

    def busy() -> None:
        if sqlq.current_job().attempt == 1:
            raise BusyError("too many requests")

    done = run_one(app, handler_of(kind, busy), fail_on=BusyError)
    assert (done.state, done.attempts) == ("finished", 2)


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

    done = run_one(app, handler_of(kind, lambda: told.append("handler")), max_attempts=1)
    assert (done.state, done.reason, done.message) == ("failed", "error", "no context")
    assert "in failing" in (done.traceback or "")
    assert told == ([] if when == "before" else ["handler"])


def test_a_stopped_job_is_released_when_middleware_swallows_its_exception(app: sqlq.App) -> None:
    started = threading.Event()

    @app.middleware
    def swallowing(running: sqlq.JobContext) -> Iterator[None]:
        with suppress(BaseException):
            yield

    @app.task(name="t")
    async def wait() -> None:
        started.set()
        await asyncio.sleep(60)

    job = app.enqueue(wait.new())
    with app.worker(grace="0s") as worker:
        assert started.wait(10)
    assert (app.jobs.get(job.id).state, worker.counts.released) == ("available", 1)


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_timeout_cancels_asynchronous_middleware(app: sqlq.App, where: str, told: list[Any]) -> None:
    @app.middleware
    async def slow(running: sqlq.JobContext) -> AsyncIterator[None]:
        if where == "before":
            await asyncio.sleep(60)
        yield
        await asyncio.sleep(60)

    handler = handler_of("async def", lambda: told.append("handler"))
    assert run_one(app, handler, timeout="200ms", max_attempts=1).reason == "timeout"
    assert told == ([] if where == "before" else ["handler"])


def test_middleware_that_does_not_yield_is_named_by_the_failed_attempt(app: sqlq.App) -> None:
    app.middleware(cast("Any", lambda running: None))
    says = r"the middleware tests\..*lambda> returned None, which is no context manager: let it yield once"
    assert re.fullmatch(says, run_one(app, lambda: None, max_attempts=1).message)


async def asynchronous(running: sqlq.JobContext) -> AsyncIterator[None]:
    yield


def test_a_handler_gets_headers_and_label(app: sqlq.App, kind: str) -> None:
    seen: list[tuple[Mapping[str, Any], str | None]] = []

    def look() -> None:
        seen.append((sqlq.current_job().headers, sqlq.current_job().label))

    task = app.task(name="t")(handler_of(kind, look))
    tags = ["a", "b"]
    new = task.new().set(headers={"request_id": "r-7", "tags": 1}, label="export of May")
    changed = new.set(headers={"tags": tags})
    tags.append("c")
    headers = {"request_id": "r-7", "tags": ["a", "b"]}  # added to those before, and copied
    assert (changed.headers, new.headers) == (headers, {"request_id": "r-7", "tags": 1})
    job, plainly = app.enqueue(changed), app.enqueue(task.new())
    assert drain(app).finished == 2
    (got, label), (nothing, none) = sorted(seen, key=lambda each: each[1] is None)  # they run at once
    assert (got, label, nothing, none) == (headers, "export of May", {}, None)
    with pytest.raises(TypeError, match="does not support item assignment"):
        got["request_id"] = "another"  # type: ignore[index]
    found = app.jobs.get(job.id)
    assert (found.headers, found.label, found.state) == (headers, "export of May", "finished")
    assert (app.jobs.get(plainly.id).headers, app.jobs.get(plainly.id).label) == ({}, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "the headers are not JSON"),
        ("[1]", "the headers are not a JSON object"),
        ('{"sqlq.carry": 7}', "in the headers 'sqlq.carry' is not a JSON object"),
    ],
)
def test_wrong_headers_of_sql_fail_the_attempt_before_it_begins(
    app: sqlq.App, engine: Engine, text: str, message: str
) -> None:
    ran: list[int] = []
    app.task(name="t")(lambda: ran.append(1))
    execute(engine, "INSERT INTO jobs (task, headers) VALUES ('t', :headers)", headers=text)
    execute(engine, """INSERT INTO jobs (task, headers, label) VALUES ('t', '{"a": 1}', 'by SQL')""")
    assert drain(app).failed == 1
    finished, failed = app.jobs.list()
    assert (failed.reason, finished.headers, finished.label) == ("bad_payload", {"a": 1}, "by SQL")
    assert message in str(failed.message)
    assert ran == [1]


@needs("cheap")
def test_bytes_in_a_row_stop_no_worker(
    app: sqlq.App, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "sqlq.worker")
    told: list[sqlq.JobOutcome] = []

    @app.task(name="told")
    def tell(ended: sqlq.JobOutcome) -> None:
        told.append(ended)

    app.task(name="t")(lambda: None)
    app.task(name="followed", on_success=tell)(lambda: None)
    execute(engine, "INSERT INTO jobs (task, label) VALUES ('t', x'ff')")
    execute(engine, "INSERT INTO jobs (task, headers, progress) VALUES ('t', x'ff', 'far')")
    execute(engine, "INSERT INTO jobs (task, label, queue) VALUES ('followed', x'fe', x'fd')")
    assert drain(app).finished == 3
    follower, followed, failed, finished = app.jobs.list()
    assert (finished.label, finished.state) == (r"b'\xff'", "finished")
    assert (failed.message, failed.progress) == ("the headers are not text", None)
    assert r"b'\xff'" in caplog.text
    assert (followed.state, follower.task, follower.state) == ("finished", "told", "finished")
    assert [(ended.queue, ended.label) for ended in told] == [(r"b'\xfd'", r"b'\xfe'")]


@needs("cheap")
@pytest.mark.parametrize("spent", [True, False])
def test_bytes_in_a_row_do_not_block_the_rescue_of_others(
    app: sqlq.App, engine: Engine, *, spent: bool
) -> None:
    other = app.enqueue(app.task(name="t", max_attempts=1)(lambda: None).new())
    columns = "(task, queue, label, on_failure, max_attempts)"
    row = f"""(x'fa', x'fb', x'fc', '{{"task": "alarm"}}', {1 if spent else 2})"""
    execute(engine, f"INSERT INTO jobs {columns} VALUES {row}")
    held = "attempts = 1, reserved_at = 1, reserved_by = x'fe', lease_expires_at = 1"
    execute(engine, f"UPDATE jobs SET {held}")
    rescued = rescue(app)
    assert sorted((job.id, job.failed) for job in rescued) == [(other.id, True), (other.id + 1, spent)]
    events = Reporter().rescued(rescued, "is gone")
    json.dumps([packed(replace(event, exception=None)) for event in events])  # as its supervisor sends them
    details = app.jobs.get(other.id + 1)
    if not spent:
        assert [(line.outcome, line.worker) for line in details.history] == [("lost", r"b'\xfe'")]
        return
    (alarm,) = app.jobs.list(task="alarm")
    ended = alarm.payload["args"][0]
    assert [ended[name] for name in ("task", "queue", "label")] == [r"b'\xfa'", r"b'\xfb'", r"b'\xfc'"]


def test_enqueue_middleware_adds_headers_and_those_of_the_job_win(app: sqlq.App, engine: Engine) -> None:
    asked: list[sqlq.NewJob] = []

    @app.before_enqueue
    def origin(job: sqlq.NewJob) -> Mapping[str, Any]:
        asked.append(job)
        return {"origin": "web", "of": job.task, "a": "first"}

    @app.before_enqueue
    def nothing(job: sqlq.NewJob) -> None:
        pass

    app.before_enqueue(lambda job: {"a": "second"})
    task = app.task(name="t", headers={"service": "shop", "a": "task"})(lambda: None)
    job = task.new().set(headers={"origin": "mine"})
    with Session(engine) as session, session.begin():
        ids = [app.enqueue(job, session).id]
    ids += [one.id for one in app.enqueue_many([task.new(), task.new()])]
    ids.append(asyncio.run(app.aenqueue(task.new())).id)
    found = [app.jobs.get(id).headers for id in ids]
    assert found[0] == {"service": "shop", "a": "second", "origin": "mine", "of": "t"}
    assert {one["origin"] for one in found[1:]} == {"web"}
    assert asked[0] is job
    with inline(app) as ran:
        app.enqueue(job)
    assert ran.jobs[0].new.headers == found[0]
    app.before_enqueue(lambda job: ["a"])  # type: ignore[type-var]
    with pytest.raises(EnqueueError, match=r"what the function .*<lambda> returned is \['a'\]"):
        app.enqueue(task.new())
    assert len(app.jobs.list()) == len(ids)


TENANT: ContextVar[str] = ContextVar("tenant")
REQUEST: ContextVar[Any] = ContextVar("request", default="no request")


@contextmanager
def being(tenant: str) -> Iterator[None]:
    token = TENANT.set(tenant)
    try:
        yield
    finally:
        TENANT.reset(token)


@pytest.fixture
def carrying(database_url: str) -> Iterator[sqlq.App]:
    app = sqlq.App(database_url, carry=[TENANT, REQUEST])
    yield app
    app.close()


@pytest.mark.parametrize("kind", ["def", "async def", "a coroutine of def", "middleware=None"])
def test_context_variables_travel_and_are_gone_for_the_next_job(carrying: sqlq.App, kind: str) -> None:
    seen: list[tuple[Any, Any]] = []

    def plain(follow: bool = False) -> None:
        seen.append((TENANT.get(None), REQUEST.get()))
        if follow:
            carrying.enqueue(task.new())

    async def asynchronous(follow: bool = False) -> None:
        await asyncio.sleep(0)
        plain(follow)

    options: dict[str, Any] = {"middleware": None} if kind == "middleware=None" else {}
    handler: Any = {
        "async def": asynchronous,
        "a coroutine of def": lambda follow=False: asynchronous(follow),
    }.get(kind, plain)
    task = carrying.task(name="t", **options)(handler)
    token = REQUEST.set({"id": 7})
    with being("blue"):
        carrying.enqueue(task.new(follow=True))
    REQUEST.reset(token)
    carrying.enqueue(task.new())
    counts = carrying.worker(drain=True, concurrency=1).run()
    assert counts.finished == 3
    # the job that a handler enqueued carries on what its own job had
    assert seen == [("blue", {"id": 7}), (None, "no request"), ("blue", {"id": 7})]
    assert carrying.jobs.list()[-1].headers == {"sqlq.carry": {"tenant": "blue", "request": {"id": 7}}}


def test_a_default_is_not_carried_and_a_value_that_is_not_json_is_refused(carrying: sqlq.App) -> None:
    task = carrying.task(name="t")(lambda: None)

    async def enqueue() -> int:  # in a context of its own
        return (await carrying.aenqueue(task.new())).id

    assert carrying.jobs.get(asyncio.run(enqueue())).headers == {}
    token = REQUEST.set(object())
    with pytest.raises(EnqueueError, match="the context variable 'request', which the App carries, is <"):
        carrying.enqueue(task.new())
    REQUEST.reset(token)


PLAY = """
from contextvars import ContextVar
import sqlq

tenant = ContextVar("tenant")
app = sqlq.App(carry=[tenant])

def note(what):
    job = sqlq.current_job()
    with open("ran.txt", "a") as file:
        print(what, job.task, tenant.get("nobody's"), job.headers.get("a"), job.label, file=file)

@app.middleware
def around(running):
    note("before")
    try:
        yield
    except ZeroDivisionError as error:
        raise sqlq.Cancel("translated") from error
    finally:
        note("after")

async def asynchronous(running):
    note("async")
    yield

@app.task(isolate=True)
def alone():
    note("handler")
    sqlq.current_job().progress(1, of=4, note="begun")
    sqlq.current_job().progress(3, of=4, note="nearly")
    1 / 0

@app.task(isolate=True, middleware=[asynchronous])
async def aalone():
    note("handler")
    tenant.set("another's")
    1 / 0
"""


def test_middleware_and_context_variables_reach_isolated_processes(
    carrying: sqlq.App, database_url: str, tmp_path: Path
) -> None:
    (tmp_path / "play.py").write_text(PLAY)
    alone, aalone = (carrying.task(name=f"play.{name}")(lambda: None).new() for name in ("alone", "aalone"))
    with being("blue"):
        new = [alone.set(headers={"a": 1}, label="l"), aalone]
        ids = [carrying.enqueue(job).id for job in new]
    ids += [carrying.enqueue(job).id for job in (alone, aalone)]
    with worker_process(tmp_path, "play:app", database_url, "-c", "1") as worker:
        wait_until(lambda: all(carrying.jobs.get(id).ended_at for id in ids), what="all ended")
        assert worker.stop() == 0
    assert {carrying.jobs.get(id).state for id in ids} == {"cancelled"}
    assert (tmp_path / "ran.txt").read_text().splitlines() == [
        *(f"{where} play.alone blue 1 l" for where in ("before", "handler", "after")),
        *(f"{where} play.aalone blue None None" for where in ("before", "async", "handler")),
        "after play.aalone another's None None",
        *(f"{where} play.alone nobody's None None" for where in ("before", "handler", "after")),
        *(f"{where} play.aalone nobody's None None" for where in ("before", "async", "handler")),
        "after play.aalone another's None None",
    ]
    assert str(carrying.jobs.get(ids[0]).progress) == "3 of 4 (75%): nearly"
    assert carrying.jobs.get(ids[1]).progress is None
