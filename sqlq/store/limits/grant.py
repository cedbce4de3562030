"""The starts that a limit's rule allows a key, by the clock of the database, and the jobs that take them.

Wakes are the requests to admit jobs of a limit. The transaction that blocks a job by its limit writes a wake,
and so does one that frees a slot without a look. Each transaction inserts a row of its own, so that no
enqueue waits for another. A wake names a key that an admission has to look at, and the time. It carries the
rule of the limit: only admissions write the row that many jobs share.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from fractions import Fraction
from functools import cache
from math import ceil, floor
from typing import Any, NamedTuple

from sqlalchemy import (
    BigInteger,
    Connection,
    Integer,
    Select,
    Text,
    and_,
    bindparam,
    case,
    exists,
    func,
    or_,
    select,
)

from sqlq.database.batch import Batch, insert_returning
from sqlq.database.dialect import Dialect
from sqlq.database.dialects import dialect_of
from sqlq.model.checks import Rule
from sqlq.model.job import NewJob
from sqlq.schema.tables import blocked_by, failed_jobs, jobs, queues, wakes
from sqlq.schema.types import Moment, after, now
from sqlq.store.apart import REFUSED, lately
from sqlq.store.workers import workers

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
            # guard: limit-rule-is-stored-at-enqueue
            wakes_of_keys.add(Wake(job.limit_key, job.rule or NO_RULE))
            if job.delay_ms or job.available_at is not None:
                wakes_of_keys.add(Wake(job.limit_key, NO_RULE, job.delay_ms, job.available_at))
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
    columns: dict[str, Any] = {name: rows.c[name] for name in ("limit_key", *Rule._fields[:3])}
    columns |= {name: rows.c[name] == 1 for name in Rule._fields[3:]}
    columns["at"] = func.coalesce(rows.c.moment, after(rows.c.delay_ms))
    # a driver's own connection needs rows to fetch
    return insert_returning(wakes, columns, wakes.c.id, order_by=rows.c.limit_key)


AHEAD = timedelta(milliseconds=100)
"""A rate grants starts this far ahead; the claim keeps the time. The key is looked at again half this time
before its next start that is not granted yet."""
MS = timedelta(milliseconds=1)
Start = tuple[int, datetime | None]
"""A job that is admitted, and the time of its start where that is not at once."""


@dataclass
class Grant:
    """The starts that an admission may grant to a key."""

    key: str
    rule: Rule
    now: datetime
    next_free_at: datetime | None
    limit: int
    opens_at: datetime
    """When the key opens; not before now."""
    changed: bool = False
    """Whether its row is to be written, as where its rule has changed."""
    ids: list[int] = field(default_factory=list)
    """The jobs that are granted a start."""

    @property
    def number(self) -> int:
        """The number of starts that the rate allows by the end of the time granted ahead."""
        interval = _interval_ms(self.rule)
        if interval is None:
            return self.limit if self.opens_at == self.now else 0  # guard: a-closed-key-grants-nothing
        ahead_ms = (self.now + AHEAD - self._first) // MS
        return min(self.limit, max(0, ahead_ms // interval + 1))

    @property
    def _first(self) -> datetime:
        # guard: a-closed-key-opens-at-its-rate
        return max(self.next_free_at or self.opens_at, self.opens_at)

    def start(self, position: int) -> datetime:
        """Return the time of the start at this position, counted from 0; never earlier than evenly spread
        starts."""
        ms = ceil(position * (_interval_ms(self.rule) or 0))  # guard: a-start-is-never-early
        return self._first + ms * MS

    def starts(self) -> list[Start]:
        at_once = self.rule.rate is None
        return [(id, None if at_once else self.start(position)) for position, id in enumerate(self.ids)]

    def again(self) -> Iterator[Wake]:
        """Yield the wake for the next look where the starts are used up. If this admission granted no start
        and changed no rule, the one that granted the last start has scheduled it."""
        is_news = bool(self.ids) or self.changed  # guard: one-wake-for-the-next-start
        if self.rule.rate is not None and len(self.ids) == self.number and is_news:
            yield Wake(self.key, moment=self.start(len(self.ids)) - AHEAD / 2)


def next_free(free_at: datetime | None, now: datetime, before: Rule, rule: Rule) -> datetime | None:
    """Return the time of a key's next free start under another rule. It counts the new rule's distance from
    the last start; under the old rule the wait might be a day."""
    before_ms, interval = _interval_ms(before), _interval_ms(rule)
    if free_at is None or interval is None or before == rule:
        return free_at
    # in whole milliseconds, and so never early; no start is granted further ahead than this
    distance = ceil(interval) * MS
    moved = free_at if before_ms is None else free_at + distance - floor(before_ms) * MS
    return min(moved, now + AHEAD + distance)  # guard: the-next-start-is-by-the-new-rate


def _interval_ms(rule: Rule) -> Fraction | None:
    """Return the milliseconds from one start to the next; None without a rate."""
    return None if rule.rate is None else Fraction(rule.period_ms or 0, rule.rate)


# -- the jobs ------------------------------------------------------------------------------------------------


def pick(conn: Connection, grants: Collection[Grant]) -> Iterable[Sequence[Any]]:
    """Yield the jobs in the lines of these keys that may run, each with its key, and lock them where rows can
    be locked. The caller holds the locks on the keys. A job keeps its place in a queue that no worker takes
    jobs from.

    In a line in order only the job with the least id may run, if it is due. Where its rule `holds`, it also
    waits for failed jobs before it.
    """
    sql = dialect_of(conn).sql
    # guard: rates-count-no-slots
    keys = [grant.key for grant in grants if grant.rule.max_running is not None]
    admitted: dict[str, int] = dict(conn.execute(_ADMITTED, {"keys": keys}).all()) if keys else {}
    rows: dict[bool, list[tuple[str, int, int]]] = {False: [], True: []}
    for grant in grants:
        number, rule = grant.number, grant.rule
        if rule.max_running is not None:
            number = min(number, rule.max_running - admitted.get(grant.key, 0))
        if number > 0:
            rows[rule.in_order].append((grant.key, number, int(rule.holds)))
    parameters = {**serving(conn), **lately(conn, MAY_START)}
    yield from sql.each(conn, _first, _LINE, rows[False], parameters, locks=True)
    for id, key, may_run in sql.each(conn, _head, _LINE, rows[True], parameters):
        if may_run:
            yield id, key


_LINE = Batch(line_key=Text, number=Integer, holds=Integer)
IN_LINE = blocked_by("limit")
# a statement of its own, whose snapshot is younger than the locks on the keys; guard: slots-are-counted
_ADMITTED = (
    select(jobs.c.limit_key, func.count())
    .where(jobs.c.limit_key.in_(bindparam("keys", expanding=True)), jobs.c.blocked_by.is_(None))
    .group_by(jobs.c.limit_key)
)
_PAUSED = select(queues.c.queue).where(queues.c.paused_at.is_not(None))
_SERVES_ALL: Any = bindparam("serves_all", type_=Integer)
_is_served = jobs.c.queue.in_(bindparam("served", expanding=True))  # guard: only-what-is-served-is-admitted
IS_SERVED = and_(jobs.c.queue.not_in(_PAUSED), or_(_SERVES_ALL == 1, _is_served))
"""Whether workers take jobs from a queue: it is not paused, and one of them serves it."""
MAY_START = "may start by its limit"
# guard: refused-start-leaves-its-query
_may_run = and_(jobs.c.due_at <= now(), IS_SERVED, jobs.c.id.not_in(REFUSED))


def serving(conn: Connection) -> dict[str, Any]:
    """Return the parameters of `IS_SERVED`."""
    served = workers.served(conn)
    return {"serves_all": int(served is None), "served": served or []}


def _first(line: Any) -> Select[Any]:
    """The first jobs of a line that may run."""
    return (
        select(jobs.c.id, jobs.c.limit_key)
        .where(jobs.c.limit_key == line["line_key"], IN_LINE, _may_run)
        .order_by(jobs.c.priority.desc(), jobs.c.due_at, jobs.c.id)
        .limit(line["number"])
    )


def _head(line: Any) -> Select[Any]:
    """The job of a line with the least id, and whether it may run: with `holds`, if none before it has
    failed."""
    failed = exists().where(failed_jobs.c.limit_key == jobs.c.limit_key, failed_jobs.c.id < jobs.c.id)
    # guard: the-head-of-a-line
    may_run = case((and_(_may_run, or_(line["holds"] == 0, ~failed)), 1), else_=0)
    # guard: serial-key-has-one-head
    return (
        select(jobs.c.id, jobs.c.limit_key, may_run)
        .where(jobs.c.limit_key == line["line_key"], IN_LINE)
        .order_by(jobs.c.id)
        .limit(1)
    )
