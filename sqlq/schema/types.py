"""Timestamps: how each database stores them, with its clock and their sums as SQL functions."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from sqlalchemy import TIMESTAMP, BigInteger, Boolean, Dialect, Float, Integer, Text, TypeDecorator, literal
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.expression import FunctionElement
from sqlalchemy.types import NullType, TypeEngine

from sqlq.config.durations import FAR
from sqlq.schema.qualify import in_catalog

T = TypeVar("T")


class Moment(TypeDecorator[datetime]):
    """An instant: `timestamptz`, on MariaDB a DATETIME(6) in UTC, or on SQLite whole milliseconds since 1970
    as an INTEGER.

    SQLite has no timestamp type, and text loses the offset or compares wrongly with other text. An integer is
    the only storage in which `<=` means "not later".
    """

    impl = TIMESTAMP(timezone=True)
    cache_ok = True
    on_sqlite: TypeEngine[Any] = Integer()

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        if dialect.name == "mariadb":
            from sqlalchemy.dialects.mysql import DATETIME

            return dialect.type_descriptor(DATETIME(fsp=6))
        return dialect.type_descriptor(
            self.on_sqlite if dialect.name == "sqlite" else TIMESTAMP(timezone=True)
        )

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> Any:
        if value is None or dialect.name == "postgresql":
            return value
        return milliseconds_since_epoch(value) if dialect.name == "sqlite" else naive(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if dialect.name == "sqlite":
            return _EPOCH + int(value) * _MILLISECOND
        if dialect.name == "mariadb":
            # a sum with a parameter is text
            time = datetime.fromisoformat(value) if isinstance(value, str) else value
            return time.replace(tzinfo=UTC)
        # the driver's datetime, in the session's time zone; guard: read-times-are-in-utc
        return value.astimezone(UTC)  # type: ignore[no-any-return]  # the driver's value


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)


def milliseconds_since_epoch(time: datetime) -> int:
    """Return a time as SQLite stores it."""
    return (time - _EPOCH) // _MILLISECOND


def naive(time: datetime) -> datetime:
    """Return a time as MariaDB stores it: in UTC, without a zone."""
    return time.astimezone(UTC).replace(tzinfo=None)


SQLITE_NOW = "CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)"
"""Milliseconds since 1970 by SQLite's clock, the one definition of it; constant within a statement."""

POSTGRESQL_NOW = "pg_catalog.statement_timestamp()"
"""`now()` is the start of the transaction: in a long one it would write a lease that has already expired.
`clock_timestamp()` changes from row to row and so cannot bound an index scan."""

MARIADB_NOW = "UTC_TIMESTAMP(6)"
"""The start of the statement, whatever the session's time zone is."""


class _Function(FunctionElement[T]):
    """An SQL function that each database has in its own words; `{0}` stands for the first argument."""

    postgresql: str
    sqlite: str
    mariadb: str

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.inherit_cache = True  # of each class by itself


@compiles(_Function)
def _write(element: _Function[Any], compiler: Any, **kw: Any) -> str:
    template: str = getattr(element, compiler.dialect.name)
    return template.format(*(compiler.process(argument, **kw) for argument in element.clauses))


class now(_Function[datetime]):
    """The database's clock."""

    type = Moment()
    postgresql = POSTGRESQL_NOW
    sqlite = f"({SQLITE_NOW})"
    mariadb = MARIADB_NOW


class after(_Function[datetime]):
    """The database's clock plus a number of milliseconds (minus, where it is negative)."""

    type = Moment()
    postgresql = in_catalog(f"({POSTGRESQL_NOW} + ({{0}} * interval '1 millisecond'))")
    sqlite = f"({SQLITE_NOW} + {{0}})"
    mariadb = f"({MARIADB_NOW} + INTERVAL ({{0}}) * 1000 MICROSECOND)"


def ago(milliseconds: int) -> after:
    """The database's clock minus a number of milliseconds."""
    return after(literal(-milliseconds, BigInteger))


class time_after(_Function[datetime]):
    """A time plus a number of milliseconds, both columns of the row, whatever the session's time zone is."""

    type = Moment()
    postgresql = in_catalog(
        "((({0} AT TIME ZONE 'UTC') + ({1} * interval '1 millisecond')) AT TIME ZONE 'UTC')"
    )
    sqlite = "{0} + {1}"
    mariadb = "({0} + INTERVAL ({1}) * 1000 MICROSECOND)"


class far(_Function[datetime]):
    """`FAR`, written out, so that a statement needs no parameter for it."""

    type = Moment()
    postgresql = f"TIMESTAMP WITH TIME ZONE '{FAR}'"
    sqlite = str(milliseconds_since_epoch(FAR))
    mariadb = f"TIMESTAMP '{naive(FAR)}'"


class epoch_ms(_Function[float]):
    """A time as milliseconds since 1970 with fractions, which a driver reads much faster than a timestamp."""

    type = Float()
    postgresql = in_catalog("CAST(EXTRACT(EPOCH FROM {0}) * 1000 AS DOUBLE PRECISION)")
    sqlite = "{0}"
    mariadb = "CAST(TIMESTAMPDIFF(MICROSECOND, TIMESTAMP '1970-01-01 00:00:00', {0}) / 1000 AS DOUBLE)"


class stands_in(_Function[bool]):
    """Whether the first text stands somewhere in the second. (LIKE is no operator that can be qualified.)"""

    type = Boolean()
    postgresql = in_catalog("(strpos({1}, CAST({0} AS text)) > 0)")
    sqlite = "(instr({1}, {0}) > 0)"
    mariadb = sqlite


class is_among(_Function[bool]):
    """Whether a query has the value of an indexed column. The index finds the rows, whatever the planner
    knows of the table."""

    type: Any = NullType()
    sqlite = mariadb = "{0} IN {1}"
    postgresql = in_catalog("({0} = ANY (ARRAY{1}))")


class last_of(_Function[str]):
    """The last characters of a text, up to a number."""

    type = Text()
    postgresql = in_catalog("right({0}, {1})")
    mariadb = "RIGHT({0}, {1})"
    sqlite = "substr({0}, -({1}))"


class unblocks_since(_Function[bool]):
    """Whether a step, or a job under a limit, has ended after a time: its own end, its flow, its limit, the
    time. MariaDB has an index of such ends alone by a column of their own."""

    type: Any = NullType()  # of a Boolean SQLAlchemy would write `= 1`, and no index would fit
    sqlite = "({0} > {3} AND ({1} IS NOT NULL OR {2} IS NOT NULL))"
    postgresql = in_catalog(sqlite)
    mariadb = "(unblocks_at > {3})"


class is_sampled(_Function[bool]):
    """Whether the id of a failed job belongs to the sample. MariaDB has a column of that."""

    type: Any = NullType()
    postgresql = in_catalog("(mod({0}, 61) = 0)")
    sqlite = "({0} % 61 = 0)"
    mariadb = "(sampled = 1)"


class since_ms(_Function[int]):
    """Whole milliseconds from a time to the database's clock."""

    type = BigInteger()
    postgresql = in_catalog(f"CAST(EXTRACT(EPOCH FROM {POSTGRESQL_NOW} - {{0}}) * 1000 AS BIGINT)")
    sqlite = f"({SQLITE_NOW} - {{0}})"
    mariadb = f"(TIMESTAMPDIFF(MICROSECOND, {{0}}, {MARIADB_NOW}) DIV 1000)"
