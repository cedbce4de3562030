"""The progress of `sqlq work --drain`: on a terminal a line that changes, else a line a minute."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Sequence

from sqlalchemy import make_url
from sqlalchemy.exc import SQLAlchemyError

from sqlq.admin.queues import Queues, Waiting
from sqlq.cli.terminal.logs import ERASE, draw
from sqlq.cli.terminal.output import console
from sqlq.config.durations import span
from sqlq.database.database import Database
from sqlq.database.profiles import LOOPS
from sqlq.errors import SqlqError
from sqlq.worker.supervise.supervisor import Supervisor
from sqlq.worker.threads.loop import Loop, Outage

log = logging.getLogger("sqlq.worker")

DRAW_SECONDS = 0.25
COUNT_SECONDS = 3.0
COUNTED = 20_000
"""Waiting jobs are counted up to this number."""
SHARE = 0.05
"""The part of the time that counting may take."""
SUMMARY_SECONDS = 60.0
WINDOW_SECONDS = 15.0
"""The rate on a terminal is that of the last seconds."""
FIRST = ("finished", "retried", "failed")


class Progress(Loop):
    """Watches the supervisor from a thread of its own, and counts the waiting jobs now and then."""

    def __init__(self, supervisor: Supervisor, queues: Sequence[str] | None, *, drawn: bool) -> None:
        super().__init__("sqlq-progress", Outage("showing the progress"))
        self.first_wait = DRAW_SECONDS if drawn else SUMMARY_SECONDS
        self._supervisor = supervisor
        self._queues = queues
        self._drawn = drawn
        self._seen: deque[tuple[float, int]] = deque()
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
        self._count()
        line = self._line()
        if self._drawn:
            draw(f"{ERASE}{_fitted(line)}\r")
        else:
            log.info("%s", line, extra={"event": "progress"})
        return self.first_wait

    def _count(self) -> None:
        place, began = self._supervisor.location, time.monotonic()
        if place is None or began < self._count_at:
            return
        try:
            self._database = self._database or Database.open(make_url(place[0]), place[1], use=LOOPS)
            self._waiting = Queues(self._database)._waiting(self._queues, limit=COUNTED)
        except (SQLAlchemyError, SqlqError) as error:  # the workers report it, if it lasts
            log.debug("what waits could not be counted: %s", error)
            self._waiting = None
        took = time.monotonic() - began
        self._count_at = began + max(COUNT_SECONDS, took / SHARE)

    def _line(self) -> str:
        moment, counts = time.monotonic(), self._supervisor.counts
        done = counts["finished"]
        self._seen.append((moment, done))
        while len(self._seen) > 2 and self._seen[1][0] < moment - WINDOW_SECONDS:
            self._seen.popleft()
        since, before = self._seen[0]
        if not self._drawn or moment == since:
            since, before = self._supervisor.ready_since or moment, 0
        rate = (done - before) / (moment - since) if moment > since else 0.0
        parts = [f"{done:,} done", f"{rate:,.1f}/s", f"{self._supervisor.running:,} running"]
        if self._waiting is not None:
            parts.append(f"{self._waiting.number:,}{'' if self._waiting.exact else ' or more'} waiting")
        parts += [f"{counts[name]:,} {name}" for name in ("retried", "failed") if counts[name]]
        if self._waiting is not None and self._waiting.exact and rate > 0:
            left = (self._waiting.number + self._supervisor.running) / rate
            parts.append(f"about {span(left)} left")
        return ", ".join(parts)


def stopped(counts: Counter[str], seconds: float | None) -> str:
    """Return the outcomes of all attempts, how long that took, and how many finished in a second."""
    names = (*FIRST, *sorted(counts.keys() - set(FIRST)))
    ended = ", ".join(f"{counts[name]:,} {name}" for name in names if counts[name])
    if not ended or seconds is None:
        return ended or "no jobs"
    rate = f" ({counts['finished'] / max(seconds, 0.001):,.1f}/s)" if counts["finished"] else ""
    return f"{ended} in {span(seconds)}{rate}"


def _fitted(text: str) -> str:
    from rich.text import Text

    line = Text(text)
    line.truncate(max(1, console(err=True).width - 1), overflow="ellipsis")
    return line.plain
