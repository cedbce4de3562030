"""Flows as they are stored: a row that names them, their steps in `jobs`, and an edge for each wait.

Edges are written once. An unblock rewrites those that lead from optional and from skipped steps. The row of
the waiting job shows whether an edge is open: it is blocked as long as it waits. Deleting the row of a job
deletes its edges.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from operator import itemgetter
from typing import Any, NamedTuple

from sqlalchemy import (
    BigInteger,
    Connection,
    Integer,
    Text,
    bindparam,
    case,
    cast,
    func,
    literal,
    null,
    select,
)

from sqlq.config.constants import WAIT_TASK
from sqlq.database.batch import Batch, insert_returning
from sqlq.database.database import Database
from sqlq.database.dialect import Dialect
from sqlq.database.dialects import dialect_of
from sqlq.database.schemas import encryption_of
from sqlq.errors import PayloadKeyError
from sqlq.model.flow import GROWN_FROM, Plan
from sqlq.model.flow_parts import EnqueuedFlow
from sqlq.model.job import ClaimedJob, Job, State
from sqlq.model.outcome import NOT_NEEDED, Cancelled, ErrorText, Failed, Outcome
from sqlq.model.retry import put_off_without_key
from sqlq.payload.encryption import NO_KEYS
from sqlq.schema.tables import blocked_by, edges, failed_jobs, finished_jobs, flows, jobs
from sqlq.schema.types import ago, far, since_ms
from sqlq.store.jobs.rows import COLUMNS, DUE, NEW_OR_BLOCKED, due, fields, in_all_tables, in_line, slices
from sqlq.store.limits.grant import wake, wakes_of
from sqlq.store.signals.waits import add

STEPS_AT_ONCE = 1_000
EDGES_AT_ONCE = 5_000

# -- insert --------------------------------------------------------------------------------------------------


def insert_flow(conn: Connection, plan: Plan) -> EnqueuedFlow:
    """Insert a flow on a caller's connection or one of sqlq's, in the transaction that is open there."""
    flow_id = conn.execute(insert_returning(flows, {"name": plan.name}, flows.c.id)).scalar_one()
    return EnqueuedFlow(flow_id, plan.name, tuple(insert_steps(conn, plan, flow_id)), *plan[3:])


def insert_steps(conn: Connection, plan: Plan, flow_id: int, grown_from: int | None = None) -> list[Job]:
    """Insert the steps of a flow, or more of them in the transaction that ends the job `grown_from`."""
    dialect = dialect_of(conn)
    wake(conn, wakes_of(plan.jobs))
    waiting = {edge.step for edge in plan.edges}
    begins = {n for n, job in enumerate(plan.jobs) if job.task == WAIT_TASK} - waiting
    values = fields((*COLUMNS, *DUE, "limit"))
    done: list[Job] = []
    for part in slices(list(enumerate(plan.jobs)), STEPS_AT_ONCE):
        rows = [(n, *values(job), int(n in waiting) + 2 * (n in begins)) for n, job in part]
        parameters = {**dialect.sql.batch_parameters(_STEPS, rows), "flow_id": flow_id}
        # ids rise in the order of the rows: the statement sorts them before it numbers them
        insert = _insert(dialect, has_waits=bool(begins))
        inserted = sorted(conn.execute(insert, parameters).all(), key=itemgetter(0))
        done += [
            Job(id, job.queue, job.task, State.BLOCKED if n in waiting else State(state), created=True)
            for (n, job), (id, state) in zip(part, inserted, strict=True)
        ]
    if begins:
        add(
            conn,
            [(done[n].id, job.label or "", job.timeout_ms) for n, job in enumerate(plan.jobs) if n in begins],
        )
    ids = {number: job.id for number, job in enumerate(done)}
    if grown_from is not None:
        ids[GROWN_FROM] = grown_from
    for some in slices(plan.edges, EDGES_AT_ONCE):
        rows = [(ids[edge.step], ids[edge.after], edge.when, edge.position) for edge in some]
        conn.execute(_insert_edges(dialect), dialect.sql.batch_parameters(_EDGES, rows))
    return done


_STEPS = Batch(n=Integer, **COLUMNS, **DUE, limit=Text, waits=Integer)
_EDGES = Batch(job_id=BigInteger, depends_on=BigInteger, on_outcome=Text, place=Integer)


@cache
def _insert(dialect: Dialect, *, has_waits: bool = False) -> Any:
    rows = dialect.sql.batch_table(_STEPS)
    reason: Any = literal("flow")
    waits = rows.c.waits == 1  # guard: a-step-that-waits-is-blocked
    if has_waits:
        waits, reason = rows.c.waits > 0, case((rows.c.waits == 2, "event"), else_="flow")
    at = due(DUE, lambda name: rows.c[name])
    delayed_at = case((rows.c.moment.is_not(None) | (rows.c.delay_ms > 0), at))
    waiting = {"available_at": far(), "blocked_by": reason, "due_at": delayed_at}
    free = in_line(rows.c.limit.is_not(None), at)
    columns: dict[str, Any] = {name: rows.c[name] for name in COLUMNS} | {
        "flow_id": bindparam("flow_id", type_=BigInteger),
        "limit_key": rows.c.limit,
        **{name: case((waits, waiting[name]), else_=free[name]) for name in free},
    }
    return insert_returning(jobs, columns, jobs.c.id, NEW_OR_BLOCKED, order_by=rows.c.n)


@cache
def _insert_edges(dialect: Dialect) -> Any:
    rows = dialect.sql.batch_table(_EDGES)
    columns = {name: rows.c[name] for name in _EDGES.columns}
    # a driver's own connection needs rows to fetch
    return insert_returning(edges, columns, edges.c.place, order_by=rows.c.job_id)


# -- results -------------------------------------------------------------------------------------------------


class Before(NamedTuple):
    """A step that another waited for, with its result as JSON. Without a result, `result` is None and `why`
    has the reason. `unopened` has the error of a signed or encrypted result that could not be opened."""

    id: int
    task: str | None
    result: str | None
    why: str | None
    unopened: PayloadKeyError | None = None


def before(conn: Connection, takers: Mapping[int, str]) -> dict[int, list[Before]]:
    """Return the steps before each of these jobs, in the order of their edges, with opened results. `takers`
    has the queue of each job."""
    encryption = encryption_of(conn) or NO_KEYS
    before_jobs: dict[int, list[Before]] = defaultdict(list)
    for id, depends_on, on_outcome, task, queue, outcome, result, reason in conn.execute(
        _BEFORE, {"ids": list(takers)}
    ):
        why = unopened = None
        if result is not None:
            try:
                # guard: results-of-steps-are-opened
                result = encryption.result_for(takers[id], task, queue, result)
            except PayloadKeyError as error:
                result, why, unopened = None, f"of job {depends_on} ({task}): {error}", error
        if outcome is None and on_outcome != "either":  # guard: an-optional-step-has-no-result
            why = f"there is no finished job {depends_on}: it failed, or its row was pruned"
        elif outcome == "cancelled" and reason != NOT_NEEDED:
            why = f"job {depends_on} ({task}) was cancelled"
        elif outcome == "finished" and reason is not None:
            why = f"of job {depends_on} ({task}): {reason}"
        before_jobs[id].append(Before(depends_on, task, result, why, unopened))
    return before_jobs


_BEFORE = (
    select(
        edges.c.job_id,
        edges.c.depends_on,
        edges.c.on_outcome,
        finished_jobs.c.task,
        finished_jobs.c.queue,
        finished_jobs.c.outcome,
        finished_jobs.c.result,
        finished_jobs.c.reason,
    )
    .join_from(edges, finished_jobs, finished_jobs.c.id == edges.c.depends_on, isouter=True)
    .where(edges.c.job_id.in_(bindparam("ids", expanding=True)))
    .order_by(edges.c.job_id, edges.c.place)
)


class Filled(NamedTuple):
    """Jobs whose arguments are complete, and those that cannot run for want of a result, with their
    outcomes."""

    ready: list[ClaimedJob]
    unready: list[tuple[ClaimedJob, Outcome]]


def filled(database: Database, claimed: Sequence[ClaimedJob]) -> Filled:
    """Put the results of the steps before them into the arguments of claimed jobs: one read for all."""
    taking = {job.id: job.queue for job in claimed if takes_results(job)}
    if not taking:
        return Filled(list(claimed), [])
    with database.single_statements() as conn:
        steps_before = before(conn, taking)
    done = Filled([], [])
    for job in claimed:
        if job.id not in taking:
            done.ready.append(job)
            continue
        steps = steps_before.get(job.id, [])
        payload, why = with_results(job.payload, steps)
        lacking = next((step.unopened for step in steps if step.unopened and step.unopened.lacks_key), None)
        if why == NOT_NEEDED:  # guard: an-unneeded-step-is-skipped
            done.unready.append((job, Cancelled(NOT_NEEDED)))
        elif why is None:
            done.ready.append(job._replace(payload=payload))
        elif lacking is not None:  # guard: a-result-without-its-key-is-put-back
            done.unready.append((job, put_off_without_key(job, lacking)))
        else:
            error = ErrorText("sqlq.errors.NoResultError", f"it takes a result that is not there: {why}")
            done.unready.append((job, Failed("bad_payload", error)))  # guard: a-missing-result-fails-its-job
    return done


def takes_results(job: ClaimedJob) -> bool:
    # SQLite accepts bytes as a payload; the attempt reports the error
    # guard: bytes-take-no-results
    return job.flow_id is not None and isinstance(job.payload, str) and '"results": [' in job.payload


def with_results(payload: str, before: Sequence[Before]) -> tuple[str, str | None]:
    """Return a payload with the results in their places, and why one cannot be there, if that is so. It is
    `NOT_NEEDED` where the result is falsy on which the job depends.

    A payload that cannot be read is returned unchanged; the attempt reports the error.
    """
    try:
        read: dict[str, Any] = json.loads(payload)
        targets: list[list[Any]] = read.pop("results")
        args, kwargs = read.get("args", []), read.get("kwargs", {})
        missing = None
        for where, positions in targets:
            steps = [
                before[position] for position in (positions if isinstance(positions, list) else [positions])
            ]
            missing = missing or next((step.why for step in steps if step.why is not None), None)
            values = [None if step.result is None else json.loads(step.result) for step in steps]
            value = values if isinstance(positions, list) else values[0]
            if where is not None:
                (kwargs if isinstance(where, str) else args)[where] = value
            elif missing is None and not value:
                return payload, NOT_NEEDED
        return json.dumps(read, ensure_ascii=False), missing
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return payload, None


# -- looking -------------------------------------------------------------------------------------------------


def rows_of(conn: Connection, flow_id: int) -> tuple[Any, list[Any], list[Any]] | None:
    """Return the row of a flow, its steps' rows ordered by id, and the rows of their edges; None for an
    unknown flow."""
    flow = conn.execute(select(flows).where(flows.c.id == flow_id)).one_or_none()
    if flow is None:
        return None
    steps = sorted(conn.execute(_STEPS_OF, {"flow": flow_id}), key=itemgetter(0))
    return flow, steps, list(conn.execute(_EDGES_OF, {"flow": flow_id}))


def exists(conn: Connection, flow_id: int) -> bool:
    """Whether the flow exists."""
    return conn.scalar(select(flows.c.id).where(flows.c.id == flow_id)) is not None


def newest(conn: Connection, limit: int) -> tuple[list[Any], dict[int, Counter[str]]]:
    """Return the rows of the newest flows, and the number of steps of each by state."""
    rows = list(conn.execute(select(flows).order_by(flows.c.id.desc()).limit(limit)))
    counts: dict[int, Counter[str]] = {row.id: Counter() for row in rows}
    for flow_id, state, number in conn.execute(_COUNTS, {"flows": list(counts)}) if rows else ():
        counts[flow_id][state] += number
    return rows, counts


FAILED_LIMIT = 1_000


def stuck(conn: Connection, longer_than_ms: int, limit: int) -> Sequence[Any]:
    """Return at most `limit` steps that failed longer ago than that and block others of their flow, the
    longest first. A row has the milliseconds since then (`ms`), and the number of blocked steps (`waiting`).
    Looks at no more than a thousand failed steps."""
    failed_at = failed_jobs.c.failed_at
    failed = (
        select(failed_jobs.c.id, failed_jobs.c.flow_id, failed_jobs.c.task, failed_at)
        .where(failed_jobs.c.flow_id.is_not(None), failed_at < ago(longer_than_ms))
        .order_by(failed_at)
        .limit(FAILED_LIMIT)
        .subquery("failed")
    )
    step, flow_id, task, at = failed.c
    query = (
        select(flow_id, flows.c.name, step, task, at, since_ms(at).label("ms"), func.count().label("waiting"))
        .join_from(failed, flows, flows.c.id == flow_id)
        .join(edges, edges.c.depends_on == step)
        .join(jobs, jobs.c.id == edges.c.job_id)
        .where(edges.c.on_outcome == "success", blocked_by("flow"))
        .group_by(flow_id, flows.c.name, step, task, at)
        .order_by(at)
        .limit(limit)
    )
    return conn.execute(query).all()


_FLOW = bindparam("flow", type_=BigInteger)
_STEPS_OF = in_all_tables(
    lambda table, state: select(
        *(table.c[name] for name in ("id", "task", "queue", "label", "attempts")),
        state.label("state"),
        *(
            table.c.get(name, cast(null(), Text)).label(name)
            for name in ("result", "reason", "exception", "message")
        ),
    ).where(table.c.flow_id == _FLOW)
)
_step_ids = in_all_tables(lambda table, _: select(table.c.id).where(table.c.flow_id == _FLOW))
_EDGES_OF = select(edges).where(edges.c.job_id.in_(_step_ids)).order_by(edges.c.job_id, edges.c.place)
_COUNTS = in_all_tables(
    lambda table, state: (
        select(table.c.flow_id, state, func.count())
        .where(table.c.flow_id.in_(bindparam("flows", expanding=True)))
        .group_by(table.c.flow_id, state)
    )
)
