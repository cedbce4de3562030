"""The errors of failed jobs, to be grouped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import Connection, Integer, func, literal, select

from sqlq.schema.tables import failed_jobs
from sqlq.schema.types import last_of
from sqlq.store.jobs.lookup import BATCH, Selection, position_of
from sqlq.store.jobs.rows import slices


class FailedRow(NamedTuple):
    """The beginning of a failed job's error."""

    id: int
    task: str
    reason: str
    exception: str | None
    message: str | None
    failed_at: datetime


def more_than(conn: Connection, number: int) -> bool:
    """Whether more jobs than that have failed."""
    return position_of(conn, failed_jobs, number) is not None


def errors(conn: Connection, chosen: Selection, *, within: int | None = None) -> list[FailedRow]:
    """Return the errors of failed jobs of a task or queue, the newest first; with `within` among that
    number."""
    # a subquery of more columns would be copied with its tracebacks on MariaDB
    columns = (failed_jobs.c[name] for name in (*FailedRow._fields, "queue", "batch_key"))
    newest = select(*columns).order_by(failed_jobs.c.id.desc())
    source = newest.limit(within).subquery()
    table = source.c
    message = func.substr(table.message, 1, FIRST_LINE_CHARACTERS)
    query = select(table.id, table.task, table.reason, table.exception, message, table.failed_at)
    found = conn.execute(query.where(chosen.where(source)).order_by(table.id.desc()))
    return [FailedRow(*row) for row in found]


def traces(conn: Connection, ids: Sequence[int]) -> Iterator[tuple[int, str | None]]:
    """Yield the ends of the tracebacks of failed jobs, with their ids. Each is unpacked once for it."""
    end = last_of(failed_jobs.c.traceback, literal(TRACE_CHARACTERS, Integer))
    for some in slices(ids, BATCH):
        rows = conn.execute(select(failed_jobs.c.id, end).where(failed_jobs.c.id.in_(some)))
        yield from ((id, trace) for id, trace in rows)


TRACE_CHARACTERS = 1_500
FIRST_LINE_CHARACTERS = 200
"""Characters of a message that distinguish errors; texts that differ only behind them count as the same
error."""
