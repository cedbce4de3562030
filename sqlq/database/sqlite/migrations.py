"""The lock of migrations on SQLite: the write lock of the file."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from sqlq.database.migrations import Migrations


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
