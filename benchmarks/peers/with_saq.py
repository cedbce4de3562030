"""SAQ on PostgreSQL: psycopg 3, LISTEN/NOTIFY, jobs as asyncio tasks. Finished jobs stay in saq_jobs for
their ttl."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from benchmarks import work
from benchmarks.subject import Subject


class Saq(Subject):
    name = "saq"
    databases = ("postgresql",)
    requirements = ("saq[postgres]", "psycopg[binary,pool]")
    packages = ("saq", "psycopg")
    settings = "PostgresQueue, concurrency CONCURRENCY, async def, finished jobs kept for 600 s (its default)"
    handles = "async def"
    many = False
    enqueued = "SELECT count(*) FROM saq_jobs"
    settled = "SELECT count(*) FROM saq_jobs WHERE status = 'complete'"
    left = (
        "SELECT count(*) FROM (SELECT 1 FROM saq_jobs WHERE status IN ('new', 'queued', 'active') LIMIT "
        "1) AS rest"
    )

    def prepare(self, url: str) -> None:
        import asyncio

        async def install() -> None:
            async with self.producer(url, "noop"):
                pass

        asyncio.run(install())

    @asynccontextmanager
    async def producer(self, url: str, task: str) -> AsyncIterator[Any]:
        from saq import Queue

        queue = Queue.from_url(url)
        await queue.connect()
        yield Producer(queue)
        await queue.disconnect()

    def workers(self, url: str, task: str, concurrency: int, processes: int) -> list[list[str]]:
        return [["saq", f"{__name__}.settings"]] * processes

    def environment(self, url: str, concurrency: int) -> dict[str, str]:
        return {"SQLQ_BENCHMARK_URL": url, "SQLQ_BENCHMARK_CONCURRENCY": str(concurrency)}


class Producer:
    def __init__(self, queue: Any) -> None:
        self.queue = queue

    async def one(self, number: int) -> None:
        await self.queue.enqueue("noop", number=number)


async def noop(context: Any, *, number: int) -> None:
    work.done(number)


def __getattr__(name: str) -> Any:
    if name != "settings":
        raise AttributeError(name)
    from saq import Queue

    queue = Queue.from_url(os.environ["SQLQ_BENCHMARK_URL"])
    return {"queue": queue, "functions": [noop], "concurrency": int(os.environ["SQLQ_BENCHMARK_CONCURRENCY"])}


SUBJECTS = (Saq,)
