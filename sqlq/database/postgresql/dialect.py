"""The locks of migrations on PostgreSQL, and indexes that are built beside the traffic."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import Connection

from sqlq.database.dialect import Dialect, Migrations
from sqlq.database.postgresql import health, online
from sqlq.database.postgresql.driver import PostgreSQLDriver
from sqlq.database.postgresql.sql import PostgreSQLSql
from sqlq.schema.qualify import in_catalog

_OWN_PATH = (
    "SELECT pg_catalog.set_config('search_path', pg_catalog.quote_ident(pg_catalog.current_schema()), true)"
)
"""Names resolve in pg_catalog, or in the one schema of the tables."""


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
    relations = in_catalog("""
SELECT c.relname
  FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname = :schema""")
    finds_schema = in_catalog("SELECT 1 FROM pg_catalog.pg_namespace WHERE nspname = :schema")
    script = ("psql", f"BEGIN;\n\n{_OWN_PATH};\n\n", "COMMIT;\n")
    open_transactions = "pg_stat_activity (by xact_start)"
    build_index = staticmethod(online.build_index)

    def lock_tables(self, conn: Connection, tables: Iterable[str]) -> None:
        conn.exec_driver_sql(f"LOCK TABLE {', '.join(tables)} IN ACCESS EXCLUSIVE MODE")


DIALECT = Dialect(
    name="postgresql",
    title="PostgreSQL",
    oldest=(15,),
    sql=PostgreSQLSql(),
    driver=PostgreSQLDriver(),
    migrations=PostgreSQLMigrations(),
    health=health,
    notifies=True,
    has_kinds_of_roles=True,
)
