"""The locks of migrations on PostgreSQL, and indexes that are built beside the traffic."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import Connection

from sqlq.database.migrations import Migrations
from sqlq.database.postgresql import online
from sqlq.schema.qualify import in_catalog


class PostgreSQLMigrations(Migrations):
    # of the transaction, so that a pooler can share the session and a killed process leaves none
    locks = f"SELECT pg_catalog.pg_try_advisory_xact_lock({online.MIGRATIONS})"
    holder = in_catalog(f"""
SELECT concat(a.usename, ' in session ', a.pid, ', which SELECT pg_terminate_backend(', a.pid, ') ends')
  FROM pg_catalog.pg_locks l JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid
 WHERE l.locktype = 'advisory' AND l.granted AND l.classid = 0 AND l.objid = {online.MIGRATIONS}
   AND a.datname = current_database()
   AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())
 LIMIT 1""")
    open_transactions = "pg_stat_activity (by xact_start)"
    build_index = staticmethod(online.build_index)

    def lock_tables(self, conn: Connection, tables: Iterable[str]) -> None:
        conn.exec_driver_sql(f"LOCK TABLE {', '.join(tables)} IN ACCESS EXCLUSIVE MODE")
