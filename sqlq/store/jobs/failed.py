"""Counts failed jobs by queue and error: exactly up to a bound, and beyond it by a sample of one row in 61.

An index has the errors of each queue and task, so that one probe finds the next. A smaller one has the
sample. The prime 61 shares no factor with a server's increment of ids, or with batches of equal size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import datetime
from functools import cache
from typing import Any, NamedTuple, TypeAlias

from sqlalchemy import BigInteger, Connection, Integer, Select, String, bindparam, func, literal, select

from sqlq.config.durations import rounded
from sqlq.database.batch import Batch
from sqlq.database.dialects import dialect_of
from sqlq.database.sql import Sql, distinct
from sqlq.schema.tables import failed_jobs
from sqlq.schema.types import is_sampled, last_of
from sqlq.store.jobs.lookup import BATCH, Selection, of_error
from sqlq.store.jobs.rows import slices

EXACT = 100_000
"""Up to this number the jobs of a queue, and of an error in a queue and task, are counted one by one."""
ROWS = 1_000_000
"""The most rows that one look counts one by one; beyond it the largest numbers are estimates, too. It is the
most rows of the sample, too, that are counted for one number."""
KEYS = 1_000
"""The most queues, or errors in a queue and task, that one look counts."""
ONE_OF = 61
TIMES, LEAST_TIMES = 5_000, 50
"""About how many times one look reads, and one error has at least."""
TRACE_CHARACTERS = 1_500
Key: TypeAlias = tuple[str, ...]
"""A queue, or a queue, a task and a fingerprint."""

_of = failed_jobs.c
QUEUE = Batch(queue=String)
_ERROR = Batch(queue=String, task=String, fingerprint=String)
_TIMES = Batch(**_ERROR.columns, stride=BigInteger)
_COLUMNS = [_of[name] for name in _ERROR.columns]


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
    size = max(LEAST_TIMES, TIMES // max(1, len(ids)))
    strides = dict.fromkeys(ids, 1)
    counts = dict[Key, tuple[int, bool]]()
    for is_sample in (False, True):
        rows, limit = (
            [(*key, stride) for key, stride in strides.items()],
            {"limit": size * (1 + is_sample) + 1},
        )
        for *key, at in sql.each(conn, _times(sql, is_sample), _TIMES, rows, limit):
            times[tuple(key)].append(at)
        if not is_sample:
            counts = {key: (len(some), False) for key, some in times.items()}
            counts |= numbers(conn, _ERROR, [key for key, (number, _) in counts.items() if number > size])
            strides = {
                key: -(-of // (ONE_OF * size)) * ONE_OF for key, (of, _) in counts.items() if of > size
            }
            times |= {key: [] for key in strides}
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


def queues(conn: Connection, limit: int) -> list[str]:
    """Return the queues with failed jobs, by name."""
    return list(conn.scalars(distinct(dialect_of(conn).sql, [_of.queue], limit)))


def numbers(conn: Connection, batch: Batch, keys: Sequence[Key]) -> dict[Key, tuple[int, bool]]:
    """Return the number of failed jobs of each queue or error, and whether it is an estimate."""
    sql = dialect_of(conn).sql

    def counted(some: Sequence[Key], limit: int, *, is_sample: bool = False) -> dict[Key, int]:
        rows = sql.each(conn, _count(sql, batch, is_sample), batch, some, {"limit": limit})
        return {tuple(key): number for number, *key in rows}

    estimates = {key: sample * ONE_OF for key, sample in counted(keys, ROWS, is_sample=True).items()}
    few, left = [], ROWS
    for key in sorted(estimates, key=lambda key: estimates[key]):
        left -= min(estimates[key], EXACT)
        if left >= 0 and estimates[key] < 1.2 * EXACT:
            few.append(key)
    exact = {key: (number, False) for key, number in counted(few, EXACT + 1).items()}
    for key, estimate in estimates.items():
        number, _ = exact.get(key, (EXACT + 1, False))
        if number > EXACT:  # guard: large-numbers-are-estimates
            exact[key] = rounded(max(estimate, EXACT if key in exact else 1)), True
    return exact


def _rows(sql: Sql, row: Any, names: Iterable[str], *columns: Any, is_sample: bool) -> Select[Any]:
    equal = [_of[name] == row[name] for name in names] + ([is_sampled(_of.id)] if is_sample else [])
    rows = select(*columns).where(*equal).correlate_except(failed_jobs).limit(bindparam("limit"))
    # in the order of the index, so that no plan reads the table; MariaDB would sort
    return rows if sql.scans_loosely else rows.order_by(*_COLUMNS)


@cache
def _count(sql: Sql, batch: Batch, is_sample: bool) -> Callable[[Any], Select[Any]]:
    def query(row: Any) -> Select[Any]:
        rows = _rows(sql, row, batch.columns, _of.id, is_sample=is_sample).subquery()
        number = select(func.count()).select_from(rows).scalar_subquery()
        return select(number.label("number"), *(row[name].label(name) for name in batch.columns))

    return query


@cache
def _times(sql: Sql, is_sample: bool) -> Callable[[Any], Select[Any]]:
    def query(row: Any) -> Select[Any]:
        rows = _rows(sql, row, _ERROR.columns, *_COLUMNS, _of.failed_at, is_sample=is_sample)
        return rows.where(_of.id % row["stride"] == 0)

    return query


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
