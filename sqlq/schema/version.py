"""Which revision of the tables a database holds, and whether this sqlq can use it.

Newer tables alone are no obstacle, since in a rolling deploy the old workers run beside the new ones. So a
revision must work with the code before it; one that does not raises `oldest_code` in the version table.

These queries run in a caller's transaction, so none may fail in the database: PostgreSQL would abort the
transaction. Alembic is not imported: only migrating needs it.
"""

from __future__ import annotations

import logging
from functools import cache, partial
from typing import NamedTuple

from sqlalchemy import Connection, Engine, TextClause, text

from sqlq.config import urls
from sqlq.config.command_hint import command, granting
from sqlq.errors import ConfigurationError, SchemaVersionError
from sqlq.schema.qualify import in_catalog

HEAD = "0003"
"""The revision this sqlq needs: the last one in migrations/versions. Four digits, so that text compares as
the number."""

TABLE = "sqlq_version"

log = logging.getLogger("sqlq")


class Stamp(NamedTuple):
    """The revision of the tables in a database, and the oldest `HEAD` of a sqlq that works with them."""

    revision: str
    oldest_code: str

    @property
    def usable(self) -> bool:
        """Whether this sqlq works with these tables."""
        if not self.revision.isdecimal():
            return False
        return self.revision == HEAD or self.oldest_code <= HEAD < self.revision  # guard: schema-usable


def read(connection: Connection, schema: str | None) -> str | None:
    """Return the revision of the tables in a database, or None where there are none. Otherwise as `find`."""
    stamp = find(connection, schema)
    return stamp.revision if stamp else None


def find(connection: Connection, schema: str | None) -> Stamp | None:
    """Return the row of the version table, or None where there are no tables.

    `schema` is as in SQLQ_SCHEMA; None means SQLite, or PostgreSQL's default schema. Raises
    `SchemaVersionError` when the role may not read the number, which is a missing GRANT; the transaction
    stays usable then, too.
    """
    schema = effective_schema(connection, schema)
    catalog = _CATALOGS[connection.dialect.name]
    readable = connection.execute(catalog.readable, {"schema": schema, "table": TABLE}).scalar()
    if readable is None:
        return None
    table = qualified(connection, schema, TABLE)
    if not readable:
        role = connection.execute(text("SELECT current_user")).scalar_one()
        named = None if schema == connection.dialect.default_schema_name else schema
        raise SchemaVersionError(
            f"the role that connects to {database(connection, schema)} may not read {table}: "
            + granting(role, connection.engine.url, schema=named)
        )
    row = connection.execute(text(f"SELECT {catalog.row} FROM {table}")).mappings().first()
    return None if row is None else Stamp(row["version_num"], row.get("oldest_code") or row["version_num"])


class _Catalog(NamedTuple):
    """Queries of a database's catalog that cannot fail: whether the version table is there and readable."""

    readable: TextClause
    row: str = "*"
    """The columns of the version's row; the second one is missing before revision 0001."""
    or_granted: str = ""
    """Another remedy where no table seems to be there."""


def require(connection: Connection, schema: str | None) -> str:
    """Return the revision of the tables. Raises `SchemaVersionError` unless this sqlq works with them.

    It works with its own revision, and with newer ones that are not marked as too new for it.
    """
    stamp = find(connection, schema)
    if stamp is None and urls.in_memory(connection.engine.url):
        raise SchemaVersionError(
            f"{database(connection, schema)} does not hold sqlq's tables yet: make them with "
            "sqlq.testing.create_tables(connection), on a connection of this very engine"
        )
    if stamp is None or not stamp.usable:
        raise SchemaVersionError(complaint(connection, schema, stamp.revision if stamp else None))
    return stamp.revision


_CATALOGS = {
    # A prepared statement with * fails once the columns have changed.
    "postgresql": _Catalog(
        text(
            in_catalog(
                """
SELECT has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT')
  FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname = :schema AND c.relname = :table
"""
            )
        ),
        f"version_num, to_jsonb({TABLE}) ->> 'oldest_code' AS oldest_code",
    ),
    "sqlite": _Catalog(
        # every query takes both parameters
        text("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = :table AND :schema IS NULL"),
    ),
    "mariadb": _Catalog(
        text("SELECT 1 FROM information_schema.tables WHERE table_schema = :schema AND table_name = :table"),
        or_granted=", or GRANT SELECT on them to the account in the URL, if others see them",
    ),
}


def watch(connection: Connection, schema: str | None) -> None:
    """Raise `SchemaVersionError` when this sqlq can no longer use the tables; log one line about a newer
    revision that it can use."""
    revision = require(connection, schema)
    if revision > HEAD:
        log_newer(revision)


@cache
def log_newer(revision: str) -> None:
    log.info(
        "the tables are at revision %s, newer than the %s of this sqlq, which works with them",
        revision,
        HEAD,
        extra={"event": "schema_newer"},
    )


def complaint(connection: Connection | Engine, schema: str | None, revision: str | None) -> str:
    """Return the sentence about tables at a revision other than `HEAD`, with the remedy."""
    where = database(connection, schema)
    named = None if schema == connection.dialect.default_schema_name else schema
    migrate = partial(command, url=connection.engine.url, schema=named)
    if revision is None:
        return (
            f"{where} does not hold sqlq's tables yet: create them with `{migrate('migrate')}`"
            f"{_CATALOGS[connection.dialect.name].or_granted}"
        )
    if not revision.isdecimal():
        return unknown(where, revision)
    if revision > HEAD:
        return (
            f"{where} holds sqlq's tables at revision {revision}, newer than the {HEAD} this sqlq knows: "
            "install the newer sqlq here, "
            f"or take them back with that one's `{migrate(f'migrate --down {HEAD}')}`"
        )
    return (
        f"{where} holds sqlq's tables at revision {revision}, older than the {HEAD} this sqlq needs: run "
        f"`{migrate('migrate')}`"
    )


def unknown(where: str, revision: str) -> str:
    """Return the sentence about tables at a revision that no release has."""
    return (
        f"{where} holds sqlq's tables at revision {revision!r}, which no release has: correct the number in "
        f"{TABLE}, or drop the tables, where no job in them is wanted, and migrate anew"
    )


def database(connection: Connection | Engine, schema: str | None) -> str:
    """Return the database's URL for a message, with the schema where one is named and without the password.
    An SQLite file has its whole path."""
    url = urls.shown(connection.engine.url)
    return f"{url} (schema {schema})" if schema and connection.dialect.name != "sqlite" else url


def effective_schema(connection: Connection, schema: str | None) -> str | None:
    """Return the schema by its name: None on SQLite, and for None PostgreSQL's default one.

    The default is the first schema of the search_path that the engine saw on its first connection. So a `SET
    search_path` of one session does not send its statements elsewhere.
    """
    if connection.dialect.name == "sqlite":
        return None
    schema = schema or connection.dialect.default_schema_name
    if schema is None:
        reason = (
            "names no database: add it, as in …/shop, or"
            if connection.dialect.name == "mariadb"
            else "has no default schema (its search_path names none that exists):"
        )
        raise ConfigurationError(f"{urls.masked(connection.engine.url)} {reason} name one in SQLQ_SCHEMA")
    return schema


def qualified(connection: Connection, schema: str | None, name: str) -> str:
    """Return a table's name as SQL, with its schema, quoted where needed."""
    quote = connection.dialect.identifier_preparer
    return f"{quote.quote_schema(schema)}.{quote.quote(name)}" if schema else quote.quote(name)
