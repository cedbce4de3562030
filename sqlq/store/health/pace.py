"""How many jobs end, and how long they wait and run. Samples of bounded size measure it, however many end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import Column, Connection, Table, literal, null, select, union_all

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
    finished = _samples(conn, finished_jobs, finished_jobs.c.finished_at, bounds)
    failed = _samples(conn, failed_jobs, failed_jobs.c.failed_at, bounds)

    def parts(queue: str | None) -> list[Part]:
        spans = zip(bounds, bounds[1:], finished, failed, strict=False)
        return [_part(*span, queue) for span in spans]

    names = sorted({job.queue for jobs in (*finished, *failed) for job in jobs})
    return Pace(parts(None), {name: parts(name) for name in names})


def _samples(
    conn: Connection, table: Table, ended_at: Column[datetime], bounds: Sequence[datetime]
) -> list[list[Ended]]:
    """Return the first jobs that ended in each part, in one statement of one index."""
    columns = (table.c.queue, ended_at, table.c.available_at, table.c.reserved_at, table.c.start_ms)
    looks = []
    for i in range(len(bounds) - 1):
        within = (ended_at >= bounds[i], ended_at < bounds[i + 1])
        look = select(literal(i).label("part"), *columns).where(table.c.expires_at.is_(null()), *within)
        looks.append(select(look.order_by(ended_at).limit(SAMPLE).subquery()))
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


def _part(
    since: datetime, until: datetime, done: Sequence[Ended], lost: Sequence[Ended], queue: str | None
) -> Part:
    """Measure a part by its samples; with `queue` what is of that queue."""
    good, bad = _share(done, since, until), _share(lost, since, until)
    if queue is not None:
        done, lost = ([job for job in jobs if job.queue == queue] for jobs in (done, lost))
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
