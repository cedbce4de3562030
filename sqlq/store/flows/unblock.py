"""Unblock the steps that wait for ended steps: make them available, or cancel them where they can never run.

An unblock always runs after the commit that ended a step, in a statement of its own. It decides by committed
facts alone: the rows of the preceding steps. It keeps no counter, so no crash can count twice or lose a
count, and it writes no shared row. Where several unblocks reach the same verdict, one locks the step's row;
the others then find the step no longer blocked. The sweeps catch up where a process died between a commit and
its unblock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from sqlalchemy import BigInteger, Connection, Integer, bindparam, select, tuple_

from sqlq.database.database import Database
from sqlq.schema.tables import flows, jobs
from sqlq.store.apart import apart, noted
from sqlq.store.jobs.rows import slices
from sqlq.store.jobs.settle import Rescued

FlowPosition: TypeAlias = tuple[int, int]
"""A flow, and a step of it, by their ids."""
ENDED_AT_ONCE = 500
STEPS_AT_ONCE = 1_000
"""Steps that one statement makes available; it locks their rows until it ends."""
REASON = "a step before it ended otherwise"


@dataclass
class Unblocked:
    """The effect of an unblock: the number of steps made available (`free`), and the ids of those
    `cancelled`."""

    free: int = 0
    cancelled: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return self.free > 0 or bool(self.cancelled)


def after(database: Database, ended: Iterable[int]) -> Unblocked:
    """Unblock the steps that wait for jobs that have ended or are gone. Where that cancels steps, unblock
    those that wait for these."""
    return _after(database, sorted(set(ended)), Unblocked())


def _after(database: Database, waiting: list[int], done: Unblocked) -> Unblocked:
    while waiting:
        batch, waiting = waiting[:ENDED_AT_ONCE], waiting[ENDED_AT_ONCE:]
        before = len(done.cancelled)
        if _judge(database, batch, done, are_steps=False) >= STEPS_AT_ONCE:
            # there may be more, and some wait on
            _judge_steps(database, _waiting_for(database, batch), done)
        waiting += done.cancelled[before:]
    return done


def steps(database: Database, ids: Sequence[int]) -> Unblocked:
    """Unblock those of these steps that wait for nothing any more, and the steps behind each cancelled
    one."""
    done = Unblocked()
    _judge_steps(database, ids, done)
    return _after(database, [*done.cancelled], done)


def after_losses(database: Database, taken: Iterable[Rescued]) -> Unblocked:
    """Unblock the steps that wait for steps which failed with their workers."""
    return after(database, (job.id for job in taken if job.failed and job.flow_id is not None))


def _judge_steps(database: Database, ids: Sequence[int], done: Unblocked) -> None:
    for some in slices(ids, STEPS_AT_ONCE):
        _judge(database, some, done, are_steps=True)


def _judge(database: Database, ids: Sequence[int], done: Unblocked, *, are_steps: bool) -> int:
    """Judge a batch of steps; return their number. A step that the database refuses to change is left to the
    sweeps."""
    dialect = database.dialect
    found = 0

    def judge(some: Sequence[int]) -> None:
        nonlocal found
        verdict = database.run_raw(
            lambda ask: dialect.sql.unblock(ask, some, are_steps=are_steps, most=STEPS_AT_ONCE, reason=REASON)
        )
        found += verdict.found
        done.free += len(verdict.free)
        done.cancelled += verdict.cancelled

    def refused(id: int, error: Exception) -> None:
        if are_steps:
            noted(database.engine, "waits for no other step any more")((id,), error)
        else:  # it is one of the steps after this job
            _judge_steps(database, _waiting_for(database, [id]), done)

    apart(ids, judge, refused, dialect)
    return found


def _waiting_for(database: Database, ended: Sequence[int]) -> list[int]:
    dialect = database.dialect
    return sorted(database.run_raw(lambda ask: dialect.sql.waiting_for(ask, ended), reads=True))


# -- sweeps --------------------------------------------------------------------------------------------------


def sweep_recent(database: Database, within_ms: int) -> Unblocked:
    """Unblock the steps that wait for jobs that ended within this time. It catches up where the process died
    before its unblock."""
    dialect = database.dialect
    found = database.run_raw(lambda ask: dialect.sql.waiting_for_recent(ask, within_ms), reads=True)
    return steps(database, sorted(found))


def sweep_all(database: Database, place: FlowPosition, most: int) -> tuple[Unblocked, FlowPosition | None]:
    """Unblock what is possible among the next `most` steps of all flows after a place. Return the place to
    continue from; None at the end."""
    with database.read() as conn:
        rows = next_steps(conn, place, most)
    done = steps(database, [row.id for row in rows if row.blocked_by == "flow"])
    return done, (rows[-1].flow_id, rows[-1].id) if len(rows) == most else None


def next_steps(conn: Connection, place: FlowPosition, most: int) -> Sequence[Any]:
    """Return the next live steps after a place, in their order."""
    flow, step = place
    return conn.execute(_STEPS_BEYOND, {"flow": flow, "step": step, "most": most}).all()


_steps = jobs.c.flow_id.is_not(None)
_beyond = tuple_(jobs.c.flow_id, jobs.c.id) > tuple_(
    bindparam("flow", type_=BigInteger), bindparam("step", type_=BigInteger)
)
_STEPS_BEYOND = (
    select(jobs.c.flow_id, jobs.c.id, jobs.c.blocked_by)
    .where(_steps, _beyond)
    .order_by(jobs.c.flow_id, jobs.c.id)
    .limit(bindparam("most", type_=Integer))
)


def are_in_use(database: Database) -> bool:
    """Whether there is any flow at all."""
    with database.read() as conn:
        return conn.scalar(select(flows.c.id).limit(1)) is not None
