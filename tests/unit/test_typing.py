"""Type checkers refuse wrong arguments of `.new()` and wrong options, and nothing else.

Each line that must be reported has a mark; any other report is a failure, too.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.kit.processes import run_program

ROOT = Path(__file__).parents[2]

PROGRAM = """
from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, assert_type
from uuid import UUID

import psycopg
from sqlalchemy import Connection, Engine
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

import sqlq
from sqlq import Job, JobDetails, NewJob
from sqlq.types import JobList, RetriedJobs

app = sqlq.App("sqlite:///shop.db", retention=timedelta(days=1))
app = sqlq.App(7)  # wrong

@app.middleware
def traced(running: sqlq.JobContext) -> Iterator[None]:
    assert_type(running.id, int)
    yield

@app.middleware
async def atraced(running: sqlq.JobContext) -> AsyncIterator[None]:
    yield

@app.middleware  # wrong
def untraced(running: str) -> Iterator[None]:
    yield

@app.lifespan
async def clients() -> AsyncIterator[dict[str, int]]:
    yield {}

@app.lifespan  # wrong
def takes(app: sqlq.App) -> Iterator[None]:
    yield

@app.on("failed", "retried")
def listen(events: list[sqlq.JobEvent]) -> None:
    assert_type(events[0].seconds, float | None)

@app.on("finnished")  # wrong
def deaf(events: list[sqlq.JobEvent]) -> None: ...

@app.on("failed")  # wrong
def singly(event: sqlq.JobEvent) -> None: ...

@app.task
def alarm(ended: sqlq.JobOutcome) -> None: ...

@app.task
async def note(how: dict[str, Any], urgent: bool = False) -> int:
    return 1

@app.task(on_success=note, on_failure=alarm, middleware=[traced])
def plain(order_id: int, *, copy: bool = False) -> str:
    return str(order_id)

@app.task(queue="mail", max_attempts=5, timeout="30s", backoff=["10s", "5m"], retry_on=OSError, fail_on=(ValueError,))
def named(order_id: int) -> None: ...

@app.task(backoff=sqlq.exponential("5s"))
async def plain_async(order_id: int) -> str:
    return str(order_id)

@app.task(backoff=lambda attempts: timedelta(seconds=attempts))
def typed(id: UUID, *, at: datetime | None = None) -> UUID:
    return id

@app.task(middleware=traced)  # wrong
def wrong_around() -> None: ...

@app.task(que="mail")  # wrong
def wrong_option() -> None: ...

@app.task(timeout=30)  # wrong
def wrong_timeout() -> None: ...

@app.task(retry_on="OSError")  # wrong
def wrong_exceptions() -> None: ...

@app.task(on_failure=named)  # wrong
def wrong_follow_up() -> None: ...

assert_type(plain(7), str)
assert_type(plain.new(7, copy=True), NewJob[str])
assert_type(named.new(order_id=7), NewJob[None])
assert_type(typed.new(UUID(int=7), at=datetime.now(UTC)), NewJob[UUID])
not_typed: NewJob = plain_async.new(7)
wrong_result: NewJob[str] = typed.new(UUID(int=7))  # wrong
plain.new()  # wrong
plain.new("7")  # wrong
plain.new(7, coppy=True)  # wrong
named.new(None)  # wrong
plain_async.new(7, 8)  # wrong
typed.new("7")  # wrong

job = named.new(7)
assert_type(job.set(queue="mail", delay="5m", priority=10, timeout=timedelta(seconds=30)), NewJob[None])
assert_type(job.set(available_at=datetime.now(UTC), unique_key="k", unique_until="start"), NewJob[None])
assert_type(job.set(on_success=alarm, on_failure=None), NewJob[None])
job.set(on_success=plain)  # wrong
job.set(on_failure="alarm")  # wrong
job.set(delay=5)  # wrong
job.set(unique_until="end")  # wrong
job.set("mail")  # wrong
job.set(que="mail")  # wrong
job.queue = "mail"  # wrong

def sync(one: Session, two: scoped_session[Session], three: Connection, engine: Engine) -> None:
    assert_type(app.enqueue(job), Job[None])
    assert_type(app.enqueue(job, session=one), Job[None])
    app.enqueue(job, session=two)
    app.enqueue(job, session=three)
    assert_type(app.enqueue_many([job for _ in range(3)], session=one), list[Job[None]])
    some: list[Job] = app.enqueue_many([plain.new(7), typed.new(UUID(int=7))])
    assert_type(app.enqueue(job).created, bool)
    assert_type(app.result(app.enqueue(typed.new(UUID(int=7))), timeout="10s"), UUID)
    assert_type(app.result(app.enqueue(plain_async.new(7))), str)
    assert_type(app.result(some[0].id), Any)
    for done in app.as_completed(app.enqueue_many([typed.new(UUID(int=7))]), timeout=None):
        assert_type(app.result(done), UUID)
    for waited in app.wait_all(app.enqueue_many([typed.new(UUID(int=7))]), timedelta(seconds=1), all=False).ended:
        assert_type(waited, Job[UUID])
    assert_type(app.jobs.get(7), JobDetails)
    assert_type(app.jobs.list(state="failed"), JobList)
    assert_type(app.jobs.retry([7]), RetriedJobs)
    sqlq.App(engine=engine)
    sqlq.configure_sqlite(engine, immediate=True)
    app.result(typed.new(UUID(int=7)))  # wrong
    app.wait_all(app.enqueue(job))  # wrong
    app.enqueue(named)  # wrong
    app.enqueue([job])  # wrong
    app.enqueue(job, session=engine)  # wrong
    app.enqueue_many(job)  # wrong

async def asynchronous(one: AsyncSession, two: AsyncConnection, three: async_scoped_session[AsyncSession], engine: AsyncEngine) -> None:
    assert_type(await plain_async(7), str)
    assert_type(await app.aenqueue(job, session=one), Job[None])
    await app.aenqueue(job, session=two)
    await app.aenqueue(job, session=three)
    assert_type(await app.aenqueue_many([job], session=one), list[Job[None]])
    assert_type(await app.aresult(await app.aenqueue(plain_async.new(7)), timeout="10s"), str)
    assert_type((await app.await_all([7])).pending, list[Job[Any]])
    async for done in app.as_completed(await app.aenqueue_many([job])):
        assert_type(await app.aresult(done), None)
    sqlq.App(engine=engine)
    app.enqueue(job, session=one)  # wrong
    await app.aenqueue(job, session=engine)  # wrong

def on_drivers(one: sqlite3.Connection, two: psycopg.Connection[tuple[int]], three: psycopg.AsyncConnection[tuple[int]]) -> None:
    app.enqueue(job, session=one)
    app.enqueue(job, two, eager=False)
    app.enqueue_many([job], commit=True)
    app.enqueue(job, session=three)  # wrong
    with sqlq.current_job().completing(two) as same:
        assert_type(same, psycopg.Connection[tuple[int]])
    assert_type(sqlq.current_job().app.enqueue(job), sqlq.Job[None])
    app.enqueue(app.named("shop.send").new(7, more={}).set(queue="mail"))

async def on_asynchronous_drivers(two: psycopg.AsyncConnection[tuple[int]]) -> None:
    await app.aenqueue_many([job], session=two)
    async with sqlq.current_job().acompleting(two) as same:
        assert_type(same, psycopg.AsyncConnection[tuple[int]])
"""

WRONG = {number for number, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# wrong")}


@pytest.fixture
def program(tmp_path: Path) -> Path:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    return file


def run(folder: Path, checker: str, *options: object) -> str:
    """Return the JSON that a type checker prints."""
    return run_program("-m", checker, *map(str, options), cwd=folder, timeout=600).stdout


@pytest.mark.slow
def test_mypy_reports_the_wrong_lines_only(program: Path) -> None:
    cache = program.parent / "cache"
    out = run(ROOT, "mypy", "--strict", "--config-file=", "--output=json", f"--cache-dir={cache}", program)
    reports = [each for each in map(json.loads, out.splitlines()) if each["severity"] == "error"]
    assert {each["line"] for each in reports if Path(each["file"]).name == program.name} == WRONG, out


@pytest.mark.slow
def test_pyright_reports_the_wrong_lines_only(program: Path) -> None:
    folder = program.parent
    (folder / "pyrightconfig.json").write_text(
        json.dumps({"typeCheckingMode": "strict", "extraPaths": [str(ROOT)], "include": [program.name]})
    )
    out = run(folder, "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", folder)
    reports = [each for each in json.loads(out)["generalDiagnostics"] if each["severity"] == "error"]
    assert {each["range"]["start"]["line"] + 1 for each in reports} == WRONG, reports
