"""Chooses the jobs that may run now among those in the lines of limits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, Integer, Select, Text, and_, bindparam, case, exists, func, or_, select

from sqlq.database.batch import Batch, Condition
from sqlq.database.dialects import dialect_of
from sqlq.schema.tables import blocked_by, failed_jobs, jobs, queues
from sqlq.schema.types import now


class Line(NamedTuple):
    """The line of a limit, and the jobs that an admission may take from it. It takes at most `most`, and no
    more than leaves `running` of the key admitted. With `in_order` only the one with the least id, if it is
    due; with `holds` none that comes after a failed one."""

    key: str
    running: int | None
    most: int
    in_order: bool
    holds: bool


def pick(conn: Connection, lines: Sequence[Line], served: Sequence[str] | None) -> Iterable[Sequence[Any]]:
    """Yield the jobs of these lines that may run, each with its key, and lock them where rows can be locked.
    The caller holds the locks on the keys. A job keeps its place in a paused queue, or in one not `served`
    where that is known."""
    sql = dialect_of(conn).sql
    keys = [line.key for line in lines if line.running is not None]  # guard: rates-count-no-slots
    admitted: dict[str, int] = dict(conn.execute(_ADMITTED, {"keys": keys}).all()) if keys else {}
    rows: dict[bool, list[tuple[str, int, int]]] = {False: [], True: []}
    for line in lines:
        number = line.most
        if line.running is not None:
            number = min(number, line.running - admitted.get(line.key, 0))
        if number > 0:
            rows[line.in_order].append((line.key, number, int(line.holds)))
    parameters = {"serves_all": int(served is None), "served": served or []}
    yield from sql.each(conn, _first, _LINE, rows[False], parameters, locks=True)
    for id, key, may_run in sql.each(conn, _head, _LINE, rows[True], parameters):
        if may_run:
            yield id, key


_LINE = Batch(line_key=Text, number=Integer, holds=Integer)
_in_line = blocked_by("limit")
# a statement of its own, whose snapshot is younger than the locks on the keys; guard: slots-are-counted
_ADMITTED = (
    select(jobs.c.limit_key, func.count())
    .where(jobs.c.limit_key.in_(bindparam("keys", expanding=True)), jobs.c.blocked_by.is_(None))
    .group_by(jobs.c.limit_key)
)
_paused = select(queues.c.queue).where(queues.c.paused_at.is_not(None))
_serves_all: Condition = bindparam("serves_all", type_=Integer) == 1
# guard: only-what-is-served-is-admitted
_is_served = or_(_serves_all, jobs.c.queue.in_(bindparam("served", expanding=True)))
_may_run = and_(jobs.c.due_at <= now(), jobs.c.queue.not_in(_paused), _is_served)


def _first(line: Any) -> Select[Any]:
    """The first jobs of a line that may run."""
    query = select(jobs.c.id, jobs.c.limit_key)
    query = query.where(jobs.c.limit_key == line["line_key"], _in_line, _may_run)
    return query.order_by(jobs.c.priority.desc(), jobs.c.due_at, jobs.c.id).limit(line["number"])


def _head(line: Any) -> Select[Any]:
    """The job of a line with the least id, and whether it may run: with `holds`, if none before it has
    failed."""
    failed = exists().where(failed_jobs.c.limit_key == jobs.c.limit_key, failed_jobs.c.id < jobs.c.id)
    # guard: the-head-of-a-line
    may_run = case((and_(_may_run, or_(line["holds"] == 0, ~failed)), 1), else_=0)
    query = select(jobs.c.id, jobs.c.limit_key, may_run)
    query = query.where(jobs.c.limit_key == line["line_key"], _in_line)
    return query.order_by(jobs.c.id).limit(1)  # guard: serial-key-has-one-head
