"""How many jobs end, and how long they wait and run. Samples of bounded size measure it, however many end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import Connection, Table, literal, null, select, union_all

from sqlq.schema.tables import failed_jobs, finished_jobs
from sqlq.store.workers.workers import moment

SAMPLE = 100
"""How many jobs of each part are read: those that ended first in it."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the time: jobs a second, and percentiles in seconds. None where no job ended."""

    since: datetime
    finished: float
    failed: float
    wait_p50: float | None = None
    wait_p95: float | None = None
    run_p50: float | None = None
    run_p95: float | None = None


@dataclass(frozen=True, slots=True)
class Pace:
    """The parts, from the oldest to the newest, and the same for each queue seen in the samples."""

    parts: Sequence[Part]
    queues: Mapping[str, Sequence[Part]]

    def latest(self, name: str) -> float | None:
        """Return the newest known value of a percentile."""
        values = (getattr(part, name) for part in reversed(self.parts))
        return next((value for value in values if value is not None), None)


class Ended(NamedTuple):
    """A job of the sample."""

    queue: str
    ended_at: datetime
    due_at: datetime | None
    claimed_at: datetime | None
    start_ms: int | None


def pace_of(conn: Connection, length: timedelta, number: int) -> Pace:
    """Return the pace of the last `length`, in so many parts."""
    now = moment(conn)
    bounds = [now - length + length / number * i for i in range(number + 1)]
    finished = _samples(conn, finished_jobs, "finished_at", bounds)
    failed = _samples(conn, failed_jobs, "failed_at", bounds)
    names = sorted({job.queue for jobs in (*finished, *failed) for job in jobs})
    spans = [
        (
            bounds[i],
            _share(finished[i], bounds[i], bounds[i + 1]),
            _share(failed[i], bounds[i], bounds[i + 1]),
            finished[i],
            failed[i],
        )
        for i in range(number)
    ]
    parts = [_part(*span) for span in spans]
    queues = {
        name: [
            _part(
                since, good, bad, [j for j in done if j.queue == name], [j for j in lost if j.queue == name]
            )
            for since, good, bad, done, lost in spans
        ]
        for name in names
    }
    return Pace(parts, queues)


def _samples(conn: Connection, table: Table, ended: str, bounds: Sequence[datetime]) -> list[list[Ended]]:
    """Return the first jobs that ended in each part, in one statement of one index."""
    column = table.c[ended]
    looks = []
    for i in range(len(bounds) - 1):
        columns = (table.c.queue, column, table.c.available_at, table.c.reserved_at, table.c.start_ms)
        look = (
            select(literal(i).label("part"), *columns)
            .where(table.c.expires_at.is_(null()), column >= bounds[i], column < bounds[i + 1])
            .order_by(column)
            .limit(SAMPLE)
        )
        looks.append(select(look.subquery()))
    found: list[list[Ended]] = [[] for _ in looks]
    for part, *row in conn.execute(union_all(*looks)):
        found[part].append(Ended(*row))
    return found


def _share(jobs: Sequence[Ended], since: datetime, until: datetime) -> float:
    """Return how many jobs a second each job of a sample stands for."""
    if len(jobs) < SAMPLE:
        return 1 / (until - since).total_seconds()
    seen = (max(job.ended_at for job in jobs) - since).total_seconds()
    return 1 / max(seen, 0.001)


def _part(since: datetime, good: float, bad: float, done: Sequence[Ended], lost: Sequence[Ended]) -> Part:
    waits, runs = [], []
    for job in done:
        if job.claimed_at is None:
            continue
        started = job.claimed_at + timedelta(milliseconds=job.start_ms or 0)
        runs.append(max(0.0, (job.ended_at - started).total_seconds()))
        if job.due_at is not None:
            waits.append(max(0.0, (started - job.due_at).total_seconds()))
    return Part(since, len(done) * good, len(lost) * bad, *_percentiles(waits), *_percentiles(runs))


def _percentiles(values: Iterable[float]) -> tuple[Any, Any]:
    ordered = sorted(values)
    if not ordered:
        return None, None
    return ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(len(ordered) * 0.95))]
