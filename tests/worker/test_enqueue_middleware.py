"""Headers, label and context variables travel with a job.

They go from its enqueue to its handler, to the tables of ended jobs and back.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

import sqlq
from sqlq.errors import ConfigurationError, EnqueueError
from sqlq.store.jobs import settle
from sqlq.testing import drain, inline
from sqlq.worker.ipc.pipe import packed
from sqlq.worker.report.reporter import Reporter
from tests.kit import for_each, handler_of, needs, wait_until
from tests.kit.processes import worker_process

TENANT: ContextVar[str] = ContextVar("tenant")
REQUEST: ContextVar[Any] = ContextVar("request", default="no request")


@contextmanager
def being(tenant: str) -> Iterator[None]:
    token = TENANT.set(tenant)
    try:
        yield
    finally:
        TENANT.reset(token)


# -- headers and label ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_handler_gets_headers_and_label(app: sqlq.App, kind: str) -> None:
    seen: list[tuple[Mapping[str, Any], str | None]] = []

    def look() -> None:
        seen.append((sqlq.current_job().headers, sqlq.current_job().label))

    task = app.task(name="t")(handler_of(kind, look))
    headers = {"request_id": "r-7", "tags": ["a", "b"]}
    job = app.enqueue(task.new().set(headers=headers, label="export of May"))
    plainly = app.enqueue(task.new())
    assert drain(app).finished == 2
    (got, label), (nothing, none) = sorted(seen, key=lambda each: each[1] is None)  # they run at once
    assert (got, label, nothing, none) == (headers, "export of May", {}, None)
    with pytest.raises(TypeError, match="does not support item assignment"):
        got["request_id"] = "another"  # type: ignore[index]
    found = app.jobs.get(job.id)
    assert (found.headers, found.label, found.state) == (headers, "export of May", "finished")
    assert (app.jobs.get(plainly.id).headers, app.jobs.get(plainly.id).label) == ({}, None)


def test_set_adds_headers_to_those_before(app: sqlq.App) -> None:
    job = app.task(name="t")(lambda: None).new().set(headers={"a": 1, "b": 1})
    assert job.set(headers={"b": 2}).headers == {"a": 1, "b": 2}
    assert job.headers == {"a": 1, "b": 1}
    passed = {"list": [1]}
    job = job.set(headers=passed)
    passed["list"].append(2)
    assert job.headers["list"] == [1], "a copy"


@for_each(
    ("headers", "message"),
    [
        (["a"], r"headers is \['a'\]: headers are a mapping of names to JSON"),
        ({7: "a"}, "headers has the name 7: a header is named by text"),
        ({"": "a"}, "headers has the name ''"),
        (
            {"sqlq.carry": {}},
            "headers has the name 'sqlq.carry': names that begin with 'sqlq.' are",
        ),
        ({"at": datetime(2030, 1, 1)}, r"headers\['at'\] is .* of type datetime, which is not JSON"),  # noqa: DTZ001
        ({"a": {"b": float("nan")}}, r"headers\['a'\]\['b'\] is nan"),
        ({"a": "\0"}, r"headers\['a'\] holds a NUL"),
        ({"a": "x" * 16_384}, "the headers take 16,393 bytes as JSON, more than the 16,384 allowed"),
    ],
)
def test_wrong_headers_are_refused_where_they_are_set(app: sqlq.App, headers: Any, message: str) -> None:
    with pytest.raises(EnqueueError, match=f"^{message}"):
        app.task(name=f"t{len(app.tasks)}")(lambda: None).new().set(headers=headers)


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
    with engine.begin() as conn:
        mark = "?" if engine.dialect.name == "sqlite" else "%s"
        conn.exec_driver_sql(f"INSERT INTO jobs (task, headers) VALUES ('t', {mark})", (text,))
        conn.exec_driver_sql("""INSERT INTO jobs (task, headers, label) VALUES ('t', '{"a": 1}', 'by SQL')""")
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
    with engine.begin() as conn:
        conn.exec_driver_sql("INSERT INTO jobs (task, label) VALUES ('t', x'ff')")
        conn.exec_driver_sql("INSERT INTO jobs (task, headers, progress) VALUES ('t', x'ff', 'far')")
        conn.exec_driver_sql("INSERT INTO jobs (task, label, queue) VALUES ('followed', x'fe', x'fd')")
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
    with engine.begin() as conn:
        conn.exec_driver_sql(
            "INSERT INTO jobs (task, queue, label, on_failure, max_attempts) "
            """VALUES (x'fa', x'fb', x'fc', '{"task": "alarm"}', ?)""",
            (1 if spent else 2,),
        )
        conn.exec_driver_sql(
            "UPDATE jobs SET attempts = 1, reserved_at = 1, reserved_by = x'fe', lease_expires_at = 1"
        )
    with app.database.begin() as conn:
        rescued = settle.rescue(conn)
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


# -- before_enqueue
# ----------------------------------------------------------------------------------------------


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


def test_a_wrong_return_of_enqueue_middleware_is_refused(app: sqlq.App, engine: Engine) -> None:
    function: Any = lambda job: ["a"]  # noqa: E731
    app.before_enqueue(function)
    task = app.task(name="t")(lambda: None)
    said = pytest.raises(EnqueueError, match=r"what the function .*<lambda> returned is \['a'\]")
    with Session(engine) as session, session.begin(), said:
        app.enqueue(task.new(), session)
    with pytest.raises(EnqueueError, match=r"^enqueue takes what task\.new"):
        app.enqueue(task)  # type: ignore[arg-type]
    assert app.jobs.list() == []


async def _coroutine(job: Any) -> None: ...


def _without_argument() -> None: ...


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (7, "before_enqueue is 7, which cannot be called"),
        (_coroutine, "_coroutine, which cannot be called here and now"),
        (_without_argument, "_without_argument, which cannot be called here and now with one argument"),
    ],
)
def test_wrong_enqueue_middleware_is_refused(app: sqlq.App, function: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        app.before_enqueue(function)


# -- carry ---------------------------------------------------------------------------------------------------


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


def test_a_default_of_a_variable_is_not_carried(carrying: sqlq.App) -> None:
    task = carrying.task(name="t")(lambda: None)

    async def enqueue() -> int:  # in a context of its own
        return (await carrying.aenqueue(task.new())).id

    assert carrying.jobs.get(asyncio.run(enqueue())).headers == {}


def test_a_value_that_is_not_json_is_refused(carrying: sqlq.App) -> None:
    task = carrying.task(name="t")(lambda: None)
    token = REQUEST.set(object())
    with pytest.raises(EnqueueError, match="the context variable 'request', which the App carries, is <"):
        carrying.enqueue(task.new())
    REQUEST.reset(token)


@for_each(
    ("carry", "message"),
    [
        ("tenant", "carry is 'tenant': it is a list of context variables"),
        (["tenant"], r"carry is \['tenant'\]: it is a list of context variables"),
        (
            [TENANT, ContextVar("tenant")],
            r"carry is \[.*\]: it is a list of context variables with different names",
        ),
    ],
)
def test_a_wrong_value_of_carry_is_refused(carry: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{message}"):
        sqlq.App("sqlite:///x.db", carry=carry)


PLAY = """
import os
from contextvars import ContextVar
import sqlq

tenant = ContextVar("tenant")
app = sqlq.App(carry=[tenant], defaults={"backoff": "0s"})

def note(what):
    job = sqlq.current_job()
    with open("ran.txt", "a") as file:
        print(what, tenant.get("nobody's"), job.headers.get("a"), job.label, file=file)

@app.task(isolate=True)
def alone():
    note("alone")
    sqlq.current_job().progress(1, of=4, note="begun")
    sqlq.current_job().progress(3, of=4, note="nearly")

@app.task(isolate=True)
async def aalone():
    note("aalone")
    tenant.set("another's")
"""


def test_context_variables_travel_to_isolated_processes(
    carrying: sqlq.App, database_url: str, tmp_path: Path
) -> None:
    (tmp_path / "play.py").write_text(PLAY)
    alone, aalone = (carrying.task(name=f"play.{name}")(lambda: None).new() for name in ("alone", "aalone"))
    with being("blue"):
        ids = [carrying.enqueue(alone.set(headers={"a": 1}, label="l")).id, carrying.enqueue(aalone).id]
    ids += [carrying.enqueue(job).id for job in (alone, aalone)]
    with worker_process(tmp_path, "play:app", database_url, "-c", "1") as worker:
        wait_until(lambda: all(carrying.jobs.get(id).ended_at for id in ids), what="all ended")
        assert worker.stop() == 0
    assert (tmp_path / "ran.txt").read_text().splitlines() == [
        "alone blue 1 l",
        "aalone blue None None",
        "alone nobody's None None",
        "aalone nobody's None None",
    ]
    assert str(carrying.jobs.get(ids[0]).progress) == "3 of 4 (75%): nearly"
    assert carrying.jobs.get(ids[1]).progress is None
