"""Counts the statements that a worker sends, for the measure of idleness.

An environment variable turns it on.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, Pool, event

from sqlq.database.postgresql.driver import PostgreSQLDriver


def count_into(folder: str) -> None:
    """Append a letter for each statement of this process to a file of its own.

    On SQLite each connection of a pool is traced, so that raw statements count like others. The begin and the
    end of transactions do not count, nor does the connection that only reads data_version, which is in no
    pool.
    """
    file = (Path(folder) / f"statements-{os.getpid()}").open("ab", buffering=0)

    def traced(statement: str) -> None:
        if not statement.lstrip().upper().startswith(("BEGIN", "COMMIT", "ROLLBACK", "--", "PRAGMA")):
            file.write(b".")

    @event.listens_for(Pool, "connect")
    def _connected(dbapi_connection: Any, record: Any) -> None:
        if isinstance(dbapi_connection, sqlite3.Connection):
            dbapi_connection.set_trace_callback(traced)

    run = PostgreSQLDriver.run

    def counted(own: PostgreSQLDriver, driver: Any, statement: str, parameters: Any) -> Any:
        traced(statement)
        return run(own, driver, statement, parameters)

    setattr(PostgreSQLDriver, "run", counted)  # noqa: B010 - it goes past SQLAlchemy

    @event.listens_for(Engine, "before_cursor_execute")
    def _executing(conn: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if conn.dialect.name != "sqlite":
            traced(statement)
