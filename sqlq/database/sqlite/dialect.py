from __future__ import annotations

from sqlq.database.dialect import Dialect
from sqlq.database.sqlite import health
from sqlq.database.sqlite.driver import SQLiteDriver
from sqlq.database.sqlite.migrations import SQLiteMigrations
from sqlq.database.sqlite.sql import SQLiteSql

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
