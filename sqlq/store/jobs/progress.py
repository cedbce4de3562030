"""Writes the progress and the retention of running jobs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import CTE, DOUBLE_PRECISION, BigInteger, Connection, Text, case, func

from sqlq.database.batch import RIGHT, Batch, Change, Right, rights
from sqlq.database.dialect import Dialect, held
from sqlq.database.dialects import dialect_of
from sqlq.schema.tables import jobs


class Note(NamedTuple):
    """An update of one job: its progress, unless `progress` is None, and its retention where its row has
    none."""

    id: int
    token: int
    progress: float | None
    progress_of: float | None
    progress_note: str | None
    retention_ms: int | None


_NOTES = Batch.of_claims(
    progress=DOUBLE_PRECISION,
    progress_of=DOUBLE_PRECISION,
    progress_note=Text,
    retention_ms=BigInteger,
)


def write(conn: Connection, notes: Sequence[Note], *, waits: bool = False) -> set[Right]:
    """Write notes in one statement, each fenced by itself; return the rights that their owner still had.

    A row that another transaction has locked is left out, or with `waits` waited for.
    """
    dialect = dialect_of(conn)
    parameters = dialect.batch_parameters(_NOTES, sorted(notes))
    return rights(dialect.change(conn, _write(dialect, waits), parameters))


@cache
def _write(dialect: Dialect, waits: bool) -> Change:
    return Change(jobs, held(dialect, _NOTES), _noted, returning=RIGHT, waits=waits)


def _noted(mine: CTE) -> dict[str, Any]:
    silent = mine.c.progress.is_(None)
    return {
        "progress": func.coalesce(mine.c.progress, jobs.c.progress),
        "progress_of": case((silent, jobs.c.progress_of), else_=mine.c.progress_of),
        "progress_note": case((silent, jobs.c.progress_note), else_=mine.c.progress_note),
        "retention_ms": func.coalesce(jobs.c.retention_ms, mine.c.retention_ms),
    }
