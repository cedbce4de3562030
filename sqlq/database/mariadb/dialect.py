from __future__ import annotations

from sqlq.database.dialect import Dialect
from sqlq.database.mariadb import health
from sqlq.database.mariadb.driver import OLDEST, MariaDBDriver
from sqlq.database.mariadb.migrations import MariaDBMigrations
from sqlq.database.mariadb.sql import MariaDBSql

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
