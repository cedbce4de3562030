"""Queries of `sqlq doctor` for SQLite: settings and files. They read only.

Each function is one query, so that one that fails does not stop the others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection

from sqlq.database.values import Burden
from sqlq.schema.tables import INDEXES

OWN_INDEXES = INDEXES


def pragma(conn: Connection, name: str) -> Any:
    """Return the value of a pragma on sqlq's own connections."""
    return conn.exec_driver_sql(f"PRAGMA {name}").scalar()


def database_file(conn: Connection) -> Path | None:
    """Return the file that SQLite has open."""
    name = conn.exec_driver_sql("SELECT file FROM pragma_database_list WHERE name = 'main'").scalar()
    return Path(name) if name else None


def size(conn: Connection) -> int:
    return int(pragma(conn, "page_size")) * int(pragma(conn, "page_count"))


def wal_size(conn: Connection) -> int:
    return burden(conn).wal_bytes or 0


def quick_check(conn: Connection) -> list[str]:
    """Return the errors that `PRAGMA quick_check` finds, at most ten."""
    return [row[0] for row in conn.exec_driver_sql("PRAGMA quick_check(10)") if row[0] != "ok"]


def indexes(conn: Connection) -> dict[str, bool]:
    names = conn.exec_driver_sql("SELECT name FROM sqlite_master WHERE type = 'index'").scalars()
    return dict.fromkeys(names, True)


def burden(conn: Connection) -> Burden:
    file = database_file(conn)
    if file is None:
        return Burden()
    try:
        return Burden(wal_bytes=file.with_name(f"{file.name}-wal").stat().st_size)
    except OSError:  # there is none without an open connection
        return Burden(wal_bytes=0)


def unfit(conn: Connection) -> str | None:
    return None


def missing_grant(error: BaseException, url: URL | None, kind: str | None) -> str | None:
    return None
