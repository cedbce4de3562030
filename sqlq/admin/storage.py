"""How large the tables are, and how the database does: a reading each.

Each reading is a query of its own with a limited time. A role that may not run it loses this one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from sqlq.admin.doctor.doctor import unanswered
from sqlq.config.durations import in_units, span
from sqlq.config.json_text import AsJson
from sqlq.database.database import Database
from sqlq.database.mariadb import health as mariadb
from sqlq.database.postgresql import health as postgresql
from sqlq.database.sqlite import health as sqlite
from sqlq.database.values import Session, TableSize
from sqlq.errors import SqlqError
from sqlq.store.health import reading


@dataclass(frozen=True, slots=True)
class Reading:
    """A reading, and what it means. `number` is the value for programs, where it is one number. `query` is a
    statement of another session: its texts may be secret."""

    COLUMNS = ("reading=name", "value", "meaning")
    name: str
    value: str
    meaning: str
    number: float | None = None
    query: str | None = None


@dataclass(frozen=True, slots=True)
class Storage(AsJson):
    """The readings of one database, and its tables, the largest first. SQLite does not count its rows, and so
    names no tables."""

    database: str
    readings: tuple[Reading, ...]
    tables: tuple[TableSize, ...]


def storage(database: Database) -> Storage:
    """Read the sizes and the state of a database. Raises whatever keeps from connecting at all."""
    with reading(database) as conn:
        number = ".".join(map(str, conn.dialect.server_version_info or ()))
    readings, tables = [], ()
    for name, (query, write, meaning) in READINGS[database.dialect.name].items():
        try:
            with reading(database) as conn:
                rows = query(conn)
            value = write(rows)
        except (SQLAlchemyError, SqlqError) as error:
            rows, value = None, unanswered(database, error).text
        tables = tuple(rows or ()) if name == "tables" else tables
        statement = rows[0].query if rows and name == "oldest transaction" else None
        number_alone = rows if isinstance(rows, int | float) else None
        readings.append(Reading(name, value, meaning, number_alone, statement))
    return Storage(f"{database.dialect.title} {number}", tuple(readings), tables)


def _tables(tables: Sequence[TableSize]) -> str:
    indexes = sum(table.index_bytes for table in tables)
    return f"{in_units(indexes + sum(table.bytes for table in tables))}, {in_units(indexes)} of it indexes"


def _oldest(sessions: Sequence[Session]) -> str:
    if not sessions:
        return "none is open"
    number, program, state, seconds, *_ = sessions[0]
    return f"open for {span(seconds)}: {number} ({program or 'no name'}, {state})"


Row = tuple[Callable[[Connection], Any], Callable[[Any], str], str]
"""A query, how its answer is written, and what it means."""


def _of_server(health: Any) -> dict[str, Row]:
    return {
        "size": (health.size, in_units, "The database on disk, with the tables of others."),
        "tables": (
            *(health.tables, _tables),
            "sqlq's own tables. Workers prune finished jobs; you delete failed ones.",
        ),
        "connections": (
            *(health.connections, "{0[0]:,} of {0[1]:,}".format),
            "Connections in use, of the most that the server takes. A worker that gets none waits.",
        ),
        "oldest transaction": (
            *(health.old_transactions, _oldest),
            "The longest open one of all. No row that died since it began can be removed.",
        ),
    }


READINGS: Mapping[str, Mapping[str, Row]] = {
    "postgresql": _of_server(postgresql),
    "mariadb": {
        **_of_server(mariadb),
        "history list": (
            *(mariadb.unpurged_transactions, "{:,} transactions".format),
            "Transactions whose old rows are not purged yet. Claims read over them.",
        ),
    },
    "sqlite": {
        "file": (sqlite.database_file, str, "All processes must reach it on a local disk."),
        "size": (sqlite.size, in_units, "The database on disk, with the tables of others."),
        "journal mode": (
            *(partial(sqlite.pragma, name="journal_mode"), str),
            "With WAL, readers and the writer do not wait for each other.",
        ),
        "WAL file": (
            *(sqlite.wal_size, in_units),
            "The log beside the file. It is written back when no reader needs it any more.",
        ),
    },
}
"""The readings of each kind of database, by the name of its dialect."""
