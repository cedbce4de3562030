"""The locks of migrations on MariaDB, where each statement that changes a table commits."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import Connection

from sqlq.database.dialect import Dialect, Migrations
from sqlq.database.mariadb import health
from sqlq.database.mariadb.driver import OLDEST, MariaDBDriver
from sqlq.database.mariadb.sql import MariaDBSql

# one for each database, since the server has one for each name
_LOCK = "CONCAT('sqlq migrates ', :schema)"


class MariaDBMigrations(Migrations):
    locks = f"SELECT GET_LOCK({_LOCK}, 0)"
    unlocks = f"SELECT RELEASE_LOCK({_LOCK})"
    holder = f"""
SELECT CONCAT(COALESCE(user, 'a user'), ' in session ', held.id, ', which KILL ', held.id, ' ends')
  FROM (SELECT IS_USED_LOCK({_LOCK}) AS id) AS held
  LEFT JOIN information_schema.processlist AS session ON session.id = held.id
 WHERE held.id IS NOT NULL"""
    relations = "SELECT table_name FROM information_schema.tables WHERE table_schema = :schema"
    finds_schema = "SELECT 1 FROM information_schema.schemata WHERE schema_name = :schema"
    script = ("mariadb", "", "")  # its DDL commits at once; each statement can be repeated
    in_transactions = False
    open_transactions = "information_schema.innodb_trx (by trx_started)"

    def lock_tables(self, conn: Connection, tables: Iterable[str]) -> None:
        conn.exec_driver_sql(f"LOCK TABLES {', '.join(f'{table} WRITE' for table in tables)}")


DIALECT = Dialect(
    name="mariadb",
    title="MariaDB",
    oldest=OLDEST,
    sql=MariaDBSql(),
    driver=MariaDBDriver(),
    migrations=MariaDBMigrations(),
    health=health,
    schemas_are_databases=True,
    locks_on_one_node=True,
)
