"""The lock of migrations on SQLite: the write lock of the file."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from sqlq.database.dialect import Dialect, Migrations
from sqlq.database.sqlite import health
from sqlq.database.sqlite.driver import SQLiteDriver
from sqlq.database.sqlite.sql import SQLiteSql


class SQLiteMigrations(Migrations):
    relations = "SELECT lower(name) FROM sqlite_master WHERE :schema IS NULL"
    script = ("sqlite3 -bail", "BEGIN IMMEDIATE;\n\n", "COMMIT;\n")

    def lock(self, conn: Connection, schema: str | None) -> bool:
        driver: Any = conn.connection.driver_connection
        if driver.in_transaction:
            return True  # a host's transaction is locked as the host sees fit
        try:
            conn.exec_driver_sql("BEGIN IMMEDIATE")
        except OperationalError as error:
            if "locked" not in str(error.orig):
                raise
            return False
        return True


DIALECT = Dialect(
    name="sqlite",
    title="SQLite",
    oldest=(3, 35),
    sql=SQLiteSql(),
    driver=SQLiteDriver(),
    migrations=SQLiteMigrations(),
    health=health,
    in_a_file=True,
)
