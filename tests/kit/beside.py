"""A real database beside a test's own: what is in it, and whether all of it is still there."""

from __future__ import annotations

from typing import Any

from sqlalchemy import create_engine, inspect, text

import sqlq


class Shop:
    """Tasks on an App, and what they did."""

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
