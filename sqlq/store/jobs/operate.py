"""The verbs of operators on jobs: cancel, change, retry, replay and forget; and the deletion of old ones.

An operator's statement locks the rows in place of an owner's fence, in ascending order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Integer,
    Row,
    Table,
    bindparam,
    case,
    exists,
    func,
    literal,
    or_,
    select,
    true,
    union_all,
    update,
)
from sqlalchemy.exc import IntegrityError

from sqlq.config.constants import ERROR_BYTES, WAIT_TASK
from sqlq.database.batch import Change, Condition, Expression, insert_returning, inserted
from sqlq.database.dialects import dialect_of
from sqlq.model import history
from sqlq.model.history import AttemptTimes
from sqlq.model.outcome import ON_REQUEST, ErrorText
from sqlq.model.retry import error_record
from sqlq.payload.encryption import HEAD
from sqlq.schema.tables import (
    CARRIED,
    IS_RESERVED,
    IS_UNRESERVED,
    columns_of,
    edges,
    failed_jobs,
    finished_jobs,
    flows,
    jobs,
    names_of,
)
from sqlq.schema.types import Moment, after, ago, now
from sqlq.store.apart import REFUSED, apart, lately, noted
from sqlq.store.jobs import lookup, settle
from sqlq.store.jobs.insert import LIVE_KEY, holder
from sqlq.store.jobs.lookup import Selection, records
from sqlq.store.jobs.rows import ENDED_AT, TABLES, in_line, slices
from sqlq.store.jobs.settle import keys_of
from sqlq.store.limits.grant import Wake, wake, wake_lines
from sqlq.store.signals.waits import begin
from sqlq.store.workers import notify, workers

BATCH = 500
"""Jobs in one transaction: their rows stay locked until it ends."""


def newest(conn: Connection) -> int:
    """Return the largest id of a job; 0 where there are none."""
    return max(conn.scalar(select(func.max(table.c.id))) or 0 for table, _ in TABLES)


def live(conn: Connection, selection: Selection, *, after_id: int, waiting: bool = False) -> list[int]:
    """Return the next live or `waiting` jobs of a selection by their ids, ascending, at most a batch."""
    query = select(jobs.c.id).where(selection.where(jobs), jobs.c.id > after_id)
    query = query.where(IS_UNRESERVED) if waiting else query
    return list(conn.scalars(query.order_by(jobs.c.id).limit(BATCH)))


def _locked(
    conn: Connection, ids: Sequence[int], wait_ms: int | None, *columns: Any, among: Any = None
) -> Sequence[Any]:
    """Lock jobs, and return them. A row that another transaction has locked is skipped. With `wait_ms` the
    statement waits for it that long, then raises the database's error."""
    dialect = dialect_of(conn)
    if wait_ms is not None:
        dialect.driver.limit_time(conn, "lock", wait_ms)
    query = select(jobs.c.id, *columns).where(jobs.c.id.in_(ids)).order_by(jobs.c.id)
    query = query if among is None else query.where(among)
    return dialect.sql.lock(conn, query, waits=wait_ms is not None)  # guard: cancel-passes-over-locked


# -- cancel --------------------------------------------------------------------------------------------------

RUNNING_REASON = "cancelled on request while it ran; what that attempt still did does not count"


class CancelledBatch(NamedTuple):
    """Jobs of a batch that ended as cancelled, and running ones that now have a request to cancel."""

    gone: Sequence[Any]
    """The rows of those, with their columns for which others may wait."""
    requested: list[int]


def cancel(
    conn: Connection,
    ids: Sequence[int],
    *,
    force: bool = False,
    reason: str | None = None,
    wait_ms: int | None = None,
) -> CancelledBatch:
    """Cancel a batch of live jobs.

    - A job that no worker has reserved ends here and now.
    - A running job gets a request to cancel, or with `force` ends as well.

    An ended job's row has the `reason`; until then a requested one's history has it.

    The row's lock decides the state of a job: if a claim came first, the job gets a request. A row that
    another transaction has locked is not returned; `wait_ms` is as in `_locked`. A forced cancel raises the
    token before any other write: from then on the owner matches no row.
    """
    state = case((IS_UNRESERVED, 0), else_=1).label("running")
    rows = _locked(conn, ids, wait_ms, state, *columns_of("waited"))
    waiting = [row for row in rows if not row.running]
    running = [row.id for row in rows if row.running]
    # guard: cancelled-slots-are-looked-at
    wake_lines(conn, rows if force else waiting)
    settle.cancel(conn, [row.id for row in waiting], reason or ON_REQUEST)
    if force:
        settle.cancel(conn, running, reason or RUNNING_REASON, revokes=True)
        return CancelledBatch(rows, [])
    if running:
        requested = func.coalesce(jobs.c.cancel_requested_at, now())  # guard: cancel-is-requested
        line = literal(history.note(None, "cancel_requested", reason=reason))
        errors = jobs.c.errors if reason is None else settle.errors_and(line)
        changes = {"cancel_requested_at": requested, "errors": errors}
        conn.execute(update(jobs).where(jobs.c.id.in_(running)).values(changes))
        # guard: cancel-notifies-the-worker
        workers.hint_at_cancels(conn, running)
    return CancelledBatch(waiting, running)


def holds_jobs(conn: Connection, name: str) -> bool:
    """Whether a queue has live or failed jobs. (Finished ones do not count: there may be many, and they have
    no index.)"""
    # in two halves, since each has an index
    return any(
        conn.scalar(select(table.c.id).where(table.c.queue == name, where).limit(1)) is not None
        for table, where in ((jobs, IS_UNRESERVED), (jobs, IS_RESERVED), (failed_jobs, true()))
    )


# -- change --------------------------------------------------------------------------------------------------


class JobChange(StrEnum):
    """The effect of a change on a job."""

    CHANGED = "changed"
    PROTECTED = "protected"
    """Its payload is signed or encrypted for its queue, which stays."""
    KEY_HELD = "key held"
    """Another job holds its unique key in the other queue."""
    NOT_WAITING = "not waiting"
    """It runs, has ended or does not exist, or another transaction has locked it."""


def change(
    conn: Connection,
    ids: Sequence[int],
    *,
    at: datetime | None = None,
    delay_ms: int | None = None,
    values: Mapping[str, Any] = {},
    wait_ms: int | None = None,
) -> dict[int, JobChange]:
    """Change a batch of waiting jobs; return the effect on those that it could lock. `values` may have a
    queue and a priority. Without `at` and `delay_ms` their times stay.

    The row's lock decides: a job that a worker claims meanwhile is not touched. A row that another
    transaction has locked is skipped, or with `wait_ms` waited for that long. A job with a limit returns to
    its line when its time changes. So none holds a slot until its new time.
    """
    protected = case((func.substr(jobs.c.payload, 1, len(HEAD)) == HEAD, 1), else_=0).label("protected")
    columns = (jobs.c.limit_key, jobs.c.queue, jobs.c.unique_key, protected)
    # guard: the-claimed-are-not-rescheduled
    rows = _locked(conn, ids, wait_ms, *columns, among=IS_UNRESERVED)
    effects = {row.id: _moved(conn, row, values.get("queue", row.queue)) for row in rows}
    rows = [row for row in rows if effects[row.id] is JobChange.CHANGED]
    if delay_ms is not None or at is not None:
        _postpone(conn, rows, at, delay_ms or 0)
    if values:
        conn.execute(update(jobs).where(jobs.c.id.in_([row.id for row in rows])).values(values))
    return effects


def _moved(conn: Connection, row: Any, queue: str) -> JobChange:
    """Return whether a job may go to a queue; one with a unique key is moved there at once."""
    if row.queue != queue and row.protected:
        return JobChange.PROTECTED
    if row.queue == queue or row.unique_key is None:
        return JobChange.CHANGED
    if holder(conn, queue, row.unique_key) is None:
        # a producer may take the key at this time
        with suppress(IntegrityError), conn.begin_nested():
            conn.execute(update(jobs).where(jobs.c.id == row.id).values(queue=queue))
            return JobChange.CHANGED
    return JobChange.KEY_HELD


def _postpone(conn: Connection, rows: Sequence[Any], at: datetime | None, delay_ms: int) -> None:
    """Make waiting jobs due at a time, else after a delay."""
    due: Any = after(literal(delay_ms, BigInteger)) if delay_ms else now()
    due = due if at is None else literal(at, Moment)
    waits = jobs.c.blocked_by.is_not(None) | jobs.c.limit_key.is_not(None)
    # guard: the-rescheduled-hold-no-slot
    by = case((jobs.c.blocked_by.is_(None), "limit"), else_=jobs.c.blocked_by)
    values = {**in_line(waits, due), "blocked_by": case((waits, by))}
    conn.execute(update(jobs).where(jobs.c.id.in_([row.id for row in rows])).values(values))
    keys = set(keys_of(rows).values())
    # now for the slots that are free, and at the new time; guard: the-rescheduled-are-looked-at
    wake(conn, {Wake(key) for key in keys} | {Wake(key, delay_ms=delay_ms, moment=at) for key in keys})


# -- retry ---------------------------------------------------------------------------------------------------

CARRIED_BATCH = 100
"""Rows of one move, which carries them through this process with payloads of up to 1 MiB."""


def retry_failed(conn: Connection, selection: Selection, *, after_id: int = 0) -> tuple[list[int], list[int]]:
    """Move a batch of failed jobs back to be run again. Return the ids moved, and those that stay because a
    live job holds their unique key.

    At most 100 with ids above `after_id`, in ascending order. The id and the token stay, so that a worker of
    the failed attempt still matches no row. The last error joins those of the earlier attempts.
    """
    dialect = dialect_of(conn)
    failed = select(failed_jobs).where(selection.where(failed_jobs), failed_jobs.c.id > after_id)
    rows = dialect.sql.lock(conn, failed.order_by(failed_jobs.c.id).limit(CARRIED_BATCH))
    if not rows:
        return [], []
    keys = keys_of(rows)
    # guard: a-failed-retry-holds-no-slot
    waits = in_line(bindparam("in_line", type_=Integer) == 1, now())
    statement = dialect.sql.upsert(jobs, LIVE_KEY, waits, returning=(jobs.c.id,))
    # in the order of their keys, as enqueue inserts them, so that the two cannot deadlock on each other
    ordered = sorted(rows, key=lambda row: (row.queue, row.unique_key or ""))
    values = [
        {name: getattr(row, name) for name in _KEPT}
        | {"errors": _history_with_the_last(row), "in_line": int(row.id in keys)}
        for row in ordered
    ]
    moved = {id for (id,) in inserted(conn, statement, values)}
    wake_lines(conn, (row for row in rows if row.id in moved))
    again = [row for row in rows if row.task == WAIT_TASK and row.id in moved]
    begin(conn, [(row.id, row.label, row.timeout_ms) for row in again])  # guard: a-retried-wait-waits
    dialect.sql.delete(conn, failed_jobs.c.id, sorted(moved))
    return sorted(moved), [row.id for row in rows if row.id not in moved]


_KEPT = tuple(name for name in CARRIED if name not in names_of("reset"))


def _history_with_the_last(row: Row[Any]) -> str:
    """Return the history with two more records: the last failure, and the operator's retry. A full history
    keeps its oldest records, as in a retry; records of operators may exceed that size."""
    lines = records(row.errors)
    if len(row.errors or "") <= ERROR_BYTES:
        started_at = history.started_at(row.reserved_at, row.start_ms)
        times = AttemptTimes(row.reserved_at, started_at, row.failed_at, row.reserved_by)
        error = ErrorText(row.exception or "", row.message or "")
        lines.append(json.loads(error_record(row.attempts, row.reason, error, times)))
    if len(row.errors or "") <= 2 * ERROR_BYTES:
        lines.append(json.loads(history.note(None, "put_back")))  # guard: operator-retry-is-recorded
    return json.dumps(lines, ensure_ascii=False)


# -- replay --------------------------------------------------------------------------------------------------

COPIED = names_of("copied")
"""The columns that a replay takes from the original job. It has no unique key, which stood for the original
work; no `start_by`, which is over; and no cursor."""


class Replay(NamedTuple):
    """A replay that was enqueued."""

    id: int
    replay_of: int
    task: str
    queue: str
    label: str | None
    max_attempts: int | None
    limit_key: str | None


def ended(conn: Connection, selection: Selection, *, after_id: int = 0) -> list[int]:
    """Return the next ended jobs of a selection by their ids, ascending, at most a batch. No steps of flows
    are among them, and without ids or a state no cancelled jobs."""
    ids: list[int] = []
    for table in ENDED_AT:
        query = select(table.c.id).where(
            selection.where(table),
            table.c.flow_id.is_(None),  # guard: steps-are-not-replayed
            table.c.id > after_id,
        )
        if table is finished_jobs and not selection.ids and selection.state is None:
            query = query.where(table.c.outcome == "finished")
        ids += conn.scalars(query.order_by(table.c.id).limit(lookup.BATCH))
    return sorted(ids)[: lookup.BATCH]


def replayed(conn: Connection) -> set[int]:
    """Return the jobs of which a copy is kept that was not cancelled."""
    queries = (select(table.c.replay_of).where(table.c.replay_of.is_not(None)) for table, _ in TABLES)
    live, finished, failed = queries
    finished = finished.where(finished_jobs.c.outcome == "finished")
    return {*conn.scalars(union_all(live, finished, failed))}


def replay(conn: Connection, ids: Sequence[int]) -> list[Replay]:
    """Enqueue copies of ended jobs; return them in the order of their ids. A replay under a limit waits in
    its line, as any new job."""
    # several statements, since the time for an answer is bounded
    replays = [copy for part in slices(sorted(ids), lookup.BATCH) for copy in _copy(conn, part)]
    wake_lines(conn, replays)  # guard: a-limited-replay-is-looked-at
    if replays:
        notify.wake_others(conn)
    return replays


def _copy(conn: Connection, ids: Sequence[int]) -> list[Replay]:
    """Insert copies of jobs, in the order of their ids."""
    queries = (
        select(*(table.c[name] for name in ("id", *COPIED))).where(table.c.id.in_(ids)) for table in ENDED_AT
    )
    ended = union_all(*queries).subquery("ended")
    columns: dict[str, Expression] = {name: ended.c[name] for name in COPIED}
    columns |= {"replay_of": ended.c.id, **in_line(ended.c.limit_key.is_not(None), now())}
    returning = (jobs.c[name] for name in Replay._fields)
    copy = insert_returning(jobs, columns, *returning, order_by=ended.c.id)
    return sorted(Replay(*row) for row in conn.execute(copy))


# -- forget and prune ----------------------------------------------------------------------------------------

OLD = "is old enough to be deleted"


def forget(conn: Connection, selection: Selection, source: Table = failed_jobs) -> Sequence[Any]:
    """Delete a batch of failed or finished jobs for good and return their rows, at most 1,000. A finished
    step stays while another step may take its result."""
    ids = select(source.c.id).where(selection.where(source)).order_by(source.c.id)
    if source is finished_jobs:
        ids = ids.where(_is_free(source))  # guard: needed-results-are-not-deleted
    returning = (source.c.id, *(source.c[name] for name in names_of("waited")))
    rows = dialect_of(conn).sql.change(conn, Change(ids.limit(lookup.BATCH), returning=returning))
    wake_lines(conn, rows)  # guard: delete-wakes-the-serial-key
    _clear_up_after(conn, rows)
    return rows


def _clear_up_after(conn: Connection, gone: Iterable[Any]) -> None:
    """Delete the edges of steps that are gone, and flows without a step left. A step that waits for a deleted
    one keeps its edge, and the edge leads to no row."""
    flow_of = {row.id: row.flow_id for row in gone if row.flow_id is not None}
    if not flow_of:
        return
    dialect = dialect_of(conn)
    dialect.sql.delete(conn, edges.c.job_id, sorted(flow_of))
    empty = (~exists().where(source.c.flow_id == flows.c.id) for source, _ in TABLES)
    dialect.sql.delete(conn, flows.c.id, sorted(set(flow_of.values())), *empty)


def prune(conn: Connection, *, older_than_ms: int, limit: int, failed: bool = False) -> int:
    """Delete finished and cancelled jobs, or those that `failed`, that ended longer ago than that, the oldest
    first. Return the number, with those that the database refuses to delete. Jobs with a retention of their
    own stay."""
    source = failed_jobs if failed else finished_jobs
    ended_at = ENDED_AT[source]
    # guard: own-retention-is-kept
    old = (ended_at < ago(older_than_ms), source.c.expires_at.is_(None))
    return _delete(conn, source, limit, *old, order_by=ended_at)


def prune_expired(conn: Connection, *, limit: int, later_ms: int = 0) -> int:
    """Delete ended jobs, failed ones too, whose own retention is over, and has been for that time; return the
    number."""
    pruned = 0
    for source in ENDED_AT:
        ends = source.c.expires_at
        pruned += _delete(conn, source, limit - pruned, ends < ago(later_ms), order_by=ends)
    return pruned


def _delete(conn: Connection, source: Table, limit: int, *where: Condition, order_by: Column[Any]) -> int:
    """Delete at most `limit` of the chosen rows, and return the number. A locked one is left to the next run,
    and one that the database refuses to delete to a later one."""
    dialect = dialect_of(conn)
    query = select(source.c.id, source.c.flow_id).where(
        *where,
        source.c.id.not_in(REFUSED),
        _is_free(source),  # guard: what-is-asked-for-is-kept
    )
    rows = dialect.sql.lock(conn, query.order_by(order_by).limit(limit), lately(conn, OLD))

    def delete(some: Sequence[Any]) -> None:
        dialect.sql.delete(conn, source.c.id, sorted(row.id for row in some))
        _clear_up_after(conn, some)

    apart(rows, delete, noted(conn, OLD), dialect, within=conn)
    return len(rows)


def _is_free(source: Table) -> Condition:
    """Whether no other step waits for an ended job, or may still take its result. A step may do so while it
    is live, or once it is retried after a failure."""
    waits = select(edges.c.job_id).where(edges.c.depends_on == source.c.id)
    live = waits.where(exists().where(jobs.c.id == edges.c.job_id))
    failed = failed_jobs.alias("failed_step")
    retried = waits.where(exists().where(failed.c.id == edges.c.job_id))
    return or_(source.c.flow_id.is_(None), ~(live.exists() | retried.exists()))
