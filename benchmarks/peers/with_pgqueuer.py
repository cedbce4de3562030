"""PGQueuer: asyncpg, LISTEN/NOTIFY, jobs as asyncio tasks. Finished jobs move to pgqueuer_log."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from benchmarks import tracing, work
from benchmarks.subject import Subject


class PGQueuer(Subject):
    name = "pgqueuer"
    databases = ("postgresql",)
    requirements = ("pgqueuer[cli]", "asyncpg", "uvloop")
    packages = ("pgqueuer", "asyncpg", "uvloop")
    settings = (
        "batch size CONCURRENCY, at most 2 × CONCURRENCY tasks (the least it takes with it), asyncpg, uvloop"
    )
    handles = "async def"
    ticks = True
    traced = True
    enqueued = "SELECT count(*) FROM pgqueuer"
    settled = "SELECT count(*) FROM pgqueuer_log WHERE status = 'successful'"
    left = "SELECT count(*) FROM (SELECT 1 FROM pgqueuer LIMIT 1) AS rest"

    def prepare(self, url: str) -> None:
        import asyncio

        async def install() -> None:
            import asyncpg
            from pgqueuer.db import AsyncpgDriver
            from pgqueuer.queries import Queries

            connection = await asyncpg.connect(url)
            await Queries(AsyncpgDriver(connection)).install()
            await connection.close()

        asyncio.run(install())

    @asynccontextmanager
    async def producer(self, url: str, task: str) -> AsyncIterator[Any]:
        import asyncpg
        from pgqueuer.db import AsyncpgDriver
        from pgqueuer.queries import Queries

        connection = await asyncpg.connect(url)
        yield Producer(Queries(AsyncpgDriver(connection)))
        await connection.close()

    def note_inserts(self, noted: tracing.Noted) -> None:
        from pgqueuer.db import AsyncpgDriver

        tracing.note_calls(noted, AsyncpgDriver, "fetch", "sent", "answered")

    def note_claims(self, noted: tracing.Noted) -> None:
        from pgqueuer.db import AsyncpgDriver

        def claimed(rows: Any, query: str, *args: Any) -> bool:
            return bool(rows) and "SKIP LOCKED" in query

        tracing.note_calls(noted, AsyncpgDriver, "fetch", "claiming", "claimed", claimed)

    def workers(self, url: str, task: str, concurrency: int, processes: int) -> list[list[str]]:
        return [["python", "-m", __name__, url, str(concurrency)]] * processes


class Producer:
    def __init__(self, queries: Any) -> None:
        self.queries = queries

    async def one(self, number: int) -> None:
        await self.queries.enqueue("noop", str(number).encode())

    async def many(self, numbers: Sequence[int]) -> None:
        await self.queries.enqueue(
            ["noop"] * len(numbers), [str(number).encode() for number in numbers], [0] * len(numbers)
        )


async def _work(url: str, concurrency: int) -> None:
    """Do as `pgq run` does with these options.

    Its own command cannot log less with every version of its command-line library.
    """
    import asyncio
    import logging
    import os
    import signal
    import time

    import asyncpg
    from pgqueuer import PgQueuer
    from pgqueuer.db import AsyncpgDriver

    tracing.note_worker(PGQueuer())
    queuer = PgQueuer(AsyncpgDriver(await asyncpg.connect(url)))

    @queuer.entrypoint("noop")
    async def noop(job: Any) -> None:
        work.done(int(job.payload))

    if os.environ.get("SQLQ_BENCHMARK_TICKS"):

        @queuer.schedule("ticked", "* * * * * *")
        async def ticked(schedule: Any) -> None:
            work.ticked(time.time())

    logging.getLogger("pgqueuer").setLevel(logging.WARNING)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, queuer.shutdown.set)
    await queuer.run(batch_size=concurrency, max_concurrent_tasks=2 * concurrency)


SUBJECTS = (PGQueuer,)

if __name__ == "__main__":
    import sys

    import uvloop

    uvloop.run(_work(sys.argv[1], int(sys.argv[2])))
