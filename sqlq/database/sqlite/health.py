"""What `sqlq doctor` asks the database: settings, sessions, statistics and files. Reads only, and changes
nothing.

Each function is one question, so that a role that may not ask one of them is still answered the others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sqlalchemy import Connection

# -- SQLite --------------------------------------------------------------------------------------------------


def pragma(conn: Connection, name: str) -> Any:
    """Return the value of a pragma as it is for sqlq's own connections."""
    return conn.exec_driver_sql(f"PRAGMA {name}").scalar()


def database_file(conn: Connection) -> Path | None:
    """Return the file SQLite says it has open."""
    name = conn.exec_driver_sql("SELECT file FROM pragma_database_list WHERE name = 'main'").scalar()
    return Path(name) if name else None


def quick_check(conn: Connection) -> list[str]:
    """Return what `PRAGMA quick_check` finds wrong, at most ten complaints."""
    return [row[0] for row in conn.exec_driver_sql("PRAGMA quick_check(10)") if row[0] != "ok"]
