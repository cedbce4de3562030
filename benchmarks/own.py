"""sqlq as a subject: the command line as a user types it, and the public face."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar

from benchmarks.own_waiting import Waiting
from benchmarks.subject import Subject


class Sqlq(Waiting, Subject):
    name = "sqlq"
    databases: ClassVar[tuple[str, ...]] = ("postgresql", "sqlite", "mariadb")
    packages = ("sqlq-jobs", "SQLAlchemy", "psycopg", "PyMySQL")
    settings = "sqlq work -c CONCURRENCY --log-level warning; finished jobs are kept"
    enqueued = "SELECT count(*) FROM jobs"
    settled = "SELECT count(*) FROM finished_jobs WHERE outcome = 'finished'"
    left = "SELECT count(*) FROM (SELECT 1 FROM jobs LIMIT 1) AS rest"
    tasks: dict[str, str] = {}  # noqa: RUF012 - read only
    log_level = "warning"
    answers = True

    def prepare(self, url: str) -> None:
        import sqlq

        app = sqlq.App(url)
        app.migrate()
        app.close()

    @contextmanager
    def producer(self, url: str, task: str) -> Iterator[Any]:
        from benchmarks import tasks

        name, _, ms = task.partition(":")
        tasks.app.use(url)
        yield SqlqProducer(tasks.app, getattr(tasks, self.tasks.get(name, name)), [int(ms)] if ms else [])
        tasks.app.close()

    def workers(self, url: str, task: str, concurrency: int, processes: int) -> list[list[str]]:
        command = [
            "sqlq",
            "-d",
            url,
            "-a",
            "benchmarks.tasks:app",
            "work",
            "-c",
            str(concurrency),
            "--log-level",
            self.log_level,
        ]
        if processes > 1 and _has_processes():
            return [[*command, "-p", str(processes)]]
        return [command] * processes

    # -- what only sqlq and the limit do ---------------------------------------------------------------------

    def session(self, url: str, jobs: int) -> dict[str, float]:
        """Enqueue in the caller's open transaction; return the µs a job takes there, through a Session and a
        Connection."""
        from benchmarks import tasks

        tasks.app.use(url)
        new, enqueue = tasks.noop.new, tasks.app.enqueue
        found = in_transactions(url, jobs, lambda session, number: enqueue(new(number), session=session))
        tasks.app.close()
        return found

    def produce(self, url: str, jobs: int, wake_ups: int) -> float:
        """Enqueue one by one, with or without wake-ups; return the seconds."""
        from benchmarks import tasks

        tasks.app.use(url)
        hints: Any = tasks.app._connected.enqueuer._notifier  # noqa: SLF001 - there is no option to turn wake-ups off, and no need of one
        if not wake_ups:
            hints.send = lambda *args, **kw: None
        for number in range(20):
            tasks.app.enqueue(tasks.noop.new(number))
        print("ready", flush=True)
        sys.stdin.readline()
        begin = time.perf_counter()
        for number in range(jobs):
            tasks.app.enqueue(tasks.noop.new(number))
        took = time.perf_counter() - begin
        tasks.app.close()
        return took

    def results(self, url: str, jobs: int, ms: int) -> list[float]:
        """Wait for the result of one job after the other, each of which takes so long.

        Return how many milliseconds after its settle began each call returned. The row has the time of the
        settle, by the database's clock, which is this machine's.
        """
        from benchmarks import tasks

        app = tasks.app
        app.use(url)
        returned: dict[int, float] = {}
        for number in range(jobs):
            job = app.enqueue(tasks.nap.new(number, ms))
            app.result(job, timeout="1m")
            returned[job.id] = time.time()
        settled = {id: app.jobs.get(id).ended_at for id in returned}
        app.close()
        return [(moment - at.timestamp()) * 1000 for id, moment in returned.items() if (at := settled[id])]

    def late(self, url: str, jobs: int, wait_ms: int, every_ms: int) -> list[list[int]]:
        """Insert jobs in transactions that commit later; return when each COMMIT was sent and when it
        returned.

        All the inserts come first, then, `wait_ms` after them, one commit each `every_ms`.
        """
        from sqlalchemy import NullPool, create_engine

        from benchmarks import tasks

        tasks.app.use(url)
        engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"), poolclass=NullPool)
        connections = [engine.connect() for _ in range(jobs)]
        moments = []
        try:
            for number, connection in enumerate(connections):
                tasks.app.enqueue(tasks.noop.new(number), session=connection)
            begin = time.monotonic() + wait_ms / 1000
            for number, connection in enumerate(connections):
                time.sleep(max(0.0, begin + number * every_ms / 1000 - time.monotonic()))
                called = time.monotonic_ns()
                connection.commit()
                moments.append([called, time.monotonic_ns()])
            # to close so many connections keeps both cores busy, and the last job is still on its way
            time.sleep(every_ms / 1000)
        finally:
            for connection in connections:
                connection.close()
        tasks.app.close()
        return moments

    def note_inserts(self, noted: dict[str, list[int]]) -> None:
        from benchmarks import tracing

        tracing.note_statements(noted, "sent", "answered")

    def feature(self, url: str, place: int, jobs: int) -> dict[str, float]:
        """Return what jobs cost that use a feature, by its place in the list."""
        from benchmarks.features import FEATURES, measure

        return measure(list(FEATURES)[place], url, jobs)

    def at_moments(self, url: str, jobs: int, within_ms: int) -> list[int]:
        """Enqueue jobs that are due at random milliseconds; return these in ns of the monotonic clock."""
        from datetime import UTC, datetime, timedelta
        from random import Random

        from benchmarks import tasks

        tasks.app.use(url)
        chosen = Random(7)
        now = datetime.now(UTC).replace(microsecond=0)
        due = [now + timedelta(milliseconds=1_000 + chosen.randrange(within_ms)) for _ in range(jobs)]
        tasks.app.enqueue_many([tasks.noop.new(number).set(available_at=at) for number, at in enumerate(due)])
        since = time.time_ns() - time.monotonic_ns()
        tasks.app.close()
        return [round(at.timestamp() * 1_000) * 1_000_000 - since for at in due]

    def claims(self, url: str, times: int, limit: int) -> list[float]:
        """Claim `limit` jobs of the queue default as a worker does and settle them, so many times; return the
        ms each claim took.

        The first ones only warm up and are left out.
        """
        import uuid

        import sqlq
        from sqlq.model.outcome import Finished, Settlement
        from sqlq.store.jobs import settle
        from sqlq.worker.claim.claimer import Claimer
        from sqlq.worker.options import WorkerOptions

        app = sqlq.App(url)
        claimer = Claimer(
            app.database.for_loops, str(uuid.uuid4()), WorkerOptions(("default",), limit, 30_000)
        )
        found = []
        for _ in range(times):
            begin = time.perf_counter()
            claimed = claimer.claim(limit)
            found.append((time.perf_counter() - begin) * 1000)
            if len(claimed) != limit:
                raise RuntimeError(f"claimed {len(claimed)} jobs instead of {limit}")
            with app.database.begin() as conn:
                settle.settle(
                    conn,
                    [Settlement(job.id, job.lease_token, job.attempts, Finished(None)) for job in claimed],
                )
        app.close()
        return found[5:]


class SqlqAsync(Sqlq):
    name = "sqlq-async"
    handles = "async def"
    tasks = {"noop": "anoop", "nap": "anap"}  # noqa: RUF012 - read only


class SqlqLines(Sqlq):
    """As installed: with a line for each job."""

    name = "sqlq-lines"
    settings = "sqlq work -c CONCURRENCY; finished jobs are kept"
    log_level = "info"


class SqlqProducer:
    def __init__(self, app: Any, task: Any, more: Sequence[int]) -> None:
        self.app = app
        self.task = task
        self.more = more

    def one(self, number: int) -> None:
        self.app.enqueue(self.task.new(number, *self.more))

    def answer(self, number: int) -> None:
        self.app.result(self.app.enqueue(self.task.new(number, *self.more)), timeout="1m")

    def many(self, numbers: Sequence[int]) -> None:
        self.app.enqueue_many([self.task.new(number, *self.more) for number in numbers])


def in_transactions(url: str, jobs: int, enqueue: Any) -> dict[str, float]:
    """Call `enqueue(session, number)` in transactions of 100, through a Session and a Connection in turn;
    return the µs a call takes of each. BEGIN and COMMIT are not timed."""
    from sqlalchemy import create_engine
    from sqlalchemy.orm import Session

    import sqlq

    engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    if engine.dialect.name == "sqlite":
        sqlq.configure_sqlite(engine, immediate=True)
    seconds = {"session": 0.0, "connection": 0.0}
    lots = max(1, jobs // 200)
    for lot in range(-1, lots):  # the first warms up
        for kind in seconds:
            with Session(engine) if kind == "session" else engine.connect() as session:
                session.connection() if isinstance(session, Session) else session.begin()
                begin = time.perf_counter()
                for number in range(100):
                    enqueue(session, number)
                took = time.perf_counter() - begin
                session.commit()
            if lot >= 0:
                seconds[kind] += took
    engine.dispose()
    return {kind: value / lots / 100 * 1e6 for kind, value in seconds.items()}


@cache
def _has_processes() -> bool:
    """Whether `sqlq work` can run several processes by itself."""
    done = subprocess.run(
        [sys.executable, "-m", "sqlq", "work", "--help"], capture_output=True, text=True, check=True
    )
    return "-p," in done.stdout


SUBJECTS = (Sqlq, SqlqAsync, SqlqLines)


def payload(number: int) -> str:
    """The arguments of a job as sqlq writes them."""
    return json.dumps({"args": [number]})
