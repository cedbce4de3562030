"""procrastinate: psycopg 3, LISTEN/NOTIFY, jobs as asyncio tasks. Finished jobs stay in
procrastinate_jobs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from benchmarks import work
from benchmarks.subject import Subject


class Procrastinate(Subject):
    name = "procrastinate"
    databases = ("postgresql",)
    requirements = ("procrastinate", "psycopg[binary,pool]")
    packages = ("procrastinate", "psycopg")
    settings = "procrastinate worker -c CONCURRENCY, async def, listen-notify on, jobs kept"
    handles = "async def"
    ticks = True
    enqueued = "SELECT count(*) FROM procrastinate_jobs"
    settled = "SELECT count(*) FROM procrastinate_jobs WHERE status = 'succeeded'"
    left = (
        "SELECT count(*) FROM (SELECT 1 FROM procrastinate_jobs WHERE status IN ('todo', 'doing') LIMIT "
        "1) AS rest"
    )

    def prepare(self, url: str) -> None:
        with _app(url).open() as app:
            app.schema_manager.apply_schema()

    @contextmanager
    def producer(self, url: str, task: str) -> Iterator[Any]:
        with _app(url).open() as app:
            yield Producer(app.tasks["noop"])

    def workers(self, url: str, task: str, concurrency: int, processes: int) -> list[list[str]]:
        command = [
            "procrastinate",
            "--log-level",
            "warning",
            "--app",
            f"{__name__}.app",
            "worker",
            "-c",
            str(concurrency),
        ]
        return [command] * processes

    def environment(self, url: str, concurrency: int) -> dict[str, str]:
        return {"SQLQ_BENCHMARK_URL": url}


class Producer:
    def __init__(self, task: Any) -> None:
        self.task = task

    def one(self, number: int) -> None:
        self.task.defer(number=number)

    def many(self, numbers: Sequence[int]) -> None:
        self.task.batch_defer(*({"number": number} for number in numbers))


def _app(url: str) -> Any:
    import procrastinate

    app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=url))

    @app.task(name="noop")
    async def noop(number: int) -> None:
        work.done(number)

    if os.environ.get("SQLQ_BENCHMARK_TICKS"):

        @app.periodic(cron="* * * * * *")
        @app.task(name="ticked")
        async def ticked(timestamp: int) -> None:
            work.ticked(timestamp)

    return app


@cache
def _worker_app() -> Any:
    return _app(os.environ["SQLQ_BENCHMARK_URL"])


def __getattr__(name: str) -> Any:
    if name == "app":
        return _worker_app()
    raise AttributeError(name)


SUBJECTS = (Procrastinate,)
