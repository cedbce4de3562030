"""Wakes: the requests to admit jobs of a limit.

The transaction that blocks a job by its limit writes a wake, and so does one that frees a slot without a
look. Each transaction inserts a row of its own, so that no enqueue waits for another. A wake names a key that
an admission has to look at, and the time. It carries the rule of the limit: only admissions write the row
that many jobs share.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import BigInteger, Connection, Integer, Text, case

from sqlq.database.batch import Batch, insert_returning
from sqlq.database.dialect import Dialect
from sqlq.database.dialects import dialect_of
from sqlq.model.checks import Rule
from sqlq.model.job import NewJob
from sqlq.schema.tables import wakes
from sqlq.schema.types import Moment, after, now

NO_RULE = Rule()
"""The rule of a wake that does not know the limit's rule."""


class Wake(NamedTuple):
    """A key to look at, after a delay or at a time, and its limit's rule."""

    key: str
    rule: Rule = NO_RULE
    delay_ms: int = 0
    moment: datetime | None = None


def wakes_of(new: Iterable[NewJob]) -> set[Wake]:
    """Return the wakes for new jobs: one for each key and time.

    A wake brings the rule at once, even for a job that is due later. Otherwise it would arrive after the
    rules of newer jobs, and undo them.
    """
    wakes_of_keys: set[Wake] = set()
    for job in new:
        if job.limit_key is not None:
            rule, is_later = job.rule or NO_RULE, job.delay_ms or job.available_at is not None
            if is_later:
                wakes_of_keys.add(Wake(job.limit_key, NO_RULE, job.delay_ms, job.available_at))
            if rule != NO_RULE or not is_later:
                wakes_of_keys.add(Wake(job.limit_key, rule))  # guard: limit-rule-is-stored-at-enqueue
    return wakes_of_keys


def wake(conn: Connection, new: Iterable[Wake]) -> None:
    """Insert wakes, on a caller's connection or one of sqlq's."""
    rows = [
        (wake.key, *wake.rule[:3], int(wake.rule.in_order), int(wake.rule.holds), wake.moment, wake.delay_ms)
        for wake in new
    ]
    if rows:
        dialect = dialect_of(conn)
        conn.execute(_insert_wakes(dialect), dialect.sql.batch_parameters(_WAKES, rows))


def wake_lines(conn: Connection, rows: Iterable[Any]) -> None:
    """Schedule a look at the keys of these jobs at the commit of this transaction: it frees their slots."""
    wake(conn, {Wake(row.limit_key) for row in rows if row.limit_key is not None})


_WAKES = Batch(
    limit_key=Text,
    max_running=Integer,
    rate=Integer,
    period_ms=BigInteger,
    in_order=Integer,
    holds=Integer,
    moment=Moment,
    delay_ms=BigInteger,
)


@cache
def _insert_wakes(dialect: Dialect) -> Any:
    rows = dialect.sql.batch_table(_WAKES)
    columns: dict[str, Any] = {
        name: rows.c[name] for name in ("limit_key", "max_running", "rate", "period_ms")
    }
    columns |= {name: case((rows.c[name] == 1, True), else_=False) for name in ("in_order", "holds")}
    due = case((rows.c.delay_ms == 0, now()), else_=after(rows.c.delay_ms))
    columns["at"] = case((rows.c.moment.is_not(None), rows.c.moment), else_=due)
    # a driver's own connection needs rows to fetch
    return insert_returning(wakes, columns, wakes.c.id, order_by=rows.c.limit_key)
