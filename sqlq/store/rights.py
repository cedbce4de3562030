"""Which rights on the tables a role of PostgreSQL needs for what it does, and the statements that give them.

One list for each kind of role: the command `sqlq grants` prints it or runs it, and every refusal names that
command.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from sqlalchemy import Connection, text
from sqlalchemy.dialects.postgresql.base import PGDialect

from sqlq.errors import ConfigurationError
from sqlq.schema import version, views
from sqlq.schema.tables import metadata
from sqlq.store.dialect import REPLACED
from sqlq.store.rows import COLUMNS

QUOTER = PGDialect(paramstyle="named").identifier_preparer  # type: ignore[no-untyped-call]
TABLES = (*(table.name for table in metadata.tables.values()), *views.NAMES, version.TABLE)


class Rights(NamedTuple):
    """Rights on tables, or on these columns of theirs alone."""

    rights: str
    tables: str
    columns: str = ""


_EVERY = "SELECT, INSERT, UPDATE, DELETE"
_PLAIN = (
    "queue, task, payload, priority, max_attempts, available_at, start_by, timeout_ms, retention_ms, "
    "backoff, headers, label"
)
"""What a job says of itself alone: no key and no place that others wait for, and nothing that follows it."""
_SAID = sorted({*COLUMNS, "available_at", "start_by", "flow_id", "limit_key", "blocked_by", "due_at"})
"""All that an enqueue writes. Its id, its attempts and who runs it are no producer's to say."""
_ENQUEUES = (
    Rights("SELECT", "sqlq_version"),
    Rights("SELECT", "jobs, finished_jobs, failed_jobs"),
    Rights("INSERT", "jobs", ", ".join(_SAID)),
    Rights("SELECT", "sqlq_flows, sqlq_wakes", "id"),
    Rights("SELECT", "sqlq_edges", "place"),
    Rights("INSERT", "sqlq_flows", "name"),
    Rights("INSERT", "sqlq_edges", "job_id, depends_on, on_outcome, place"),
    Rights("INSERT", "sqlq_wakes", "at, limit_key, max_running, rate, period_ms, in_order, holds"),
)
_LOOKS = (
    Rights("SELECT", "jobs, finished_jobs, failed_jobs, sqlq_flows, sqlq_edges, sqlq_limits"),
    Rights("SELECT", "sqlq_workers, sqlq_queues, sqlq_schedules, sqlq_version, job_states, queue_stats"),
)
RIGHTS: dict[str, tuple[Rights, ...]] = {
    "producer": _ENQUEUES,
    "untrusted-producer": (
        Rights("SELECT", "sqlq_version"),
        Rights("SELECT", "jobs", "id, available_at"),
        Rights("INSERT", "jobs", _PLAIN),
    ),
    "replacing-producer": (*_ENQUEUES, Rights("UPDATE", "jobs", ", ".join(REPLACED))),
    "worker": (
        Rights("SELECT", "sqlq_version"),
        Rights("SELECT, UPDATE", "sqlq_queues"),
        Rights("SELECT, INSERT, UPDATE", "sqlq_schedules"),
        Rights("SELECT, INSERT, DELETE", "sqlq_flows, sqlq_edges"),
        Rights(_EVERY, "jobs, finished_jobs, failed_jobs, sqlq_workers, sqlq_limits, sqlq_wakes"),
    ),
    "operator": (
        *_LOOKS,
        Rights("INSERT, UPDATE, DELETE", "jobs, finished_jobs, sqlq_schedules"),
        Rights("UPDATE, DELETE", "failed_jobs"),
        Rights("DELETE", "sqlq_flows, sqlq_edges"),
        Rights("UPDATE", "sqlq_workers"),
        Rights("INSERT, UPDATE", "sqlq_queues, sqlq_limits"),
        Rights("SELECT, INSERT", "sqlq_wakes"),
    ),
    "reader": _LOOKS,
    "keys": (
        Rights("SELECT", "sqlq_version"),
        Rights("SELECT", "jobs, failed_jobs, finished_jobs, sqlq_schedules"),
        Rights("UPDATE", "jobs, failed_jobs, finished_jobs, sqlq_schedules", "payload"),
        Rights("UPDATE", "finished_jobs", "result"),
    ),
}
"""By the kinds of roles. The wakes of `operator` are for limits, and its keys for `sqlq keys`."""


def statements(kind: str, role: str, schema: str, *, only: bool = False) -> list[str]:
    """Return the GRANTs that a role needs; with `only` after a REVOKE of all that it has on sqlq's tables."""
    place, to = QUOTER.quote(schema), QUOTER.quote(role)
    every = ", ".join(f"{place}.{name}" for name in TABLES)
    said = [f"REVOKE ALL ON {every} FROM {to}"] if only else []
    said.append(f"GRANT USAGE ON SCHEMA {place} TO {to}")
    for each in RIGHTS[kind]:
        columns = f" ({each.columns})" if each.columns else ""
        rights = ", ".join(right + columns for right in each.rights.split(", "))
        tables = ", ".join(f"{place}.{name}" for name in each.tables.split(", "))
        said.append(f"GRANT {rights} ON {tables} TO {to}")
    return said


def apply(conn: Connection, kind: str, role: str, schema: str, *, only: bool = False) -> None:
    """Run them in one transaction. Raises `ConfigurationError` for a role that does not exist, and where the
    role that connects may not give these rights, of which PostgreSQL only warns."""
    if not conn.scalar(text("SELECT 1 FROM pg_catalog.pg_roles WHERE rolname = :role"), {"role": role}):
        raise ConfigurationError(f"there is no role {role!r}: create it first, as with createuser")
    for statement in statements(kind, role, schema, only=only):
        conn.execution_options(no_parameters=True).exec_driver_sql(statement)
    for rights, tables, columns in RIGHTS[kind]:
        for right, table, column in product(*(each.split(", ") for each in (rights, tables, columns))):
            asked = {
                "role": role,
                "table": f"{QUOTER.quote(schema)}.{table}",
                "right": right,
                "column": column,
            }
            # guard: grants-are-looked-at
            if not conn.scalar(_HAS_COLUMN if column else _HAS, asked):
                raise ConfigurationError(
                    f"{right} on {table} was not granted to {role!r}: connect as the role that owns it"
                )


_HAS = text("SELECT pg_catalog.has_table_privilege(CAST(:role AS name), CAST(:table AS text), :right)")
_HAS_COLUMN = text(
    "SELECT pg_catalog.has_column_privilege(CAST(:role AS name), CAST(:table AS text), :column, :right)"
)
