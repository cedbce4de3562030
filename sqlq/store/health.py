"""Queries of dashboards and of `sqlq doctor`: counts, the pace of jobs, and signs of trouble; they only read.

A capped count reads at most `COUNT_LIMIT` rows of a queue in one state, and about `ROW_LIMIT` rows of all
queues together. No count scans the table: the claim index counts waiting jobs, one queue and priority after
the other. Samples of bounded size measure the pace, however many jobs end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import (
    Column,
    Connection,
    Integer,
    Select,
    String,
    Table,
    bindparam,
    func,
    literal,
    null,
    select,
    union_all,
)

from sqlq.config.durations import FAR, span
from sqlq.config.json_text import AsJson
from sqlq.database.batch import Batch, Condition
from sqlq.database.database import Database
from sqlq.database.dialects import dialect_of
from sqlq.database.schemas import run_text
from sqlq.model.job import JobDetails
from sqlq.schema.tables import (
    IS_RESERVED,
    IS_UNRESERVED,
    TOKEN_SCHEMA,
    failed_jobs,
    finished_jobs,
    jobs,
)
from sqlq.schema.types import ago, far, now, since_ms
from sqlq.store.jobs import failed
from sqlq.store.workers.workers import moment, paused

# -- counts --------------------------------------------------------------------------------------------------

QUEUE_LIMIT = 1_000
COUNT_LIMIT = 10_000
"""The cap of one count; for a person "10,000+" is as good as the number."""
ROW_LIMIT = 100_000
"""The most rows that the counts of waiting jobs read in each state. With many queues and priorities each
count has a lower cap."""
COUNT_MINIMUM = 100


@dataclass(frozen=True, slots=True)
class QueueStatus(AsJson):
    """The numbers of a queue. `served` is whether an alive worker serves it; `oldest_wait_seconds` is None
    when nothing waits. `capped` names the counts that were not brought to an end: there are at least so
    many. `estimated` names the one that is a rounded estimate."""

    COLUMNS = (
        *("queue", "available", "scheduled", "blocked", "running", "failed"),
        *("oldest wait=oldest_wait", "served=service"),
    )
    queue: str
    available: int
    scheduled: int
    blocked: int
    running: int
    failed: int
    oldest_wait_seconds: float | None
    paused: bool
    served: bool
    capped: tuple[str, ...] = ()
    estimated: tuple[str, ...] = ()

    @property
    def oldest_wait(self) -> str | None:
        return None if self.oldest_wait_seconds is None else span(self.oldest_wait_seconds)

    @property
    def service(self) -> str:
        return "paused" if self.paused else "yes" if self.served else "no worker"


def exact(conn: Connection) -> list[QueueStatus]:
    """Return the counts of each queue, by name; reads every job that waits, runs or has failed."""
    columns = ", ".join(("queue", *_COUNTED, "oldest_wait_seconds", "paused"))
    rows = run_text(conn, f"SELECT {columns} FROM {TOKEN_SCHEMA}.queue_stats ORDER BY queue").mappings()
    return [QueueStatus(**{**row, "paused": bool(row["paused"]), "served": False}) for row in rows]


_COUNTED = ("available", "scheduled", "blocked", "running", "failed")


def capped(conn: Connection, preferred: Collection[str] = ()) -> tuple[list[QueueStatus], int]:
    """Return the counts of each queue, by name, each at most `COUNT_LIMIT`; a number that reaches it is named
    in `capped`. It returns at most `QUEUE_LIMIT` queues, those of `preferred` before others, and the
    number of the others.

    Failed jobs are counted further, and beyond that their number is an estimate.
    """
    rows = run_text(conn, dialect_of(conn).sql.levels).all()
    # in the order of an index, which the planner takes then for a table without statistics, too
    reserved = select(jobs.c.queue).where(IS_RESERVED).order_by(jobs.c.reserved_by, jobs.c.id)
    running = reserved.limit(COUNT_LIMIT).subquery().c.queue
    runs = conn.execute(select(running, func.count()).group_by(running).order_by(running)).all()
    failing = failed.queues(conn, QUEUE_LIMIT + 1)
    names = {level.queue for level in rows} | {queue for queue, _ in runs} | {*failing}
    shown = set(sorted(names, key=lambda name: (name not in preferred, name))[:QUEUE_LIMIT])
    failures = failed.numbers(conn, failed.QUEUE, [(name,) for name in failing if name in shown])
    rows = [level for level in rows if level.queue in shown]
    limit = min(COUNT_LIMIT, max(COUNT_MINIMUM, ROW_LIMIT // max(1, len(rows))))
    waiting = dialect_of(conn).sql.each(conn, _waiting, _LEVEL, rows, {"limit": limit}) if rows else []
    until, pauses = moment(conn), paused(conn)

    numbers = Counter({(queue, "running"): number for queue, number in runs})
    # of running jobs any queue may have more
    full = {(queue, "running") for queue in shown if numbers.total() == COUNT_LIMIT}
    oldest: dict[str, datetime] = {}
    for queue, *counted, first in waiting:
        for name, number in zip(_COUNTED, counted, strict=False):
            numbers[queue, name] += number
            if number == limit:
                full.add((queue, name))
        if counted[0]:
            oldest[queue] = min(first, oldest.get(queue, first))
    full |= {key for key, number in numbers.items() if number > COUNT_LIMIT}
    stats = []
    for queue in sorted(shown):
        have_failed, is_estimate = failures.get((queue,), (0, False))
        status = QueueStatus(
            queue,
            **{name: min(numbers[queue, name], COUNT_LIMIT) for name in _COUNTED[:-1]},
            failed=have_failed,
            oldest_wait_seconds=(until - oldest[queue]).total_seconds() if queue in oldest else None,
            paused=queue in pauses,
            served=False,
            capped=tuple(name for name in _COUNTED if (queue, name) in full),
            estimated=("failed",) if is_estimate else (),
        )
        stats.append(status)
    return stats, len(names) - len(shown)


_LEVEL = Batch(queue=String, priority=Integer)


def _waiting(level: Any) -> Select[Any]:
    """Count at a given level. If the statement found the levels itself, PostgreSQL would overestimate the
    rows and JIT-compile it, which takes longer than running it."""
    is_there = (jobs.c.queue == level["queue"], jobs.c.priority == level["priority"], IS_UNRESERVED)
    # the order of the index keeps the planner from scanning the table until it has found enough rows
    # guard: counts-go-by-the-index
    at_level = (
        select(jobs.c.available_at).where(*is_there).correlate_except(jobs).order_by(jobs.c.available_at)
    )

    def number(when: Condition) -> Any:
        first = at_level.where(when).limit(bindparam("limit")).subquery()
        return select(func.count()).select_from(first).scalar_subquery()

    return select(
        level["queue"],
        number(jobs.c.available_at <= now()),
        number((jobs.c.available_at > now()) & (jobs.c.available_at < far())),
        number(jobs.c.available_at >= far()),
        at_level.limit(1).scalar_subquery(),
    )


# -- the pace of jobs ----------------------------------------------------------------------------------------

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
    """The parts, from the oldest to the newest."""

    parts: Sequence[Part]

    def latest(self, name: str) -> float | None:
        """Return the newest known value of a percentile."""
        values = (getattr(part, name) for part in reversed(self.parts))
        return next((value for value in values if value is not None), None)


def pace_of(conn: Connection, length: timedelta, number: int) -> Pace:
    """Return the pace of the last `length`, in a number of parts, which end at whole multiples of their
    length. The one that has not ended yet is not among them."""
    now, part = moment(conn), length / number
    end = now - (now - FAR) % part
    bounds = [end - part * i for i in range(number, -1, -1)]
    finished = _samples(conn, finished_jobs, finished_jobs.c.finished_at, bounds)
    failed = _samples(conn, failed_jobs, failed_jobs.c.failed_at, bounds)
    return Pace([_part(*part) for part in zip(bounds, bounds[1:], finished, failed, strict=False)])


def _samples(
    conn: Connection, table: Table, ended_at: Column[datetime], bounds: Sequence[datetime]
) -> list[list[Any]]:
    """Return the first jobs that ended in each part, in one statement of one index."""
    times = (ended_at.label("ended_at"), table.c.available_at, table.c.reserved_at, table.c.start_ms)
    looks = []
    for i in range(len(bounds) - 1):
        look = (
            select(literal(i).label("part"), *times)
            .where(table.c.expires_at.is_(null()), ended_at >= bounds[i], ended_at < bounds[i + 1])
            .order_by(ended_at)
            .limit(SAMPLE)
        )
        looks.append(select(look.subquery()))
    samples: list[list[Any]] = [[] for _ in looks]
    for row in conn.execute(union_all(*looks)):
        samples[row.part].append(row)
    return samples


def _rate(jobs: Sequence[Any], since: datetime, until: datetime) -> float:
    """Return how many jobs a second ended. A full sample counts up to its last job."""
    if len(jobs) == SAMPLE:
        until = max(job.ended_at for job in jobs)
    return len(jobs) / max((until - since).total_seconds(), 0.001)


def _part(since: datetime, until: datetime, finished: Sequence[Any], failed: Sequence[Any]) -> Part:
    """Measure a part by its samples."""
    waits, runs = [], []
    for job in finished:
        if job.reserved_at is None:
            continue
        started = job.reserved_at + timedelta(milliseconds=job.start_ms or 0)
        runs.append(max(0.0, (job.ended_at - started).total_seconds()))
        if job.available_at is not None:
            waits.append(max(0.0, (started - job.available_at).total_seconds()))
    rates = _rate(finished, since, until), _rate(failed, since, until)
    return Part(since, *rates, *_percentiles(waits), *_percentiles(runs))


PACE_MS = 300_000
PACE_MINIMUM = 5
"""How many jobs of a queue have to have ended in this time, for a pace."""


def ahead(conn: Connection, job: JobDetails) -> tuple[int, float] | None:
    """Return how many jobs are claimed before a due one, at most `COUNT_LIMIT`, and how many of its queue
    finish a second. None where that is not known: few have finished lately, or newer ones came first."""
    done = finished_jobs.c
    newest = (
        select(done.queue, done.priority, done.available_at, since_ms(done.finished_at).label("ms"))
        .where(done.expires_at.is_(null()), done.finished_at >= ago(PACE_MS))
        .order_by(done.finished_at.desc())
        .limit(SAMPLE_JOBS)
    )
    ended = [row for row in conn.execute(newest) if row.queue == job.queue]
    since = job.available_at
    passed = [row.available_at for row in ended if row.priority <= job.priority and row.available_at]
    # guard: newest-first-has-no-forecast
    if since is None or len(ended) < PACE_MINIMUM or max([since, *passed]) > since:
        return None
    due, at = (jobs.c.queue == job.queue, IS_UNRESERVED, jobs.c.available_at <= now()), jobs.c.available_at
    earlier = (at <= since) & ((at < since) | (jobs.c.id < job.id))
    before = 0
    for line in (jobs.c.priority > job.priority, (jobs.c.priority == job.priority) & earlier):
        ids = select(jobs.c.id).where(*due, line).limit(COUNT_LIMIT).subquery()
        before += conn.execute(select(func.count()).select_from(ids)).scalar_one()
    return min(before, COUNT_LIMIT), len(ended) / max(0.001, max(row.ms for row in ended) / 1000)


def _percentiles(values: Iterable[float]) -> tuple[Any, Any]:
    ordered = sorted(values)
    if not ordered:
        return None, None
    return ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(len(ordered) * 0.95))]


# -- signs of trouble ----------------------------------------------------------------------------------------

STATEMENT_TIMEOUT_MS = 15_000
"""On a server: an examination must not become the load that it looks for."""


def reading(database: Database) -> AbstractContextManager[Connection]:
    """Read in a transaction that limits the time of each query."""
    return database.read(within_ms=STATEMENT_TIMEOUT_MS)


def indexes(conn: Connection) -> tuple[list[str], list[str]]:
    """Return the indexes of our tables that are missing, and those that queries cannot use."""
    health = dialect_of(conn).health
    indexes = health.indexes(conn)
    return sorted(health.OWN_INDEXES - indexes.keys()), sorted(name for name in indexes if not indexes[name])


def stuck(conn: Connection, *, longer_than_ms: int) -> dict[int, float]:
    """Return running jobs whose lease expired longer ago than that, at most 1,000, and the seconds since. A
    rescue should have taken them."""
    # a row that was reserved by hand may have no lease end
    until = func.coalesce(jobs.c.lease_expires_at, jobs.c.reserved_at)  # guard: no-lease-counts-as-expired
    query = select(jobs.c.id, since_ms(until)).where(IS_RESERVED, until < ago(longer_than_ms))
    return {id: float(ms) / 1000 for id, ms in conn.execute(query.order_by(jobs.c.id).limit(SAMPLE_JOBS))}


class Unknown(NamedTuple):
    """A task that workers do not know: the number of its released jobs, the seconds since the first release,
    and a queue of these jobs. `runs` is whether other workers know the task: one of the newest
    finished jobs is of it, and was completed since."""

    task: str
    number: int
    seconds: float
    queue: str
    runs: bool


SAMPLE_JOBS = 1_000


def unknown_tasks(conn: Connection) -> list[Unknown]:
    """Return the tasks whose jobs workers release because they do not know them, those waiting longest first.

    No index has these jobs. While workers keep up, they are among the oldest: the search reads only those.
    """
    oldest = (
        select(jobs.c.task, jobs.c.queue, jobs.c.unknown_since, jobs.c.reserved_at)
        .order_by(jobs.c.id)
        .limit(COUNT_LIMIT)
        .subquery()
    )
    since = func.min(oldest.c.unknown_since)
    query = (
        select(oldest.c.task, func.count(), since, func.min(oldest.c.queue))
        .where(oldest.c.unknown_since.is_not(None), oldest.c.reserved_at.is_(None))
        .group_by(oldest.c.task)
        .order_by(since)
    )
    here, runs = moment(conn), _last_completions(conn)
    return [
        Unknown(task, number, (here - first).total_seconds(), queue, runs.get(task, first) > first)
        for task, number, first, queue in conn.execute(query)
    ]


def _last_completions(conn: Connection) -> dict[str, datetime]:
    """Return when a job of each task was last completed, by the newest finished jobs."""
    newest = select(finished_jobs).order_by(finished_jobs.c.id.desc()).limit(SAMPLE_JOBS).subquery()
    completed = (
        select(newest.c.task, func.max(newest.c.finished_at))
        .where(newest.c.outcome == "finished")
        .group_by(newest.c.task)
    )
    return dict(conn.execute(completed).all())
