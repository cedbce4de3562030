"""How large the tables are, and how the database does: a reading each, with what the doctor finds about it.

Each reading is a query of its own with a limited time. A role that may not run it loses this one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from sqlq.admin.doctor.doctor import Doctor
from sqlq.admin.doctor.finding import Finding, in_units
from sqlq.config.durations import span
from sqlq.config.json_text import AsJson
from sqlq.database.database import Database
from sqlq.database.mariadb import health as mariadb
from sqlq.database.postgresql import health as postgresql
from sqlq.database.sqlite import health as sqlite
from sqlq.database.values import TableSize
from sqlq.errors import SqlqError
from sqlq.store.health import reading


@dataclass(frozen=True, slots=True)
class Reading:
    """A reading, what it means, and what the doctor finds about it where it is bad. `number` is the value for
    programs, where it is one number. `query` is a statement of another session: its texts may be secret."""

    COLUMNS: ClassVar = ("reading=name", "value", "meaning=remarks")
    name: str
    value: str
    meaning: str
    number: float | None = None
    query: str | None = None
    findings: tuple[Finding, ...] = ()

    @property
    def remarks(self) -> str:
        return " ".join([self.meaning, *map(str, self.findings)])


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
    doctor, readings, tables = Doctor(database), [], ()
    for name, (query, put, *checks) in LOOKS[database.dialect.name].items():
        findings = tuple(doctor.troubles(checks))
        try:
            with reading(database) as conn:
                found = query(conn)
            value = put(found)
        except (SQLAlchemyError, SqlqError) as error:
            answer = doctor.unanswered(error)
            found, value = None, answer.said
            findings = findings or ((replace(answer, check=name),) if answer.remedy else ())
        tables = tuple(found or ()) if name == "tables" else tables
        statement = found[0].query if found and name == "oldest transaction" else None
        single = found if isinstance(found, int | float) else None
        readings.append(Reading(name, value, MEANINGS[name], single, statement, findings))
    return Storage(f"{database.dialect.title} {number}", tuple(readings), tables)


def _of_limit(found: tuple[int, int]) -> str:
    return f"{found[0]:,} of {found[1]:,}"


def _tables(found: Sequence[TableSize]) -> str:
    indexes = sum(each.index_bytes for each in found)
    return f"{in_units(indexes + sum(each.bytes for each in found))}, {in_units(indexes)} of it indexes"


def _oldest(found: Sequence[Any]) -> str:
    if not found:
        return "none is open"
    number, who, state, seconds, *_ = found[0]
    return f"open for {span(seconds)}: {number} ({who or 'no name'}, {state})"


def _slots(found: Sequence[postgresql.Slot]) -> str:
    said = (
        f"{each.name} is {'in use' if each.active else 'idle'}"
        + ("" if each.bytes is None else f" and keeps {in_units(each.bytes)}")
        for each in found
    )
    return "; ".join(said) or "none"


def _standbys(found: Sequence[postgresql.Standby]) -> str:
    said = (
        f"{each.name or 'one'}: {each.state or 'its state is not shown to this role'}"
        + ("" if each.sync is None else f", {each.sync}")
        + ("" if each.bytes is None else f", {in_units(each.bytes)} behind")
        + ("" if each.seconds is None else f", {span(each.seconds)} late")
        for each in found
    )
    return "; ".join(said) or "none"


MEANINGS = {
    "size": "The database on disk, with the tables of others.",
    "tables": "sqlq's own tables. Workers prune finished jobs; you delete failed ones.",
    "connections": "Connections in use, of the most that the server takes. A worker that gets none waits.",
    "oldest transaction": "The longest open one of all. No row that died since it began can be removed.",
    "replication slots": "An idle slot keeps the log until the disk is full.",
    "standbys": "Servers that follow this one. A failover loses what an asynchronous one has not received.",
    "history list": "Transactions whose old rows are not purged yet. Claims read over them.",
    "replicas": "Servers that read the binary log of this one.",
    "file": "All processes must reach it on a local disk.",
    "free pages": "Pages that deleted rows have left. New rows fill them; VACUUM gives them back.",
    "page size": "The unit in which the file is read and written.",
    "journal mode": "With WAL, readers and the writer do not wait for each other.",
    "WAL file": "The log beside the file. It is written back when no reader needs it any more.",
}
LOOKS: Mapping[
    str, Mapping[str, tuple[Callable[[Connection], Any], Callable[[Any], str], *tuple[str, ...]]]
] = {
    "postgresql": {
        "size": (postgresql.size, in_units),
        "tables": (postgresql.tables, _tables, "dead rows"),
        "connections": (postgresql.connections, _of_limit),
        "oldest transaction": (postgresql.old_transactions, _oldest, "transactions"),
        "replication slots": (postgresql.slots, _slots),
        "standbys": (postgresql.standbys, _standbys, "primary", "standbys"),
    },
    "mariadb": {
        "size": (mariadb.size, in_units),
        "tables": (mariadb.tables, _tables, "tables"),
        "connections": (mariadb.connections, _of_limit),
        "oldest transaction": (mariadb.old_transactions, _oldest, "transactions"),
        "history list": (mariadb.unpurged_transactions, "{:,} transactions".format, "purge"),
        "replicas": (mariadb.replicas, "{:,}".format, "primary", "binlog"),
    },
    "sqlite": {
        "file": (sqlite.database_file, str, "file"),
        "size": (sqlite.size, in_units),
        "free pages": (sqlite.free_pages, _of_limit),
        "page size": (partial(sqlite.pragma, name="page_size"), in_units),
        "journal mode": (partial(sqlite.pragma, name="journal_mode"), str, "journal", "synchronous"),
        "WAL file": (sqlite.wal_size, in_units),
    },
}
"""The readings of each kind of database, by the name of its dialect. Each has a query, how its answer is
written, and the doctor's checks about the same."""
