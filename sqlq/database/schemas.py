"""Statements in the schema of their connection, and the encryption of its database."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from sqlalchemy import Connection, text

from sqlq.database.values import Execute, RawRows
from sqlq.payload.encryption import Encryption
from sqlq.schema.qualify import in_catalog, qualified
from sqlq.schema.tables import TOKEN_SCHEMA

ENCRYPTION = "sqlq_encryption"
"""The execution option of sqlq's own connections that holds the `Encryption` of their database."""


def schema_of(conn: Connection) -> str | None:
    """Return the schema to which a connection of sqlq's own sends its statements."""
    return cast("str | None", conn.get_execution_options()["schema_translate_map"][TOKEN_SCHEMA])


def encryption_of(conn: Connection) -> Encryption | None:
    """Return the encryption of the database of a connection of sqlq's own."""
    return cast("Encryption | None", conn.get_execution_options()[ENCRYPTION])


def named(statement: str, dialect: Any, schema: str | None) -> str:
    """Return a statement written by hand, which names the token schema, for this one; None means SQLite."""
    name = dialect.identifier_preparer.quote_schema(schema) if schema else "main"
    return statement.replace(TOKEN_SCHEMA, name)


def execute_on(conn: Connection) -> Execute:
    """Return what runs statements written by hand on a connection of sqlq's own."""

    def execute(statement: str, parameters: Any) -> RawRows:
        rows = conn.exec_driver_sql(named(statement, conn.dialect, schema_of(conn)), parameters)
        # the result on a caller's connection of a driver has rows or is empty
        return list(rows) if getattr(rows, "returns_rows", True) else []

    return execute


def run_text(conn: Connection, statement: str, **parameters: Any) -> Any:
    """Run a statement written by hand, with its parameters by name."""
    written = in_catalog(statement) if conn.dialect.name == "postgresql" else statement
    return conn.execute(text(named(written, conn.dialect, schema_of(conn))), parameters)


def compiled_for(statement: Any, dialect: Any, schema: str | None, keys: Iterable[str]) -> Any:
    """Return a statement as SQLAlchemy compiles it, for a driver with these parameters, in a schema."""
    return statement.compile(
        dialect=qualified(dialect),
        column_keys=list(keys),
        schema_translate_map={TOKEN_SCHEMA: schema},
        render_schema_translate=True,
    )


@contextmanager
def in_schema(conn: Any, schema: str | None, encryption: Encryption | None = None) -> Iterator[None]:
    """Execute the block's statements on a caller's connection as on sqlq's own: in this schema, by qualified
    names."""
    dialect, options = conn.dialect, conn._execution_options  # noqa: SLF001 - as below
    conn.dialect = qualified(dialect)
    translated = options.union({"schema_translate_map": {TOKEN_SCHEMA: schema}, ENCRYPTION: encryption})
    conn._execution_options = translated  # noqa: SLF001 - the public way calls the caller's hooks
    try:
        yield
    finally:
        conn.dialect = dialect
        conn._execution_options = options  # noqa: SLF001 - as above
