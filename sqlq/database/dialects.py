"""The supported databases, and the one that a connection leads to."""

from __future__ import annotations

from sqlalchemy import URL, Connection, Engine

from sqlq.database.dialect import Dialect
from sqlq.database.mariadb.dialect import MariaDB
from sqlq.database.postgresql.dialect import PostgreSQL
from sqlq.database.sqlite.dialect import SQLite

DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in (PostgreSQL(), SQLite(), MariaDB())}


def takes_no_writes(error: BaseException) -> bool:
    """Whether a database of any kind answers but takes no writes for now."""
    return any(dialect.trouble(error).takes_no_writes for dialect in DIALECTS.values())


def is_refused(error: BaseException) -> bool:
    """Whether a database of any kind answers and refuses this one statement."""
    return any(dialect.trouble(error).refused for dialect in DIALECTS.values())


def dialect_of(conn: Connection | Engine) -> Dialect:
    """Return the dialect of the database that a connection or an engine leads to."""
    return DIALECTS[conn.dialect.name]


def dialect_at(url: URL) -> Dialect:
    """Return the dialect of the database that a URL names."""
    return DIALECTS[url.get_backend_name()]
