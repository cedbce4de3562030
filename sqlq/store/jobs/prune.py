"""Deletes ended jobs: those that are too old, and those that an operator names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Column, Connection, Table, exists, or_, select

from sqlq.database.batch import Change, Condition
from sqlq.database.dialects import dialect_of
from sqlq.schema.tables import edges, failed_jobs, finished_jobs, flows, jobs, names_of
from sqlq.schema.types import ago
from sqlq.store.apart import REFUSED, apart, lately, noted
from sqlq.store.jobs import lookup
from sqlq.store.jobs.lookup import Selection
from sqlq.store.jobs.rows import ENDED_AT, TABLES
from sqlq.store.limits.wakes import wake_lines


def forget(conn: Connection, selection: Selection, source: Table = failed_jobs) -> Sequence[Any]:
    """Delete a batch of failed or finished jobs for good and return their rows, at most 1,000. A finished
    step stays while another step may take its result."""
    dialect = dialect_of(conn)
    ids = select(source.c.id).where(selection.where(source)).order_by(source.c.id)
    if source is finished_jobs:
        ids = ids.where(_is_free(source))  # guard: needed-results-are-not-deleted
    returning = (source.c.id, *(source.c[name] for name in names_of("waited")))
    rows = dialect.sql.change(conn, Change(ids.limit(lookup.BATCH), returning=returning))
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


OLD = "is old enough to be deleted"


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
    query = select(source.c.id, source.c.flow_id).where(*where, source.c.id.not_in(REFUSED))
    # guard: what-is-asked-for-is-kept
    query = query.where(_is_free(source))
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
