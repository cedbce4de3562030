"""The indexes of the tables, as migrations make them.

They are names and rules, and no part of the MetaData. For an `Index` with a rule SQLAlchemy imports the
dialect of each database, in every process.
"""

from __future__ import annotations

from typing import NamedTuple

from sqlq.schema.tables import HOLDS_KEY, HOLDS_KEY_TO_THE_END, IN_TIME_ONLY

_IN_LINE = "blocked_by = 'limit'"


class Index(NamedTuple):
    """An index of the rows of a table for which a rule holds, or of all of them."""

    name: str
    table: str
    columns: str
    where: str | None = None
    unique: bool = False


def _of_flows_and_groups(table: str) -> tuple[Index, ...]:
    """The jobs of each flow and group. Ordinary jobs are in neither index."""
    return (
        Index(f"{table}_flow", table, "flow_id, id", "flow_id IS NOT NULL"),
        Index(f"{table}_group", table, "group_key, id", "group_key IS NOT NULL"),
    )


def _of_ended(table: str, ended_at: str) -> tuple[Index, ...]:
    """The indexes of ended jobs.

    By the time of their deletion: most by age, those with a retention of their own by its end. Each job is in
    one of these two, so that a prune reads only the rows that it deletes. Then by the unique keys that they
    hold until they are pruned, and those that others may have waited for, by when they ended.
    """
    in_flow_or_limit = "flow_id IS NOT NULL OR limit_key IS NOT NULL"
    return (
        Index(f"{table}_prune", table, f"{ended_at}, id", "expires_at IS NULL"),
        Index(f"{table}_expire", table, "expires_at, id", "expires_at IS NOT NULL"),
        Index(f"{table}_unique_key", table, "queue, unique_key", HOLDS_KEY_TO_THE_END),
        Index(f"{table}_unblock", table, ended_at, in_flow_or_limit),
        *_of_flows_and_groups(table),
    )


INDEXES = (
    Index("jobs_claim", "jobs", "queue, priority DESC, available_at, id", "reserved_at IS NULL"),
    Index("jobs_unique_key", "jobs", "queue, unique_key", HOLDS_KEY, unique=True),
    Index("jobs_rescue", "jobs", "id", "reserved_at IS NOT NULL"),
    Index("jobs_start_by", "jobs", "start_by, id", IN_TIME_ONLY),
    *_of_flows_and_groups("jobs"),
    # the slots of a limit that are taken: one row for each
    Index("jobs_admitted", "jobs", "limit_key", "limit_key IS NOT NULL AND blocked_by IS NULL"),
    Index("jobs_line", "jobs", "limit_key, priority DESC, due_at, id", _IN_LINE),
    Index("jobs_line_by_id", "jobs", "limit_key, id", _IN_LINE),
    Index("jobs_paused", "jobs", "task, id", "blocked_by = 'pause'"),
    *_of_ended("finished_jobs", "finished_at"),
    *_of_ended("failed_jobs", "failed_at"),
    # the keys of limits that failed jobs hold
    Index("failed_jobs_limit", "failed_jobs", "limit_key, id", "limit_key IS NOT NULL"),
    Index("sqlq_schedules_due", "sqlq_schedules", "next_at, name", "next_at IS NOT NULL"),
    Index("sqlq_edges_parent", "sqlq_edges", "depends_on, job_id"),
    Index("sqlq_limits_used", "sqlq_limits", "used_at"),
    Index("sqlq_wakes_at", "sqlq_wakes", "at, id"),
)
NAMES = frozenset(index.name for index in INDEXES)
