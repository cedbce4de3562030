"""Counts of the jobs in each queue: exact, or capped so that the work does not grow with the backlog.

A capped count reads at most `MOST` rows of a queue in one state, and about `ROWS` rows of all queues
together. No count scans the table: the claim index counts waiting jobs, one queue and priority after the
other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Integer,
    MetaData,
    Select,
    String,
    Table,
    bindparam,
    func,
    select,
)

from sqlq.config.durations import FAR
from sqlq.database.batch import Batch
from sqlq.database.dialect import Dialect
from sqlq.database.dialects import dialect_of
from sqlq.database.values import Rows
from sqlq.schema.tables import IS_RESERVED, IS_UNRESERVED, TOKEN_SCHEMA, failed_jobs, jobs
from sqlq.schema.types import now
from sqlq.store.workers.pauses import paused
from sqlq.store.workers.workers import moment

MOST_QUEUES = 1_000
MOST = 10_000
"""The cap of one count; for a person "10,000+" is as good as the number."""
ROWS = 100_000
"""The most rows that the counts of waiting jobs read in each state. With many queues and priorities each
count has a lower cap."""
LEAST = 100


@dataclass(frozen=True, slots=True)
class QueueStats:
    """The counts of one queue, as a row of the view queue_stats. The wait is in seconds, None when nothing
    waits. `capped` names the counts that stopped at the cap; the true number is at least as large."""

    queue: str
    available: int
    scheduled: int
    blocked: int
    running: int
    failed: int
    oldest_wait_seconds: float | None
    paused: bool
    capped: tuple[str, ...] = ()


def exact(conn: Connection) -> list[QueueStats]:
    """Return the counts of each queue, by name; reads every job that waits, runs or has failed."""
    rows = conn.execute(select(_QUEUE_STATS).order_by(_QUEUE_STATS.c.queue)).mappings()
    return [QueueStats(**{**row, "paused": bool(row["paused"])}) for row in rows]


_COUNTED = ("available", "scheduled", "blocked", "running", "failed")

# a Table and not a table(): the schema_translate_map passes over the latter
_QUEUE_STATS = Table(
    "queue_stats",
    MetaData(schema=TOKEN_SCHEMA),
    *(Column(name) for name in ("queue", *_COUNTED, "oldest_wait_seconds", "paused")),
)


class Level(NamedTuple):
    """A queue and one of the priorities of the jobs that wait in it."""

    queue: str
    priority: int


def levels(conn: Connection) -> list[Level]:
    """Return the queues in which jobs wait with their priorities, the highest first."""
    query = dialect_of(conn).distinct(IS_UNRESERVED, jobs.c.queue, jobs.c.priority)
    found = (Level(*row) for row in conn.execute(query))
    return sorted(found, key=lambda level: (level.queue, -level.priority))


def capped(conn: Connection, preferred: Collection[str] = ()) -> tuple[list[QueueStats], int]:
    """Return the counts of each queue, by name, each at most `MOST`; a number that reaches it is named in
    `capped`. It returns at most `MOST_QUEUES` queues, those of `preferred` before others, and the
    number of the others.

    No index finds failed jobs by their queue, so only the newest are counted. Beyond that number every
    queue's count of failed jobs is marked as capped.
    """
    found = levels(conn)
    # in the order of an index, which the planner takes then for a table without statistics, too
    running = select(jobs.c.queue).where(IS_RESERVED).order_by(jobs.c.reserved_by, jobs.c.id)
    failed = select(failed_jobs.c.queue).order_by(failed_jobs.c.id.desc())
    others = {"running": _by_value(conn, running), "failed": _by_value(conn, failed)}
    names = {level.queue for level in found} | {queue for rows in others.values() for queue, _ in rows}
    shown = set(sorted(names, key=lambda name: (name not in preferred, name))[:MOST_QUEUES])
    found = [level for level in found if level.queue in shown]
    each = min(MOST, max(LEAST, ROWS // max(1, len(found))))
    waiting = _count_waiting(conn, found, each) if found else []
    until, stopped = moment(conn), paused(conn)

    numbers: Counter[tuple[str, str]] = Counter()
    full: set[tuple[str, str]] = set()
    oldest: dict[str, datetime] = {}
    for queue, *counted, first in waiting:
        for name, number in zip(_COUNTED, counted, strict=False):
            numbers[queue, name] += number
            full |= {(queue, name)} if number == each else set()
        if counted[0]:
            oldest[queue] = min(first, oldest.get(queue, first))
    for name, rows in others.items():
        numbers.update({(queue, name): number for queue, number in rows})
        if sum(number for _, number in rows) == MOST:  # any queue may have more
            full |= {(queue, name) for queue in shown}
    stats = [
        QueueStats(
            queue,
            **{name: min(numbers[queue, name], MOST) for name in _COUNTED},
            oldest_wait_seconds=(until - oldest[queue]).total_seconds() if queue in oldest else None,
            paused=queue in stopped,
            capped=tuple(name for name in _COUNTED if (queue, name) in full or numbers[queue, name] > MOST),
        )
        for queue in sorted(shown)
    ]
    return stats, len(names) - len(shown)


def _count_waiting(conn: Connection, found: Sequence[Level], each: int) -> Sequence[Any]:
    dialect = dialect_of(conn)
    if not dialect.correlates_in_from:
        levels = [{"queue": queue, "priority": priority} for queue, priority in found]
        return [conn.execute(_waiting(dialect), {"limit": each, **level}).one() for level in levels]
    return conn.execute(_waiting(dialect), {"limit": each, **dialect.batch_parameters(_LEVEL, found)}).all()


_LEVEL = Batch(queue=String, priority=Integer)


@cache
def _waiting(dialect: Dialect) -> Select[Any]:
    """Count at the given levels. If the statement found the levels itself, PostgreSQL would overestimate the
    rows and JIT-compile it, which takes longer than running it."""
    at_level = select(jobs.c.available_at)
    queue: Any = bindparam("queue", type_=String)
    priority: Any = bindparam("priority", type_=Integer)
    if dialect.correlates_in_from:
        level = dialect.batch_table(_LEVEL)
        queue, priority = level.c.queue, level.c.priority
        at_level = at_level.correlate(level)
    at_level = at_level.where(jobs.c.queue == queue, jobs.c.priority == priority, IS_UNRESERVED)
    # the order of the index keeps the planner from scanning the table until it has found enough rows
    at_level = at_level.order_by(jobs.c.available_at)  # guard: counts-go-by-the-index

    def number(when: ColumnElement[bool]) -> Any:
        some = at_level.where(when).limit(bindparam("limit")).subquery()
        return select(func.count()).select_from(some).scalar_subquery()

    return select(
        queue,
        number(jobs.c.available_at <= now()),
        number((jobs.c.available_at > now()) & (jobs.c.available_at < FAR)),
        number(jobs.c.available_at >= FAR),
        at_level.limit(1).scalar_subquery(),
    )


def _by_value(conn: Connection, column: Select[Any]) -> Sequence[Any]:
    """Count the first rows of a query of one column by their values."""
    (value,) = column.limit(MOST).subquery().c
    return conn.execute(select(value, func.count()).group_by(value).order_by(value)).all()


class Vitals(NamedTuple):
    """Failed jobs by reason, among the newest 10,000, and the causes of a slow database. None for what this
    database does not have, or the role may not see."""

    failed: dict[str, int]
    rows: Rows | None
    oldest_transaction_seconds: float | None
    wal_bytes: int | None
    unpurged_transactions: int | None
    behind_seconds: float | None


def vitals(conn: Connection) -> Vitals:
    failed = _by_value(conn, select(failed_jobs.c.reason).order_by(failed_jobs.c.id.desc()))
    return Vitals({str(reason): number for reason, number in failed}, *dialect_of(conn).burden(conn))
