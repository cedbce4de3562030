from __future__ import annotations

from sqlq.database.dialect import Dialect
from sqlq.database.postgresql import health
from sqlq.database.postgresql.driver import PostgreSQLDriver
from sqlq.database.postgresql.migrations import PostgreSQLMigrations
from sqlq.database.postgresql.sql import PostgreSQLSql

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
