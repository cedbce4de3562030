"""Apps whose tasks note what they are called with."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from sqlalchemy import Engine, text

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
