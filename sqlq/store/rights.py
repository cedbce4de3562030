"""The rights on the tables that each kind of role needs on PostgreSQL, and the statements that grant them.

One list for each kind of role: the command `sqlq grants` prints it or runs it, and every refusal names that
command.
"""

from __future__ import annotations

from sqlalchemy import Connection, text
from sqlalchemy.dialects.postgresql.base import PGDialect

from sqlq.errors import ConfigurationError
from sqlq.schema import version
from sqlq.schema.qualify import in_catalog
from sqlq.schema.tables import TABLE_NAMES, VIEWS, names_of
from sqlq.store.jobs.insert import REPLACED

QUOTER = PGDialect(paramstyle="named").identifier_preparer  # type: ignore[no-untyped-call]  # SQLAlchemy's own
TABLES = (*TABLE_NAMES, *VIEWS, version.TABLE)

_PLAIN = ", ".join(names_of("plain"))
_ENQUEUED = ", ".join(names_of("option", "written"))
"""A producer sets no id, no attempts and no owner."""
_SIGNALS = (
    "SELECT (name, expires_at), INSERT (name, value, created_at, expires_at, look_at) ON sqlq_signals",
    "UPDATE (value, created_at, expires_at, look_at) ON sqlq_signals",
)
_ENQUEUES = (
    "SELECT ON jobs, finished_jobs, failed_jobs, sqlq_version",
    f"INSERT ({_ENQUEUED}) ON jobs",
    "SELECT (id), INSERT (name) ON sqlq_flows",
    "SELECT (place), INSERT (job_id, depends_on, on_outcome, place) ON sqlq_edges",
    "SELECT (id), INSERT (at, limit_key, max_running, rate, period_ms, in_order, holds) ON sqlq_wakes",
    "SELECT (job_id), INSERT (job_id, name, until) ON sqlq_waits",
    *_SIGNALS,
)
_LOOKS = (
    "SELECT ON jobs, finished_jobs, failed_jobs, sqlq_flows, sqlq_edges, sqlq_limits",
    "SELECT ON sqlq_workers, sqlq_queues, sqlq_schedules, sqlq_audit, sqlq_waits, sqlq_version",
    "SELECT ON job_states, queue_stats",
)
RIGHTS = {
    "producer": _ENQUEUES,
    "untrusted-producer": (
        f"SELECT (id, available_at), INSERT ({_PLAIN}) ON jobs",
        "SELECT ON sqlq_version",
    ),
    "replacing-producer": (*_ENQUEUES, f"UPDATE ({', '.join(REPLACED)}) ON jobs"),
    "worker": (
        "SELECT ON sqlq_version",
        "SELECT, UPDATE ON sqlq_queues",
        "SELECT, INSERT, UPDATE ON sqlq_schedules",
        "SELECT, INSERT, DELETE ON sqlq_flows, sqlq_edges",
        "UPDATE (on_outcome) ON sqlq_edges",
        "SELECT, INSERT, UPDATE, DELETE ON jobs, finished_jobs, failed_jobs",
        "SELECT, INSERT, UPDATE, DELETE ON sqlq_workers, sqlq_limits, sqlq_wakes",
        "SELECT, INSERT, UPDATE, DELETE ON sqlq_waits, sqlq_signals",
    ),
    "operator": (
        *_LOOKS,
        "INSERT, UPDATE, DELETE ON jobs, finished_jobs, sqlq_schedules",
        "UPDATE, DELETE ON failed_jobs",
        "DELETE ON sqlq_flows, sqlq_edges",
        "UPDATE (on_outcome) ON sqlq_edges",
        "UPDATE ON sqlq_workers",
        "INSERT, UPDATE ON sqlq_queues, sqlq_limits",
        "SELECT, INSERT ON sqlq_wakes",
        "INSERT, DELETE ON sqlq_waits",
        *_SIGNALS,
        "INSERT (actor, action, target), UPDATE (number, seen_at, stopped_at, ended_at) ON sqlq_audit",
    ),
    "reader": _LOOKS,
}
"""The rights by kind of role, each by its work."""


def statements(kind: str, role: str, schema: str, *, only: bool = False) -> list[str]:
    """Return the GRANTs that a role needs; with `only` after a REVOKE of all that it has on sqlq's tables."""
    prefix, to = QUOTER.quote(schema), QUOTER.quote(role)
    every = ", ".join(f"{prefix}.{name}" for name in TABLES)
    grants = [f"REVOKE ALL ON {every} FROM {to}"] if only else []
    grants.append(f"GRANT USAGE ON SCHEMA {prefix} TO {to}")
    for each in RIGHTS[kind]:
        rights, tables = each.split(" ON ")
        on = ", ".join(f"{prefix}.{name}" for name in tables.split(", "))
        grants.append(f"GRANT {rights} ON {on} TO {to}")
    return grants


def apply(conn: Connection, kind: str, role: str, schema: str, *, only: bool = False) -> None:
    """Run the GRANTs. Raises `ConfigurationError` unless the role that connects owns the tables: PostgreSQL
    only warns of rights that it may not grant."""
    if conn.scalar(_ANOTHERS, {"schema": schema, "names": [*TABLES]}):  # guard: grants-are-the-owners
        raise ConfigurationError(f"only the owner of the tables in {schema} grants rights: connect as it")
    for statement in statements(kind, role, schema, only=only):
        conn.execution_options(no_parameters=True).exec_driver_sql(statement)


_ANOTHERS = text(
    in_catalog(
        "SELECT true FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
        "WHERE n.nspname = :schema AND c.relname = ANY(:names) "
        "AND NOT pg_has_role(c.relowner, 'USAGE') LIMIT 1"
    )
)
