"""Queries of `sqlq doctor` for PostgreSQL: settings, sessions and statistics. They read only.

Each function is one query, so that a role without the right to one of them still gets the others.
"""

from __future__ import annotations

import re
from typing import Any

from sqlalchemy import URL, Connection, CursorResult, text
from sqlalchemy.exc import DBAPIError

from sqlq.config.command_hint import granting
from sqlq.database.schemas import schema_of
from sqlq.database.values import Burden, Rows, Session, TableSize
from sqlq.schema.qualify import in_catalog
from sqlq.schema.tables import INDEXES, TABLE_NAMES

OWN_INDEXES = INDEXES


def _query(conn: Connection, question: str, **parameters: Any) -> CursorResult[*tuple[Any, ...]]:
    """Run a query on PostgreSQL."""
    return conn.execute(text(in_catalog(question)), parameters)


def setting(conn: Connection, name: str) -> str:
    """Return the value of a setting for this connection."""
    return str(_query(conn, "SELECT current_setting(:name)", name=name).scalar())


def unfit(conn: Connection) -> str | None:
    if "-YB-" in str(_query(conn, "SELECT version()").scalar()):
        return "YugabyteDB does not notify workers, and its SKIP LOCKED may wait for a locked row"
    several = _query(
        conn,
        "SELECT min(extname::text) FROM pg_catalog.pg_extension "
        "WHERE extname::text = ANY (ARRAY['bdr', 'pgactive', 'spock'])",
    ).scalar()
    if several is None:
        return None
    return f"with the extension {several} several servers take writes, and two of them may claim the same job"


def is_standby(conn: Connection) -> bool:
    return bool(_query(conn, "SELECT pg_is_in_recovery()").scalar())


def node(conn: Connection) -> str:
    """Return the host and port that answer: one of those in the URL."""
    info: Any = conn.connection.driver_connection.info  # type: ignore[union-attr]  # it is connected
    return f"{info.host}:{info.port}"


def weak_commits(conn: Connection) -> list[tuple[str, str]]:
    """Return the roles and databases whose own setting has commits wait for less than the standby's disk, and
    that setting."""
    rows = _query(
        conn,
        "SELECT concat_ws(' in ', 'the role ' || quote_ident(r.rolname), 'the database ' || d.datname), "
        "split_part(c.said, '=', 2) FROM pg_catalog.pg_db_role_setting s "
        "LEFT JOIN pg_catalog.pg_roles r ON r.oid = s.setrole "
        "LEFT JOIN pg_catalog.pg_database d ON d.oid = s.setdatabase "
        "CROSS JOIN LATERAL unnest(s.setconfig) AS c (said) "
        "WHERE split_part(c.said, '=', 1) = 'synchronous_commit' "
        "AND split_part(c.said, '=', 2) = ANY (ARRAY['off', 'local', 'remote_write']) "
        "AND coalesce(d.datname, current_database()) = current_database() ORDER BY 1 LIMIT 5",
    )
    return [(program, level) for program, level in rows]


def connections(conn: Connection) -> tuple[int, int]:
    """Return the number of client connections, and their limit without those reserved for superusers."""
    used, limit = _query(
        conn,
        "SELECT (SELECT count(*) FROM pg_catalog.pg_stat_activity WHERE datid IS NOT NULL), "
        "current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int",
    ).one()
    return used, limit


def old_transactions(conn: Connection, *, older_than_s: float = 0) -> list[Session]:
    """Return the oldest open transactions of this database that hold a snapshot or have written, the oldest
    first."""
    rows = _query(
        conn,
        "SELECT pid, coalesce(application_name, ''), coalesce(state, '?'), EXTRACT(epoch FROM "
        "clock_timestamp() - xact_start), left(query, 1000) "
        "FROM pg_catalog.pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
        "AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL) "
        "AND xact_start < (clock_timestamp() - (:seconds * interval '1 second')) "
        "ORDER BY xact_start LIMIT 5",
        seconds=older_than_s,
    )
    return [Session(row[0], row[1], row[2], float(row[3]), row[4]) for row in rows]


def hidden_sessions(conn: Connection) -> int:
    """Return the number of sessions of this database that the role may not see."""
    rows = _query(
        conn,
        "SELECT count(*) FROM pg_catalog.pg_stat_activity WHERE datname = current_database() AND query = "
        "'<insufficient privilege>'",
    )
    return int(rows.scalar_one())


def dead_rows(conn: Connection) -> Rows | None:
    """Return the estimate for the table jobs; None without statistics of it."""
    row = _query(
        conn,
        "SELECT n_live_tup, n_dead_tup, greatest(last_vacuum, last_autovacuum) "
        "FROM pg_catalog.pg_stat_all_tables WHERE schemaname = :schema AND relname = 'jobs'",
        schema=schema_of(conn),
    ).one_or_none()
    return None if row is None else Rows(*row)


def size(conn: Connection) -> int:
    """Return the bytes of the whole database, with the tables of others."""
    return int(_query(conn, "SELECT pg_database_size(current_database())").scalar_one())


def tables(conn: Connection) -> list[TableSize]:
    rows = _query(
        conn,
        "SELECT relname, n_live_tup, n_dead_tup, pg_table_size(relid), pg_indexes_size(relid), "
        "greatest(last_vacuum, last_autovacuum), "
        "(SELECT json_object_agg(name, size) FROM "
        "(SELECT indexrelname AS name, pg_relation_size(indexrelid) AS size "
        "FROM pg_catalog.pg_stat_all_indexes i WHERE i.relid = t.relid ORDER BY 2 DESC, 1 LIMIT 3) l) "
        "FROM pg_catalog.pg_stat_all_tables t WHERE schemaname = :schema AND relname = ANY(:names) "
        "ORDER BY 4 DESC",
        schema=schema_of(conn),
        names=TABLE_NAMES,
    )
    return [TableSize(*row) for row in rows]


def standbys(conn: Connection) -> list[str | None]:
    """Return the `sync_state` of each standby that streams from this server. It is "sync" or "quorum" where
    commits wait for it, and None where the role may not see that."""
    query = (
        "SELECT sync_state FROM pg_catalog.pg_stat_replication r WHERE NOT EXISTS (SELECT 1 "
        "FROM pg_catalog.pg_replication_slots s WHERE s.active_pid = r.pid AND s.slot_type = 'logical') "
        "LIMIT 20"
    )
    return list(_query(conn, query).scalars())


def indexes(conn: Connection) -> dict[str, bool]:
    rows = _query(
        conn,
        "SELECT c.relname, i.indisvalid FROM pg_catalog.pg_index i "
        "JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid "
        "JOIN pg_catalog.pg_class t ON t.oid = i.indrelid "
        "JOIN pg_catalog.pg_namespace n ON n.oid = t.relnamespace "
        "WHERE n.nspname = :schema AND t.relname = ANY(:names)",
        schema=schema_of(conn),
        names=TABLE_NAMES,
    )
    return {row[0]: bool(row[1]) for row in rows}


def behind(conn: Connection) -> float | None:
    """Return how many seconds this standby is behind. None on a primary.

    It is 0 where it receives, and has replayed all of it. Otherwise it is the age of the last commit that it
    replayed."""
    value = _query(
        conn,
        "SELECT CASE WHEN pg_is_in_recovery() THEN CASE WHEN "
        "EXISTS (SELECT 1 FROM pg_catalog.pg_stat_wal_receiver) "
        "AND pg_last_wal_receive_lsn() = pg_last_wal_replay_lsn() THEN 0 ELSE "
        "EXTRACT(epoch FROM clock_timestamp() - pg_last_xact_replay_timestamp()) END END",
    ).scalar()
    return None if value is None else float(value)


def burden(conn: Connection) -> Burden:
    if is_standby(conn):  # its statistics are not those of the primary's tables
        return Burden(behind_seconds=behind(conn))
    oldest = old_transactions(conn)
    return Burden(dead_rows(conn), oldest[0].seconds if oldest else 0.0)


_DENIED = re.compile(r"permission denied for (?:schema|relation|table|view) ")


def missing_grant(error: BaseException, url: URL | None, kind: str | None) -> str | None:
    """Return the command that grants the role in a URL the rights that PostgreSQL denied it; None for any
    other error.

    It grants all that a role of its kind needs; otherwise each command would report one right after the
    other.
    """
    if not isinstance(error, DBAPIError) or not _DENIED.search(str(error.orig)):
        return None
    if kind == "producer" and "DO UPDATE" in (error.statement or ""):
        kind = "replacing-producer"
    return granting((url and url.username) or "ROLE", url, kind=kind)
