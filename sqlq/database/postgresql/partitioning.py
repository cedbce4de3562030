"""Takes finished jobs to partitions, while jobs come and go; its SQL is in migrations/partition.sql.

The table becomes the first partition as it is. Before, it gets a key that has the time, and a CHECK that
PostgreSQL validates beside the traffic. So nothing is read while others wait. The CHECK ends days ahead, and
maintenance drops one that was left behind: it must not refuse a job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from sqlq.config import urls
from sqlq.database.postgresql import online
from sqlq.database.postgresql.partitions import (
    CHECK_VIOLATION,
    COMMENT,
    MAY_NOT,
    UNTIL,
    Partitions,
    find,
    keep_up,
    run,
    without_vacuum,
)
from sqlq.errors import ConfigurationError

KEY = "finished_jobs_by_id"
UNITS = {"daily": "day", "weekly": "week", "monthly": "month", "off": None}


def part(script: Path, part: str, /, **given: object) -> str:
    """Return a part of the script, with what is given in the places named so."""
    parts = dict(each.split("\n", 1) for each in script.read_text(encoding="utf-8").split("-- part: ")[1:])
    text = parts[part].strip()
    for word, value in given.items():
        text = text.replace(f"{{{word}}}", str(value))
    return text


def offline(script: Path, table: str, rhythm: str) -> str:
    """Return the SQL that partitions an empty table, given its name as SQL has it."""
    if (unit := UNITS[rhythm]) is None:
        return ""
    begins = f"date_trunc('{unit}', statement_timestamp() AT TIME ZONE 'UTC' + interval '3 days')"
    until = f"({begins} + interval '1 {unit}') AT TIME ZONE 'UTC'"
    key = part(script, "key", table=table).replace("CONCURRENTLY ", "")
    return f"{key};\n\n{part(script, 'swap', table=table, unit=unit, until=until)};\n\n"


class Partitioning:
    """The way of the finished jobs of one database to partitions. No other migrator may be here meanwhile."""

    def __init__(
        self,
        engine: Engine,
        schema: str | None,
        script: Path,
        patiently: Callable[[Callable[[], None]], None],
    ) -> None:
        """`patiently` runs a step until it gets its locks."""
        self._engine = engine
        self._schema = schema
        self._script = script
        self._patiently = patiently

    def partition(self, rhythm: str | None) -> None:
        """Have partitions of a day, a week or a month each. "off" makes no more, None goes on as before.

        Raises `ConfigurationError` for a role that does not own the table, and for a table that carries what
        would be lost.
        """
        unit = UNITS.get(rhythm or "")
        found = self._find(unit)
        if rhythm is not None and not found.may_change:
            raise ConfigurationError(f"only {found.owner}, who owns {found.table}, may partition it")
        if unit is not None and not found.is_partitioned:
            self._swap(found)
        elif rhythm is not None and found.is_partitioned:
            comment = f"'{COMMENT}{unit}'" if unit else "NULL"
            self._change(found, found.table, f"COMMENT ON TABLE {found.table} IS {comment}")
        found = self._find()
        if found.may_change:
            keep_up(self._begin, found, alone=False)
            found = self._find()
        if found.may_change and found.gap and found.default:  # it has taken rows, and one of its own follows
            with suppress(ConfigurationError):
                self._replace(found, found.default, "rotate")
            keep_up(self._begin, self._find(), alone=False)

    def _swap(self, found: Partitions) -> None:
        def build_key(conn: Connection) -> None:
            conn.exec_driver_sql(part(self._script, "key", table=found.table))

        assert self._schema is not None
        self._change(found, found.table, part(self._script, "refuse", table=found.table))
        online.build_index(self._engine, self._schema, "finished_jobs", KEY, build_key)
        self._replace(found, found.table, "swap")

    def _replace(self, found: Partitions, name: str, how: str) -> None:
        """Make a table the partition of the gap, by a part of the script, once its rows are known to belong
        there."""
        assert found.gap
        low, high, becomes = found.gap
        given = {"table": found.table, "name": name, "unit": found.unit, "low": low, "high": high}
        given |= {
            "until": f"'{high}'",
            "becomes": becomes,
            "place": found.table.removesuffix("finished_jobs"),
        }
        self._change(found, name, part(self._script, "bound", **given))
        try:
            with self._sentences(name), online.outside_transactions(self._engine) as conn:
                conn.execution_options(isolation_level="AUTOCOMMIT")
                conn.exec_driver_sql(f"ALTER TABLE {name} VALIDATE CONSTRAINT {UNTIL}")
            self._change(found, name, part(self._script, how, **given))
        except BaseException:
            # guard: no-check-is-left
            self._change(found, name, f"ALTER TABLE {name} DROP CONSTRAINT IF EXISTS {UNTIL}")
            raise

    def _change(self, found: Partitions, name: str, statements: str) -> None:
        def step() -> None:
            with self._begin() as conn:
                run(conn, found, without_vacuum(name) + statements)

        with self._sentences(name):
            self._patiently(step)

    @contextmanager
    def _sentences(self, name: str) -> Iterator[None]:
        try:
            yield
        except DBAPIError as error:
            if online.sqlstate(error) not in (online.DEPENDENT_OBJECTS_STILL_EXIST, CHECK_VIOLATION, MAY_NOT):
                raise
            driver: Any = error.orig
            where, why = urls.masked(self._engine.url), driver.diag.message_primary
            raise ConfigurationError(f"{name} in {where} cannot be partitioned: {why}") from None

    def _find(self, unit: str | None = None) -> Partitions:
        with self._begin() as conn:
            return find(conn, self._schema, unit=unit)

    @contextmanager
    def _begin(self) -> Iterator[Connection]:
        with (
            self._engine.connect().execution_options(isolation_level="READ COMMITTED") as conn,
            conn.begin(),
        ):
            yield conn
