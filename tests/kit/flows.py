"""Apps whose tasks note what they are called with."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from sqlalchemy import Engine, create_engine, inspect, text

import sqlq


class Shop:
    """An App whose tasks note when they are called, and with what."""

    def __init__(self, app: sqlq.App) -> None:
        self.app = app
        self.called: list[Any] = []
        self.broken: set[Any] = set()

        @app.task(name="note", max_attempts=1)
        def note(what: Any) -> Any:
            self.called.append(what)
            if what in self.broken:
                raise ValueError(f"{what} is broken")
            return what

        @app.task(name="total", max_attempts=1)
        def total(numbers: list[int]) -> int:
            self.called.append(numbers)
            return sum(numbers)

        self.note, self.total = note, total

    def work(self, **options: Any) -> list[Any]:
        """Run everything that can run, and return what was called since the last time."""
        before = len(self.called)
        self.app.worker(drain=True, **options).run()
        return self.called[before:]

    def states(self) -> dict[Any, str]:
        """Return the states of the jobs by what they are called with."""
        return {job.payload["args"][0]: str(job.state) for job in self.app.jobs.list(limit=1000)}


class OrderShop:
    """Tasks, and what they did: `count` notes how many orders were committed by then."""

    def __init__(self, app: sqlq.App, engine: Engine, **options: Any) -> None:
        """`options` are those of the task that fails."""
        self.app = app
        self.done: list[Any] = []
        done = self.done

        @app.task(name="shop.count")
        def count(name: str = "") -> None:
            with engine.connect() as conn:
                done.append((name, conn.scalar(text("SELECT count(*) FROM orders"))))

        @app.task(name="shop.note")
        def note(name: str) -> str:
            done.append(name)
            return name.upper()

        @app.task(name="shop.anote")
        async def anote(name: str) -> None:
            await asyncio.sleep(0)
            done.append((name, threading.current_thread()))

        @app.task(name="shop.bad", **options)
        def bad(name: str) -> None:
            done.append(name)
            raise LookupError(f"no order {name}")

        self.count, self.note, self.anote, self.bad = count, note, anote, bad


class RealShop:
    """Tasks on an App whose database is not the test's own, and what they did."""

    def __init__(self, app: sqlq.App) -> None:
        self.app = app
        self.done: list[str] = []

        @app.task(name="shop.note")
        def note(text: str) -> None:
            self.done.append(text)

        @app.task(name="shop.bad", max_attempts=1)
        def bad() -> None:
            raise LookupError("no such order")

        self.note, self.bad = note, bad

    def fill(self) -> None:
        """Have a row in every table: jobs that wait, finished and failed, a paused queue, and an order."""
        self.app.enqueue_many([self.note.new("finished"), self.bad.new()])
        assert self.app.worker(drain=True).run() == sqlq.testing.Counts(finished=1, failed=1)
        self.app.enqueue_many([self.note.new("real"), self.note.new("real, too").set(delay="1d")])
        self.app.queues.pause("mail")
        self.done.clear()
        with self.app.database.begin() as conn:
            conn.execute(text("CREATE TABLE orders (id integer PRIMARY KEY)"))
            conn.execute(text("INSERT INTO orders (id) VALUES (1)"))


def rows(url: str) -> dict[str, list[tuple[Any, ...]]]:
    """Return every row of every table in a database's default schema."""
    engine = create_engine(url)
    with engine.connect() as conn:
        held = {
            table: sorted(tuple(row) for row in conn.execute(text(f"SELECT * FROM {table}")))
            for table in inspect(conn).get_table_names()
        }
    engine.dispose()
    for table in ("jobs", "finished_jobs", "failed_jobs", "sqlq_queues", "orders"):
        assert held[table], f"nothing could be lost from {table}"
    return held
