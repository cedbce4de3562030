"""An App for tests of flows."""

from __future__ import annotations

from typing import Any

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
