"""Chancy: psycopg 3, LISTEN/NOTIFY, asyncio executor. Finished jobs stay in chancy_jobs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks import tracing, work
from benchmarks.subject import Subject


class Chancy(Subject):
    name = "chancy"
    databases = ("postgresql",)
    requirements = ("chancy[cli]", "psycopg[binary,pool]")
    packages = ("chancy", "psycopg")
    settings = "asyncio executor, eager polling, polling interval 1 s, notifications on"
    handles = "async def"
    traced = True
    enqueued = "SELECT count(*) FROM chancy_jobs"
    settled = "SELECT count(*) FROM chancy_jobs WHERE state = 'succeeded'"
    left = (
        "SELECT count(*) FROM (SELECT 1 FROM chancy_jobs WHERE state IN ('pending', 'running', "
        "'retrying') LIMIT 1) AS rest"
    )

    def prepare(self, url: str) -> None:
        import asyncio

        async def install() -> None:
            async with _app(url) as app:
                await app.migrate()

        asyncio.run(install())

    @contextmanager
    def producer(self, url: str, task: str) -> Iterator[Any]:
        with _app(url) as app:
            yield Producer(app)

    def note_inserts(self, noted: tracing.Noted) -> None:
        import chancy
        import psycopg

        tracing.note_calls(noted, chancy.Chancy, "sync_push_many_ex", "sent", None)
        tracing.note_calls(noted, psycopg.Connection, "commit", None, "answered")

    def note_claims(self, noted: tracing.Noted) -> None:
        import chancy

        tracing.note_calls(
            noted, chancy.Worker, "fetch_jobs", "claiming", "claimed", lambda jobs, *args: bool(jobs)
        )

    def workers(self, url: str, task: str, concurrency: int, processes: int) -> list[list[str]]:
        return [["python", "-m", __name__, url, str(concurrency)]] * processes


class Producer:
    def __init__(self, app: Any) -> None:
        from chancy import Job

        self.app = app
        self.job = Job(func=f"{__name__}.noop")

    def one(self, number: int) -> None:
        self.app.sync_push(self._numbered(number))

    def many(self, numbers: Sequence[int]) -> None:
        list(self.app.sync_push_many([self._numbered(number) for number in numbers], batch_size=len(numbers)))

    def _numbered(self, number: int) -> Any:
        import dataclasses

        return dataclasses.replace(self.job, kwargs={"number": number}, unique_key=None, scheduled_at=_now())


def _now() -> Any:
    from datetime import UTC, datetime

    return datetime.now(UTC)


async def noop(*, number: int) -> None:
    work.done(number)


def _app(url: str) -> Any:
    import chancy

    return chancy.Chancy(url)


async def _work(url: str, concurrency: int) -> None:
    """Do as its command does, with the queue declared first."""
    import logging

    import chancy

    logging.disable(logging.INFO)
    tracing.note_worker(Chancy())
    async with _app(url) as app:
        queue = chancy.Queue(
            "default",
            concurrency=concurrency,
            executor=chancy.Chancy.Executor.Async,
            polling_interval=1,
            eager_polling=True,
        )
        await app.declare(queue, upsert=True)
        async with chancy.Worker(app) as worker:
            await worker.wait_for_shutdown()


SUBJECTS = (Chancy,)

if __name__ == "__main__":
    import asyncio
    import sys

    asyncio.run(_work(sys.argv[1], int(sys.argv[2])))
