"""Timestamps: how each database stores them, with its clock and their sums as SQL functions."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import TIMESTAMP, BigInteger, ColumnElement, Dialect, Float, Integer, TypeDecorator
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.expression import FunctionElement
from sqlalchemy.types import TypeEngine

from sqlq.schema.qualify import in_catalog

FAR = datetime(9998, 1, 1, tzinfo=UTC)
"""The due time of a blocked job. It lies behind every job that a claim may take, so that a claim neither
takes nor reads it. (NULL would do so too, but `available_at` is NOT NULL.)"""


class Moment(TypeDecorator[datetime]):
    """An instant: `timestamptz`, or on SQLite whole milliseconds since 1970 as an INTEGER.

    SQLite has no timestamp type, and text loses the offset or compares wrongly with other text. An integer is
    the only storage in which `<=` means "not later".
    """

    impl = TIMESTAMP(timezone=True)
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        return dialect.type_descriptor(Integer() if dialect.name == "sqlite" else TIMESTAMP(timezone=True))

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> Any:
        if value is None or dialect.name != "sqlite":
            return value
        return milliseconds_of(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if dialect.name != "sqlite":
            # the driver's datetime, in the session's time zone; guard: read-moments-are-in-utc
            return value.astimezone(UTC)  # type: ignore[no-any-return]
        return moment_of(value)


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)


def milliseconds_of(moment: datetime) -> int:
    """Return a time as SQLite stores it."""
    return (moment - _EPOCH) // _MILLISECOND


def moment_of(milliseconds: int) -> datetime:
    """Return the time that SQLite has stored as this number."""
    return _EPOCH + int(milliseconds) * _MILLISECOND


SQLITE_NOW = "CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)"
"""Milliseconds since 1970 by SQLite's clock, the one definition of it; constant within a statement."""

POSTGRESQL_NOW = "pg_catalog.statement_timestamp()"
"""`now()` is the start of the transaction: in a long one it would write a lease that has already expired.
`clock_timestamp()` changes from row to row and so cannot bound an index scan."""


class now(FunctionElement[datetime]):
    """The database's clock."""

    type = Moment()
    inherit_cache = True


@compiles(now, "postgresql")
def _now_postgresql(element: now, compiler: Any, **kw: Any) -> str:
    return POSTGRESQL_NOW


@compiles(now, "sqlite")
def _now_sqlite(element: now, compiler: Any, **kw: Any) -> str:
    return f"({SQLITE_NOW})"


class after(FunctionElement[datetime]):
    """The database's clock plus a number of milliseconds (minus, where it is negative)."""

    type = Moment()
    inherit_cache = True

    def __init__(self, ms: ColumnElement[int]) -> None:
        super().__init__(ms)


@compiles(after, "postgresql")
def _after_postgresql(element: after, compiler: Any, **kw: Any) -> str:
    ms = compiler.process(element.clauses, **kw)
    return in_catalog(f"({POSTGRESQL_NOW} + ({ms} * interval '1 millisecond'))")


@compiles(after, "sqlite")
def _after_sqlite(element: after, compiler: Any, **kw: Any) -> str:
    return f"({SQLITE_NOW} + {compiler.process(element.clauses, **kw)})"


class moment_after(FunctionElement[datetime]):
    """A time plus a number of milliseconds, both columns of the row. It does not depend on the session's time
    zone, so that it may be a generated column. (PostgreSQL has no such sum of a `timestamptz`.)"""

    type = Moment()
    inherit_cache = True


@compiles(moment_after, "postgresql")
def _moment_after_postgresql(element: moment_after, compiler: Any, **kw: Any) -> str:
    moment, ms = (compiler.process(clause, **kw) for clause in element.clauses)
    return in_catalog(
        f"((({moment} AT TIME ZONE 'UTC') + ({ms} * interval '1 millisecond')) AT TIME ZONE 'UTC')"
    )


@compiles(moment_after, "sqlite")
def _moment_after_sqlite(element: moment_after, compiler: Any, **kw: Any) -> str:
    moment, ms = (compiler.process(clause, **kw) for clause in element.clauses)
    return f"{moment} + {ms}"


class far(FunctionElement[datetime]):
    """`FAR`, written out, so that a statement needs no parameter for it."""

    type = Moment()
    inherit_cache = True


@compiles(far, "postgresql")
def _far_postgresql(element: far, compiler: Any, **kw: Any) -> str:
    return f"TIMESTAMP WITH TIME ZONE '{FAR}'"


@compiles(far, "sqlite")
def _far_sqlite(element: far, compiler: Any, **kw: Any) -> str:
    return str(milliseconds_of(FAR))


class epoch_ms(FunctionElement[float]):
    """A time as milliseconds since 1970 with fractions, which a driver reads much faster than a timestamp."""

    type = Float()
    inherit_cache = True


@compiles(epoch_ms, "postgresql")
def _epoch_ms_postgresql(element: epoch_ms, compiler: Any, **kw: Any) -> str:
    moment = compiler.process(element.clauses, **kw)
    return in_catalog(f"CAST(EXTRACT(EPOCH FROM {moment}) * 1000 AS DOUBLE PRECISION)")


@compiles(epoch_ms, "sqlite")
def _epoch_ms_sqlite(element: epoch_ms, compiler: Any, **kw: Any) -> str:
    return str(compiler.process(element.clauses, **kw))


class since_ms(FunctionElement[int]):
    """Whole milliseconds from a time to the database's clock."""

    type = BigInteger()
    inherit_cache = True


@compiles(since_ms, "postgresql")
def _since_ms_postgresql(element: since_ms, compiler: Any, **kw: Any) -> str:
    moment = compiler.process(element.clauses, **kw)
    return in_catalog(f"CAST(EXTRACT(EPOCH FROM {POSTGRESQL_NOW} - {moment}) * 1000 AS BIGINT)")


@compiles(since_ms, "sqlite")
def _since_ms_sqlite(element: since_ms, compiler: Any, **kw: Any) -> str:
    return f"({SQLITE_NOW} - {compiler.process(element.clauses, **kw)})"
