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
from functools import cache, partial
from itertools import groupby
from operator import itemgetter
from typing import Any

from sqlalchemy import (
    BigInteger,
    Connection,
    Integer,
    Select,
    Text,
    and_,
    bindparam,
    case,
    func,
    or_,
    select,
    tuple_,
    union_all,
    update,
)

from sqlq.config.constants import WAIT_TASK
from sqlq.database.batch import Batch, Change, Condition, Expression, Values
from sqlq.database.database import Database
from sqlq.database.dialect import Dialect
from sqlq.database.dialects import dialect_of
from sqlq.model.flow import When
from sqlq.model.outcome import NOT_NEEDED
from sqlq.schema.tables import IS_UNRESERVED, blocked_by, edges, failed_jobs, finished_jobs, flows, jobs
from sqlq.schema.types import after as after_ms
from sqlq.schema.types import is_among, now, unblocks_since
from sqlq.store.apart import apart, noted
from sqlq.store.jobs import settle
from sqlq.store.jobs.rows import ENDED_AT, in_line
from sqlq.store.limits.grant import wake_lines
from sqlq.store.signals.waits import begin

FlowPosition = tuple[int, int]
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


def after(database: Database, ended: Iterable[int]) -> Unblocked:
    """Unblock the steps that wait for jobs that have ended or are gone. Where that cancels steps, unblock
    those that wait for these."""
    return _unblock(database, [], sorted(set(ended)))


def _unblock(database: Database, ids: Sequence[int], ended: Sequence[int] = ()) -> Unblocked:
    """Unblock those of these steps that wait for nothing any more, and those behind ended jobs and cancelled
    steps. A step that the database refuses to change is left to the sweeps."""
    done = Unblocked()

    def judge(some: Sequence[int], *, are_ended: bool = False) -> None:
        judged = STEPS_AT_ONCE
        while judged == STEPS_AT_ONCE:
            rows = database.run(
                lambda conn: _judge_on(conn, some, are_ended=are_ended), in_one_statement=True
            )
            if rest := [row for row in rows if row.blocked_by is not None]:
                cancelled, again = database.run(lambda conn: _follow_up(conn, rest))
                done.cancelled += cancelled
                if again:
                    judge(again)
            done.free += sum(row.blocked_by != "flow" for row in rows)
            judged = len(rows)

    def refused(id: int, error: Exception) -> None:
        noted(database.engine, "waits for no other step any more")((id,), error)

    def judge_behind(id: int, error: Exception) -> None:
        with database.read() as conn:
            waiting = sorted(conn.scalars(_WAITING_FOR, {"id": id}))
        apart(waiting, judge, refused, database.dialect)

    apart(ids, judge, refused, database.dialect)
    ended = [*ended, *done.cancelled]
    while ended:
        before = len(done.cancelled)
        batch, ended = ended[:ENDED_AT_ONCE], ended[ENDED_AT_ONCE:]
        apart(batch, partial(judge, are_ended=True), judge_behind, database.dialect)
        ended += done.cancelled[before:]
    return done


def _judge_on(conn: Connection, ids: Sequence[int], *, are_ended: bool) -> Sequence[Any]:
    """Judge at most `STEPS_AT_ONCE` steps, of these ids or behind these ended jobs. Return those now
    available, or blocked by their limit, and those that can never run, which stay blocked by their flow.

    A step that another transaction has locked is skipped.
    """
    dialect = dialect_of(conn)
    parameters = dialect.sql.batch_parameters(_IDS, [(id,) for id in ids])
    return dialect.sql.change(conn, _judged(dialect, STEPS_AT_ONCE, are_ended=are_ended), parameters)


def _follow_up(conn: Connection, judged: Sequence[Any]) -> tuple[list[int], list[int]]:
    """Have the limits of judged steps looked at. Let steps begin to wait for their signals, and cancel those
    that can never run. Return the ids of these, and those of steps to judge again. The sweeps do this after a
    crash."""
    wake_lines(conn, (row for row in judged if row.blocked_by == "limit"))
    ids = [row.id for row in judged if row.blocked_by == "flow"]
    steps = {row.id: row for row in dialect_of(conn).sql.lock(conn, _BLOCKED, {"ids": ids})} if ids else {}
    if not steps:
        return [], []
    starting, never, skipped, again = list[Any](), list[int](), list[int](), list[int]()
    changes: list[dict[str, Any]] = []
    # The verdict comes again, now that the steps are locked: another process may have changed their edges.
    for (id, verdict), waits in groupby(conn.execute(_WAITS, {"ids": [*steps]}).all(), itemgetter(0, 1)):
        if verdict == FREE and steps[id].task == WAIT_TASK:
            starting.append((id, steps[id].label, steps[id].timeout_ms))
        if verdict != NEVER:  # guard: a-stale-verdict-cancels-nothing
            continue
        edges_now = [(wait, _satisfied(wait)) for wait in waits]
        changed = [{"step": id, "before": wait.depends_on, "now": when} for wait, when in edges_now if when]
        # guard: a-step-behind-skipped-ones-alone-is-skipped
        if all(when == "ended" for _, when in edges_now):
            skipped.append(id)
        elif changed:
            again.append(id)
            changes += changed
        else:
            never.append(id)
    begin(conn, starting)
    if changes:
        conn.execute(_CHANGE, changes)
    for some, reason in ((skipped, NOT_NEEDED), (never, REASON)):
        if some:
            settle.finish(conn, jobs, some, "cancelled", reason)
    return [*skipped, *never], again


def _satisfied(wait: Any) -> When | None:
    """Return how an edge reads that a skipped or a finished optional step satisfies; None for another. The
    verdict knows no optional steps, and takes a skipped one for cancelled, so that other flows pay
    nothing."""
    if wait.reason == NOT_NEEDED and wait.on_outcome in ("success", "either"):
        return "ended"
    return "success" if (wait.on_outcome, wait.outcome) == ("either", "finished") else None


_STEP, _BEFORE = bindparam("step", type_=BigInteger), bindparam("before", type_=BigInteger)
_CHANGE = (
    update(edges)
    .where(edges.c.job_id == _STEP, edges.c.depends_on == _BEFORE)
    .values(on_outcome=bindparam("now", type_=Text))
)


FREE, WAITS, NEVER = 0, 1, 2
"""The verdict on an edge whose job has ended: it holds, it may hold after a retry, it can never hold. A step
has the highest verdict of its edges."""


def _id_in(table: Any, id: Expression, *where: Condition) -> Any:
    """The id where a table has such a row of it: by the primary key, whatever the planner knows of the
    table."""
    return select(table.c.id).where(table.c.id == id, *where).scalar_subquery()


_MAY_HOLD = or_(edges.c.on_outcome != "success", _id_in(failed_jobs, edges.c.depends_on).is_(None))
"""Leaves out the steps that wait for the success of a failed job, since there may be many."""


def _waiting(has_ended: Condition) -> Select[Any]:
    """Choose the blocked steps that wait for ended jobs."""
    is_blocked = _id_in(jobs, edges.c.job_id, blocked_by("flow")).is_not(None)
    return select(edges.c.job_id).where(has_ended, _MAY_HOLD, is_blocked).distinct()


def _verdict(step: Expression) -> Expression:
    """Judge a step by one snapshot, in which each job before it is in exactly one table. The verdict is NULL
    while one of those is live. A job in no table has ended in an unknown way.

    Those before a step are looked up from the youngest on, so that a live one of a wide join is found at
    once.
    """
    parents, before, condition = jobs.alias("parents"), edges.c.depends_on, edges.c.on_outcome
    # guard: unblock-waits-for-live-parents
    live = (
        select(before)
        .where(edges.c.job_id == step, _id_in(parents, before).is_not(None))
        .order_by(before.desc())
        .limit(1)
    )
    outcome = select(finished_jobs.c.outcome).where(finished_jobs.c.id == before).scalar_subquery()
    verdict = case(
        (_id_in(failed_jobs, before).is_not(None), case((condition == "success", WAITS), else_=FREE)),
        (condition == "ended", FREE),
        (and_(condition == "success", outcome == "finished"), FREE),
        else_=NEVER,
    )
    highest = select(func.max(verdict)).where(edges.c.job_id == step).scalar_subquery()
    return case((live.scalar_subquery().is_(None), highest))


@cache
def _judged(dialect: Dialect, limit: int, *, are_ended: bool) -> Change:
    """Choose the steps that wait no longer, of these ids or behind these ended jobs, and make them available.
    Those that can never run, and those that wait for a signal, are locked, and stay as they are."""
    ids = select(dialect.sql.batch_table(_IDS).c.id).scalar_subquery()
    if are_ended:
        behind = is_among(edges.c.depends_on, ids)
        ids = select(edges.c.job_id).where(behind, _MAY_HOLD).scalar_subquery()
    verdict = _verdict(jobs.c.id).label("verdict")
    is_judged = and_(is_among(jobs.c.id, ids), blocked_by("flow"), IS_UNRESERVED, verdict != WAITS)
    query = select(jobs.c.id, verdict).where(is_judged).order_by(jobs.c.id).limit(limit)

    def values(rows: Any) -> Values:
        due_at = case((jobs.c.due_at > now(), jobs.c.due_at), else_=now())
        free = in_line(jobs.c.limit_key.is_not(None), due_at)
        is_free = and_(rows.c.verdict == FREE, jobs.c.task != WAIT_TASK)  # guard: no-worker-runs-a-wait
        return {name: case((is_free, value), else_=jobs.c[name]) for name, value in free.items()}

    return Change(query, values, returning=(jobs.c.id, jobs.c.limit_key, jobs.c.blocked_by))


_IDS = Batch(id=BigInteger)
_ids: Any = bindparam("ids", expanding=True, type_=BigInteger)
_BLOCKED = (
    select(*jobs.c["id", "task", "label", "timeout_ms"])
    .where(jobs.c.id.in_(_ids), blocked_by("flow"), IS_UNRESERVED)
    .order_by(jobs.c.id)
)
_edges, _parents = edges.alias("waits"), finished_jobs.alias("ended")
_WAITS = (
    select(
        _edges.c.job_id,
        _verdict(_edges.c.job_id).label("verdict"),
        *_edges.c["depends_on", "on_outcome"],
        *_parents.c["outcome", "reason"],
    )
    .join_from(_edges, _parents, _parents.c.id == _edges.c.depends_on, isouter=True)
    .where(_edges.c.job_id.in_(_ids))
    .order_by(_edges.c.job_id)
)
"""Read the edges of steps, and the verdict on each step."""
_WAITING_FOR = _waiting(edges.c.depends_on == bindparam("id", type_=BigInteger))


# -- sweeps --------------------------------------------------------------------------------------------------


def sweep_recent(database: Database, within_ms: int) -> Unblocked:
    """Unblock the steps that wait for jobs that ended within this time. It catches up where the process died
    before its unblock."""
    with database.read() as conn:
        waiting = sorted(conn.scalars(_WAITING_FOR_RECENT, {"ms": -within_ms}))
    return _unblock(database, waiting)


_since = after_ms(bindparam("ms", type_=BigInteger))
_RECENT = (
    select(table.c.id).where(unblocks_since(ended_at, table.c.flow_id, table.c.limit_key, _since))
    for table, ended_at in ENDED_AT.items()
)
# MariaDB would run a union once for each edge, but not a subquery of it
_WAITING_FOR_RECENT = _waiting(edges.c.depends_on.in_(select(union_all(*_RECENT).subquery("ended").c.id)))


def sweep_all(
    database: Database, position: FlowPosition, limit: int
) -> tuple[Unblocked, FlowPosition | None]:
    """Unblock what is possible among the next `limit` steps of all flows after a position. Return the one to
    continue from; None at the end."""
    flow, step = position
    with database.read() as conn:
        rows = conn.execute(STEPS_BEYOND, {"flow": flow, "step": step, "most": limit}).all()
    done = _unblock(database, [row.id for row in rows if row.blocked_by == "flow"])
    return done, (rows[-1].flow_id, rows[-1].id) if len(rows) == limit else None


_beyond = tuple_(jobs.c.flow_id, jobs.c.id) > tuple_(
    bindparam("flow", type_=BigInteger), bindparam("step", type_=BigInteger)
)
STEPS_BEYOND = (
    select(jobs.c.flow_id, jobs.c.id, jobs.c.blocked_by)
    .where(jobs.c.flow_id.is_not(None), _beyond)
    .order_by(jobs.c.flow_id, jobs.c.id)
    .limit(bindparam("most", type_=Integer))
)


def are_in_use(database: Database) -> bool:
    """Whether there is any flow at all."""
    with database.read() as conn:
        return conn.scalar(select(flows.c.id).limit(1)) is not None
