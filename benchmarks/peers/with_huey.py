"""Huey on SQLite: threads, polling. A finished job leaves no row where no result is stored, its fastest
mode."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from benchmarks import tracing, work
from benchmarks.subject import Subject


class Huey(Subject):
    name = "huey"
    databases = ("sqlite",)
    requirements = ("huey",)
    packages = ("huey",)
    settings = (
        "SqliteHuey(fsync=True, results=False), -w CONCURRENCY -k thread, delay 1 to 10 ms, no periodic tasks"
    )
    many = False
    chains = True
    traced = True
    enqueued = "SELECT count(*) FROM task"
    left = "SELECT count(*) FROM task"

    def prepare(self, url: str) -> None:
        _huey(url)

    @contextmanager
    def producer(self, url: str, task: str) -> Iterator[Any]:
        yield Producer(_huey(url).noop)

    def note_inserts(self, noted: tracing.Noted) -> None:
        from huey.storage import SqliteStorage

        tracing.note_calls(noted, SqliteStorage, "enqueue", "sent", "answered")

    def note_claims(self, noted: tracing.Noted) -> None:
        from huey.storage import SqliteStorage

        tracing.note_calls(
            noted, SqliteStorage, "dequeue", "claiming", "claimed", lambda data: data is not None
        )

    def workers(self, url: str, task: str, concurrency: int, processes: int) -> list[list[str]]:
        options = ["-w", str(concurrency), "-k", "thread", "-n", "-q", "-d", "0.001", "-m", "0.01"]
        return [["python", "-m", "huey.bin.huey_consumer", f"{__name__}.huey", *options]] * processes

    def chain(self, url: str, steps: int) -> None:
        found = _huey(url)
        pipeline = last = found.noop.s(0)
        for number in range(1, steps):
            last.on_complete = last = found.noop.s(number)
        found.enqueue(pipeline)

    def environment(self, url: str, concurrency: int) -> dict[str, str]:
        return {"SQLQ_BENCHMARK_URL": url}


class Producer:
    def __init__(self, task: Any) -> None:
        self.one = task


@cache
def _consumed() -> Any:
    tracing.note_worker(Huey())
    return _huey(os.environ["SQLQ_BENCHMARK_URL"])


@cache
def _huey(url: str) -> Any:
    import huey

    found = huey.SqliteHuey("benchmark", filename=url.removeprefix("sqlite:///"), results=False, fsync=True)

    @found.task(name="noop")
    def noop(number: int) -> None:
        work.done(number)

    found.noop = noop
    return found


def __getattr__(name: str) -> Any:
    if name == "huey":
        return _consumed()
    raise AttributeError(name)


SUBJECTS = (Huey,)
