"""Counts failed jobs by queue and error: exactly up to a bound, and beyond it by a sample of one row in 61.

An index has the errors of each queue and task, so that one probe finds the next. A smaller one has the
sample. The prime 61 shares no factor with a server's increment of ids, or with batches of equal size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from datetime import datetime
from itertools import accumulate, chain
from typing import Any, NamedTuple, TypeAlias

from sqlalchemy import BigInteger, Connection, Integer, Select, String, and_, func, literal, select

from sqlq.config.durations import rounded
from sqlq.database.batch import Batch
from sqlq.database.dialects import dialect_of
from sqlq.database.sql import Sql, distinct
from sqlq.schema.tables import failed_jobs
from sqlq.schema.types import is_sampled, last_of
from sqlq.store.jobs.lookup import BATCH, EVERY, Selection
from sqlq.store.jobs.rows import slices

EXACT = 100_000
"""Up to this number the jobs of a queue, and of an error in a queue and task, are counted one by one."""
ROWS = 300_000
"""The most rows that one look counts one by one; beyond it the largest numbers are estimates, too."""
KEYS = 1_000
"""The most queues, or errors in a queue and task, that one look counts."""
ONE_OF = 61
PRIME = 157
"""A part of the sample are the ids with a small remainder by it. The multiples of 122 would be none of the
odd ids. Multiples of 61 have these remainders evenly, as 61 / 157 is near the golden section."""
TIMES, LEAST_TIMES = 3_000, 24
"""About how many times one look reads, and one error has at least."""
TRACE_CHARACTERS = 1_500
Key: TypeAlias = tuple[str, ...]
"""A queue, or a queue, a task and a fingerprint."""

_of = failed_jobs.c
QUEUE, _PAIR = Batch(queue=String), Batch(queue=String, task=String)
_ERROR = Batch(queue=String, task=String, fingerprint=String)
_TIMES = Batch(**_ERROR.columns, part=BigInteger)
_COLUMNS = [_of[name] for name in _ERROR.columns]
_NUMBER = select(func.count()).select_from(failed_jobs)
_FIRST = select(_of.failed_at).order_by(_of.id).limit(1)


class Newest(NamedTuple):
    """The beginning of the newest error, and the end of its traceback."""

    id: int
    reason: str
    exception: str | None
    message: str | None
    traceback: str | None
    failed_at: datetime


class Group(NamedTuple):
    """The failed jobs of one error in a queue and task. An estimate is rounded. `times` are those of all
    jobs, or of an even part of the sample."""

    number: int
    is_estimate: bool
    newest: Newest
    times: Sequence[datetime]


def groups(conn: Connection, only: Selection) -> tuple[dict[Key, Group], bool]:
    """Return at most `KEYS` errors of the queue, task, error or batch selected, and whether these are all, of
    all jobs. The most frequent are among them. It reads the newest `EXACT` jobs of a batch."""
    times: dict[Key, list[datetime]] = defaultdict(list)
    if only.batch is not None:
        ids: dict[Key, int] = {}
        query = select(*_COLUMNS, _of.id, _of.failed_at).where(only.where(failed_jobs))
        of_batch = conn.execute(query.order_by(_of.id.desc()).limit(EXACT + 1)).all()
        for *key, id, at in of_batch[:EXACT]:
            ids.setdefault(tuple(key), id)
            times[tuple(key)].append(at)
        counts, is_complete = {key: (len(some), False) for key, some in times.items()}, len(of_batch) <= EXACT
        return _with_newest(conn, ids.values(), counts, times), is_complete
    sql, (ids, is_complete) = dialect_of(conn).sql, _keys(conn, only)
    counts = numbers(conn, _ERROR, [*ids], only)
    size = max(LEAST_TIMES, TIMES // max(1, len(ids)))
    few = [(*key, 0) for key, (n, _) in counts.items() if n <= size]
    many = [(*key, 1 + PRIME * ONE_OF * size // n) for key, (n, _) in counts.items() if n > size]
    looks = (
        _each(conn, _times(sql), _TIMES, few),
        _each(conn, _times(sql, is_sample=True), _TIMES, many),
        _values(conn, _ERROR, _FIRST, [row[:-1] for row in many]),
    )
    for *key, at in chain(*looks):
        times[tuple(key)].append(at)
    return _with_newest(conn, ids.values(), counts, times), is_complete


def _keys(conn: Connection, only: Selection) -> tuple[dict[Key, int], bool]:
    """Return the errors selected, each with the id of its newest job."""
    selected, keys = [only], dict[Key, int]()
    if only.error is not None:
        selected = of_error(conn, only.error, queue=only.queue, task=only.task)
    elif only.queue is None and only.task is not None:  # each queue by itself: one range of the index
        selected = [Selection(queue=name, task=only.task) for name in queues(conn, KEYS)]
    for each in selected:
        names = {"queue": each.queue, "task": each.task, "fingerprint": each.error}
        equal = {name: value for name, value in names.items() if value is not None}
        query = distinct(dialect_of(conn).sql, _COLUMNS, KEYS + 1 - len(keys), equal, newest=True)
        keys |= {tuple(key): id for *key, id in conn.execute(query)}
        if len(keys) > KEYS:
            sample = select(*_COLUMNS, func.max(_of.id)).where(is_sampled(_of.id), only.where(failed_jobs))
            rows = conn.execute(sample.group_by(*_COLUMNS).order_by(func.count().desc()).limit(KEYS // 2))
            frequent = {tuple(key): id for *key, id in rows}
            return dict([*(frequent | keys).items()][:KEYS]), False
    return keys, len(selected) < KEYS


def of_error(
    conn: Connection, fingerprint: str, *, queue: str | None = None, task: str | None = None
) -> list[Selection]:
    """Return a selection for each queue and task that has failed jobs of an error, in their order. An index
    finds the jobs of each."""
    equal = {name: value for name, value in (("queue", queue), ("task", task)) if value is not None}
    pairs = conn.execute(distinct(dialect_of(conn).sql, (_of.queue, _of.task), 1_000_000, equal))
    first = select(_of.id).where(_of.fingerprint == fingerprint).limit(1)
    rows = _values(conn, _PAIR, first, sorted(map(tuple, pairs), key=str))
    return [Selection(task=name, queue=of, error=fingerprint) for of, name, id in rows if id is not None]


def queues(conn: Connection, limit: int) -> list[str]:
    """Return the queues with failed jobs, by name."""
    return list(conn.scalars(distinct(dialect_of(conn).sql, [_of.queue], limit)))


def numbers(
    conn: Connection, batch: Batch, keys: Sequence[Key], only: Selection = EVERY
) -> dict[Key, tuple[int, bool]]:
    """Return the number of failed jobs of each queue or error, and whether it is an estimate."""
    if not keys:
        return {}
    columns = [_of[name] for name in batch.columns]
    sample = select(*columns, func.count()).where(is_sampled(_of.id), only.where(failed_jobs))
    estimates = dict.fromkeys(keys, 0)
    estimates |= {tuple(key): number * ONE_OF for *key, number in conn.execute(sample.group_by(*columns))}
    keys = sorted(keys, key=lambda key: estimates[key])
    sums = accumulate(estimates[key] for key in keys)
    # guard: large-numbers-are-estimates
    few = [key for key, of in zip(keys, sums, strict=True) if of <= ROWS and estimates[key] < 1.2 * EXACT]
    counts = {tuple(key): (number, False) for *key, number in _values(conn, batch, _NUMBER, few)}
    return {key: counts.get(key, (rounded(max(estimates[key], 1)), True)) for key in keys}


def _each(conn: Connection, query: Select[Any], batch: Batch, rows: Sequence[Any]) -> Sequence[Any]:
    return conn.execute(query, dialect_of(conn).sql.batch_parameters(batch, rows)).all() if rows else []


def _values(conn: Connection, batch: Batch, query: Select[Any], keys: Sequence[Any]) -> Sequence[Any]:
    """Return each key and the value of a query of its jobs. It is a subquery, which goes by the index on each
    database."""
    rows = dialect_of(conn).sql.batch_table(batch)
    value = query.where(*(_of[name] == rows.c[name] for name in batch.columns)).scalar_subquery()
    return _each(conn, select(*(rows.c[name] for name in batch.columns), value.label("value")), batch, keys)


def _times(sql: Sql, *, is_sample: bool = False) -> Select[Any]:
    rows = sql.batch_table(_TIMES)
    equal = (_of[name] == rows.c[name] for name in _ERROR.columns)
    query = select(*_COLUMNS, _of.failed_at).join_from(rows, failed_jobs, and_(*equal))
    return query.where(is_sampled(_of.id), _of.id % PRIME < rows.c.part) if is_sample else query


def _with_newest(
    conn: Connection,
    ids: Collection[int],
    counts: dict[Key, tuple[int, bool]],
    times: dict[Key, list[datetime]],
) -> dict[Key, Group]:
    texts = {
        "message": func.substr(_of.message, 1, 200),
        "traceback": last_of(_of.traceback, literal(TRACE_CHARACTERS, Integer)),
    }
    query = select(*_COLUMNS, *(texts.get(name, _of[name]) for name in Newest._fields))
    rows = [row for some in slices([*ids], BATCH) for row in conn.execute(query.where(_of.id.in_(some)))]
    groups = {}
    for row in rows:
        key = tuple(row[:3])  # a job may have failed since its error was counted
        groups[key] = Group(*counts.get(key, (1, False)), Newest(*row[3:]), times[key])
    return groups
