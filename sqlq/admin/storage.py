"""How large the tables are, and how the database does: a reading each, with what the doctor finds about it.

Each reading is a query of its own with a limited time. A role that may not run it loses this one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from sqlq.admin.doctor.doctor import Doctor
from sqlq.admin.doctor.finding import Finding, counted, span
from sqlq.config.durations import readable, written
from sqlq.database.database import Database
from sqlq.database.mariadb import health as mariadb
from sqlq.database.postgresql import health as postgresql
from sqlq.database.sqlite import health as sqlite
from sqlq.database.values import TableSize
from sqlq.errors import SqlqError
from sqlq.store.health.health import reading

__all__ = ["Reading", "Storage", "TableSize", "in_units", "storage"]


@dataclass(frozen=True, slots=True)
class Reading:
    """A reading, what it means, and what the doctor finds about it where it is bad. `number` is the value for
    programs, where it is one number. `query` is a statement of another session: its texts may be secret."""

    name: str
    value: str
    meaning: str
    number: float | None = None
    query: str | None = None
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True)
class Storage:
    """The readings of one database, and its tables, the largest first. SQLite does not count its rows, and so
    names no tables."""

    database: str
    readings: tuple[Reading, ...]
    tables: tuple[TableSize, ...]


class Look(NamedTuple):
    """A query, how its answer is written, and the doctor's checks about the same."""

    name: str
    query: Callable[[Connection], Any]
    written: Callable[[Any], str]
    meaning: str
    checks: tuple[str, ...] = ()


def storage(database: Database) -> Storage:
    """Read the sizes and the state of a database. Raises whatever keeps from connecting at all."""
    return _Reader(database).storage()


class _Reader(Doctor):
    def storage(self) -> Storage:
        with reading(self._database) as conn:
            number = ".".join(map(str, conn.dialect.server_version_info or ()))
        looks = LOOKS[self._database.dialect.name]
        findings = self.of_place({check for look in looks for check in look.checks})
        answers: dict[str, Any] = {}
        readings = tuple(self._read(look, findings, answers) for look in looks)
        tables = tuple(answers.get("tables", ()))
        return Storage(f"{self._database.dialect.title} {number}", readings, tables)

    def _read(self, look: Look, findings: Sequence[Finding], answers: dict[str, Any]) -> Reading:
        names = [check.replace("_", " ") for check in look.checks]
        about = tuple(each for each in findings if each.check in names)
        try:
            answer = answers[look.name] = self._ask(look.query)
        except (SQLAlchemyError, SqlqError) as error:
            answered = self._unanswered(error)
            remedy = () if answered.remedy is None else (Finding(look.name, *answered),)
            return Reading(look.name, answered.said, look.meaning, findings=about or remedy)
        number = answer if isinstance(answer, int | float) else None
        query = getattr(answer[0], "query", None) if answer and isinstance(answer, list) else None
        return Reading(look.name, look.written(answer), look.meaning, number, query, about)


def in_units(number: float) -> str:
    """Write a number of bytes the way a person would.

    >>> in_units(3 << 20)
    '3 MiB'
    """
    units = iter(("bytes", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while abs(number) >= 1000 and unit != "TiB":
        number, unit = number / 1024, next(units)
    return f"{number:.3g} {unit}"


def _of_limit(found: tuple[int, int]) -> str:
    return f"{found[0]:,} of {found[1]:,}"


def _tables(found: Sequence[TableSize]) -> str:
    all_bytes, indexes = (sum(map(of, found)) for of in (_whole, _indexes))
    return f"{in_units(all_bytes)}, {in_units(indexes)} of it indexes"


def _whole(table: TableSize) -> int:
    return table.bytes + table.index_bytes


def _indexes(table: TableSize) -> int:
    return table.index_bytes


def _oldest(found: Sequence[Any]) -> str:
    if not found:
        return "none is open"
    number, who, state, seconds, *_ = found[0]
    return f"open for {span(seconds)}: {number} ({who or 'no name'}, {state})"


def _timings(found: dict[str, postgresql.Timing] | str) -> str:
    if isinstance(found, str):
        return f"not known: {found}"
    said = (
        f"{name} {readable(each.mean_ms)} on average, {counted(each.calls, 'call', 'calls')}"
        for name, each in sorted(found.items())
    )
    return "; ".join(said) or "none has run since the statistics began"


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
        + ("" if each.bytes is None else f", {in_units(each.bytes)} behind")
        + ("" if each.seconds is None else f", {span(each.seconds)} late")
        for each in found
    )
    return "; ".join(said) or "none"


_SIZE = "The database on disk, with the tables of others."
_TABLES = "sqlq's own tables. Workers prune finished jobs; you delete failed ones."
_CONNECTIONS = "Connections in use, of the most that the server takes. A worker that gets none waits."
_OLDEST = "The longest open transaction of all. No row that died since it began can be removed."

LOOKS: dict[str, Sequence[Look]] = {
    "postgresql": (
        Look("size", postgresql.size, in_units, _SIZE),
        Look("tables", postgresql.tables, _tables, _TABLES, ("dead_rows", "autovacuum")),
        Look("connections", postgresql.connections, _of_limit, _CONNECTIONS, ("connections",)),
        Look(
            "oldest transaction",
            lambda conn: postgresql.old_transactions(conn, older_than_s=0),
            _oldest,
            _OLDEST,
            ("transactions", "prepared"),
        ),
        Look(
            "statements",
            postgresql.timings,
            _timings,
            "The server's own time for a claim and a settle. Claims that grow slower read over dead rows.",
        ),
        Look(
            "WAL",
            postgresql.wal,
            lambda found: f"{in_units(found.bytes)} since {written(found.since)}",
            "The log that the whole server has written. Backups and standbys have to take it.",
        ),
        Look(
            "replication slots",
            postgresql.slots,
            _slots,
            "An idle slot keeps the log until the disk is full.",
            ("slots",),
        ),
        Look(
            "standbys",
            postgresql.standbys,
            _standbys,
            "Servers that follow this one. A failover loses what an asynchronous one has not received.",
            ("primary",),
        ),
    ),
    "mariadb": (
        Look("size", mariadb.size, in_units, _SIZE),
        Look("tables", mariadb.tables, _tables, _TABLES, ("tables",)),
        Look("connections", mariadb.connections, _of_limit, _CONNECTIONS, ("connections",)),
        Look(
            "oldest transaction",
            lambda conn: mariadb.old_transactions(conn, older_than_s=0),
            _oldest,
            _OLDEST,
            ("transactions",),
        ),
        Look(
            "history list",
            mariadb.unpurged_transactions,
            lambda number: f"{number:,} transactions",
            "Transactions whose old rows are not purged yet. Claims read over them.",
            ("purge",),
        ),
        Look(
            "replicas",
            mariadb.replicas,
            lambda number: f"{number:,}",
            "Servers that read the binary log of this one.",
            ("primary", "binlog"),
        ),
    ),
    "sqlite": (
        Look("file", sqlite.database_file, str, "All processes must reach it on a local disk.", ("file",)),
        Look("size", sqlite.size, in_units, "The database on disk, without its log."),
        Look(
            "free pages",
            sqlite.free_pages,
            _of_limit,
            "Pages that deleted rows have left. New rows fill them; VACUUM gives them back.",
        ),
        Look(
            "page size",
            lambda conn: int(sqlite.pragma(conn, "page_size")),
            in_units,
            "The unit in which the file is read and written.",
        ),
        Look(
            "journal mode",
            lambda conn: sqlite.pragma(conn, "journal_mode"),
            str,
            "With WAL, readers and the writer do not wait for each other.",
            ("journal", "synchronous"),
        ),
        Look(
            "WAL",
            sqlite.wal_size,
            in_units,
            "The log beside the file. It is written back when no reader needs it any more.",
        ),
    ),
}
"""The readings of each kind of database, by the name of its dialect."""
