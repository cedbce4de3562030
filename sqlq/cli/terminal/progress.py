"""The progress of `sqlq work --drain`: on a terminal a line that changes, else a line a minute."""

from __future__ import annotations

import time
from collections.abc import Sequence

from sqlalchemy import make_url
from sqlalchemy.exc import SQLAlchemyError

from sqlq.admin.queues import Queues, Waiting
from sqlq.cli.terminal.logs import ERASE, draw
from sqlq.cli.terminal.output import console
from sqlq.config.durations import rate, span
from sqlq.database.database import Database
from sqlq.database.timeouts import LOOPS
from sqlq.errors import SqlqError
from sqlq.worker.supervise.supervisor import Supervisor
from sqlq.worker.threads.log import log
from sqlq.worker.threads.loop import Loop, Outage

DRAW_SECONDS = 0.25
COUNT_SECONDS = 3.0
COUNTED = 20_000
"""Waiting jobs are counted up to this number."""
SUMMARY_SECONDS = 60.0
FIRST = ("finished", "retried", "failed")


class Progress(Loop):
    """Watches the supervisor from a thread of its own, and counts the waiting jobs now and then."""

    def __init__(self, supervisor: Supervisor, queues: Sequence[str] | None, *, drawn: bool) -> None:
        super().__init__("sqlq-progress", Outage("showing the progress"))
        self.first_wait = DRAW_SECONDS if drawn else SUMMARY_SECONDS
        self._supervisor = supervisor
        self._queues = queues
        self._drawn = drawn
        self._database: Database | None = None
        self._waiting: Waiting | None = None
        self._count_at = 0.0

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *exc: object) -> None:
        """End, and leave the terminal as it was."""
        self.close(1.0)
        if self._database is not None:
            self._database.close()
        if self._drawn:
            draw(ERASE)

    def _turn(self) -> float:
        if time.monotonic() >= self._count_at and self._supervisor.location is not None:
            self._count(*self._supervisor.location)
        line = self._line()
        if self._drawn:
            draw(f"{ERASE}{line[: console(err=True).width - 1]}\r")
        else:
            log.info("%s", line, event="progress")
        return self.first_wait

    def _count(self, url: str, schema: str | None) -> None:
        try:
            self._database = self._database or Database(make_url(url), schema, use=LOOPS)
            self._waiting = Queues(self._database)._waiting(self._queues, limit=COUNTED)
        except (SQLAlchemyError, SqlqError) as error:  # the workers report it, if it lasts
            log.debug("waiting jobs could not be counted: %s", error)
            self._waiting = None
        self._count_at = time.monotonic() + COUNT_SECONDS

    def _line(self) -> str:
        parts = [outcomes(self._supervisor), f"{self._supervisor.running:,} running"]
        if self._waiting is not None:
            parts.append(f"{self._waiting.number:,}{'' if self._waiting.exact else ' or more'} waiting")
        return ", ".join(parts)


def outcomes(supervisor: Supervisor) -> str:
    """Return the outcomes of all attempts, how long that took, and how many finished in a second."""
    counts, since = supervisor.counts, supervisor.ready_since
    names = (*FIRST, *sorted(counts.keys() - set(FIRST)))
    ended = ", ".join(f"{counts[name]:,} {name}" for name in names if counts[name])
    if not ended or since is None:
        return ended or "no jobs"
    seconds = time.monotonic() - since
    pace = f" ({rate(counts['finished'] / max(seconds, 0.001))})" if counts["finished"] else ""
    return f"{ended} in {span(seconds)}{pace}"
