"""An attempt leaves nothing of its arguments, its handler's locals or its exception in memory. It needs no
help of Python's collector for that."""

from __future__ import annotations

import json
import threading
import weakref
from pathlib import Path

from sqlalchemy import Engine, text

import sqlq
from sqlq.worker.settle.settle import MAX_WITH_LOCALS
from tests.kit import needs, wait_until, working
from tests.kit.processes import worker_process

MODULE = """
import asyncio, gc, os, threading, time, weakref
from contextlib import contextmanager
from dataclasses import dataclass
import sqlq

gc.disable()
app = sqlq.App()

@dataclass
class Thing:
    name: str

def watch(thing):
    weakref.finalize(thing, gone, f"gone/{thing.name}")
    return thing

def gone(file):
    open(file, "w").close()

def begins(how, thing):
    if how == "is cancelled":
        open(f"begun/{thing.name}", "w").close()

@app.middleware
@contextmanager
def around(job):
    if job.task.startswith("m.inside"):
        try:
            yield
        except ValueError as error:
            raise LookupError("translated") from error
    else:
        yield

@app.on("failed", "retried", "cancelled", "finished")
def hear(events):
    pass

def ends(how):
    sqlq.current_job().progress(1, of=2)
    match how:
        case "returns": return 1
        case "raises": raise ValueError("no")
        case "chained":
            try:
                raise ValueError("no")
            except ValueError as error:
                raise KeyError("other") from error
        case "retries": raise sqlq.Retry("1h")
        case "snoozes": raise sqlq.Snooze("1h")
        case "cancels": raise sqlq.Cancel("why")
        case "exits": raise SystemExit(3)

async def later(how, mine):
    await asyncio.sleep(0)
    return ends(how)

def plain(how: str, thing: Thing):
    argument, mine = watch(thing), watch(Thing(thing.name + "-local"))
    begins(how, thing)
    if how == "awaitable":
        return later("raises", mine)
    while how in ("times out", "is cancelled"):
        if sqlq.current_job().should_stop():
            raise ValueError("stopped")
        time.sleep(0.01)
    return ends(how)

async def coroutine(how: str, thing: Thing):
    argument, mine = watch(thing), watch(Thing(thing.name + "-local"))
    begins(how, thing)
    if how == "awaitable":
        await asyncio.gather(later("raises", mine), later("raises", mine))
    if how in ("times out", "is cancelled"):
        await asyncio.sleep(60)
    return ends(how)

for name, handler, options in (
    ("m.plain", plain, {}), ("m.coroutine", coroutine, {}),
    ("m.inside", plain, {}), ("m.inside_coroutine", coroutine, {}),
    ("m.alone", plain, {"isolate": True}), ("m.alone_coroutine", coroutine, {"isolate": True}),
):
    app.task(name=name, max_attempts=2, **options)(handler)
"""
INSERT = text(
    "INSERT INTO jobs (queue, task, payload, timeout_ms) VALUES ('default', :task, :payload, :timeout_ms) "
    "RETURNING id"
)
KINDS = ("plain", "coroutine", "inside", "inside_coroutine", "alone", "alone_coroutine")
ENDS = (
    *("returns", "raises", "chained", "retries", "snoozes", "cancels", "exits", "awaitable"),
    *("times out", "is cancelled"),
)


@needs("file")
def test_an_ended_attempt_leaves_nothing_in_memory(app: sqlq.App, database_url: str, tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(MODULE)
    gone, begun = tmp_path / "gone", tmp_path / "begun"
    gone.mkdir()
    begun.mkdir()
    named = {f"{kind} {end}": (kind, end) for kind in KINDS for end in ENDS}
    ids = {}
    with worker_process(tmp_path, "m:app", database_url, "-c", "8"):
        with app.database.engine.begin() as conn:
            for name, (kind, end) in named.items():
                values = {"task": f"m.{kind}", "payload": json.dumps({"args": [end, {"name": name}]})}
                timeout_ms = 500 if end == "times out" else None
                ids[name] = conn.execute(INSERT, {**values, "timeout_ms": timeout_ms}).scalar_one()
        wait_until(lambda: len(list(begun.iterdir())) == len(KINDS), what="the handlers that wait running")
        app.jobs.cancel([ids[path.name] for path in begun.iterdir()])
        expected = {f"{name}{of}" for name in named for of in ("", "-local")}

        def left() -> set[str]:
            return expected - {path.name for path in gone.iterdir()}

        try:
            wait_until(lambda: not left(), what="all being gone")
        finally:
            assert left() == set()


@needs("row_locks")
def test_locals_of_older_failures_are_dropped_while_none_is_written(app: sqlq.App, engine: Engine) -> None:
    jobs, gone = 3 * MAX_WITH_LOCALS, list[int]()
    started, go_on = threading.Semaphore(0), threading.Event()

    class Thing: ...

    @app.task(name="t", max_attempts=1)
    def fails(number: int) -> None:
        thing = Thing()
        weakref.finalize(thing, gone.append, number)
        started.release()
        assert go_on.wait(30)
        try:
            raise ValueError(str(number))
        except ValueError as error:
            raise LookupError from error

    app.enqueue_many(fails.new(number) for number in range(jobs))
    with working(app, concurrency=jobs):
        try:
            for _ in range(jobs):
                assert started.acquire(timeout=30)
            with engine.begin() as conn:
                conn.execute(text("SELECT id FROM jobs ORDER BY id FOR UPDATE"))
                go_on.set()
                wait_until(lambda: len(gone) == jobs - MAX_WITH_LOCALS, what="the older ones gone")
        finally:
            go_on.set()
        wait_until(lambda: len(app.jobs.list(state="failed", limit=jobs)) == jobs, what="failures written")
    failed = app.jobs.list(state="failed", limit=jobs)
    assert {job.exception for job in failed} == {"LookupError"}
    assert all("raise ValueError(str(number))" in (job.traceback or "") for job in failed)
