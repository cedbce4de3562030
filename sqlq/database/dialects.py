"""The supported databases, and the one that a connection leads to."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import cast

from sqlalchemy import URL, Connection, Engine
from sqlalchemy.exc import DBAPIError

from sqlq.database.dialect import Dialect
from sqlq.database.values import Problem

NAMES = ("postgresql", "sqlite", "mariadb")
"""The names of the databases, as SQLAlchemy has them."""


@cache
def dialect_named(name: str) -> Dialect:
    """Return the dialect of this name. Its module is imported at its first use, and with it SQLAlchemy's."""
    return cast("Dialect", import_module(f"sqlq.database.{name}.dialect").DIALECT)


def _all() -> list[Dialect]:
    return [dialect_named(name) for name in NAMES]


def problems_of(error: BaseException) -> list[Problem]:
    """Return the meaning of an error to the database whose driver raised it, or else to each of them."""
    package = type(getattr(error, "orig", None) or error).__module__.partition(".")[0]
    dialects = [dialect for dialect in _all() if package in dialect.driver.packages] or _all()
    return [dialect.driver.problem(error) for dialect in dialects]


def missing_grant(error: BaseException, url: URL | None = None, kind: str | None = None) -> str | None:
    """Return the advice for a role, that in a URL, which lacks the rights of its kind; None for any other
    error."""
    return next(filter(None, (dialect.health.missing_grant(error, url, kind) for dialect in _all())), None)


def words(error: BaseException) -> str:
    """Return the words of a database's error, without the code that some drivers put before them."""
    cause = (isinstance(error, DBAPIError) and error.orig) or error
    has_code = [type(value) for value in cause.args] == [int, str]
    return str(cause.args[1] if has_code else cause).strip()


def refusal(error: BaseException) -> str:
    """Return the first line of the error of a failed query."""
    return (words(error) or type(error).__name__).splitlines()[0]


def dialect_of(conn: Connection | Engine) -> Dialect:
    """Return the dialect of the database that a connection or an engine leads to."""
    return dialect_named(conn.dialect.name)


def dialect_at(url: URL) -> Dialect:
    """Return the dialect of the database that a URL names."""
    return dialect_named(url.get_backend_name())


def refuse_standby(conn: Connection) -> None:
    """Raise on a standby that may lag behind, since its rows may be out of date."""
    if statement := dialect_of(conn).driver.refuses_standby:
        conn.exec_driver_sql(statement)


def stricter_isolation(conn: Connection) -> str | None:
    """Return the transaction's isolation level if it is stricter than READ COMMITTED: one snapshot then
    serves all its statements. None where that does not matter."""
    query = dialect_of(conn).driver.isolation
    if not query:
        return None
    level = str(conn.exec_driver_sql(query).scalar()).upper().replace("-", " ")
    return None if level in ("READ COMMITTED", "READ UNCOMMITTED") else level


def refuses_newer_rows(conn: Connection) -> str | None:
    """Return the transaction's isolation level if it cannot change a row that another transaction has changed
    since its snapshot."""
    level, query = stricter_isolation(conn), dialect_of(conn).driver.keeps_snapshot
    if level == "REPEATABLE READ" and query:
        row = conn.exec_driver_sql(query).first()
        return level if row is not None and row[1] == "ON" else None  # guard: strict-snapshot-is-refused
    return level
