"""How the tables of a database relate to this sqlq, and other relations with their names. Changes nothing."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import Connection, Engine, text

from sqlq.config import urls
from sqlq.database.dialects import dialect_of
from sqlq.schema import tables, version

OWN_NAMES = {*tables.TABLE_NAMES, *tables.VIEWS}
"""The tables and views of sqlq, without the version table: one of them without a version table is not
sqlq's."""


class Standing(enum.StrEnum):
    """How the tables of a database relate to this sqlq."""

    UP_TO_DATE = "up to date"
    BEHIND = "behind"
    MISSING = "missing"
    AHEAD = "ahead"
    """Newer, and this sqlq works with them: another release has migrated them in a rolling deploy."""
    NEWER = "newer"
    """Too new for this sqlq."""
    FOREIGN = "foreign"


class Check(NamedTuple):
    """The standing of tables, their revision, and a sentence about them."""

    standing: Standing
    revision: str | None
    message: str


def check(engine: Engine, schema: str | None) -> Check:
    """Return the standing of a database's tables; changes nothing and creates no file."""
    if urls.is_file(engine.url) and not Path(engine.url.database or "").exists():
        return Check(Standing.MISSING, None, version.complaint(engine, None, None))
    with engine.connect() as connection:
        stamp = version.find(connection, schema)
        if stamp is None:
            if names := taken(connection, schema):
                return Check(Standing.FOREIGN, None, foreign(connection, schema, names))
            return Check(Standing.MISSING, None, version.complaint(connection, schema, None))
        revision = stamp.revision
        holds = f"{version.database(connection, schema)} holds sqlq's tables at revision {revision}"
        if revision == version.HEAD:
            return Check(Standing.UP_TO_DATE, revision, f"{holds}, the one needed")
        if stamp.usable:
            message = f"{holds}, newer than the {version.HEAD} of this sqlq, which works with them"
            return Check(Standing.AHEAD, revision, message)
        standing = Standing.NEWER if revision > version.HEAD else Standing.BEHIND
        return Check(standing, revision, version.complaint(connection, schema, revision))


def taken(connection: Connection, schema: str | None) -> list[str]:
    """Return the names of sqlq's relations that the database already has, but not by a migration of ours that
    was broken off."""
    names = _relations(connection, schema)
    if version.TABLE in names and not dialect_of(connection).migrations.in_transactions:
        return []
    return sorted(OWN_NAMES & names)


def _relations(connection: Connection, schema: str | None) -> set[str]:
    values = {"schema": version.effective_schema(connection, schema)}
    return set(connection.execute(text(dialect_of(connection).migrations.relations), values).scalars())


def foreign(connection: Connection, schema: str | None, taken: list[str]) -> str:
    way_out = (
        "name another file with -d or SQLQ_DATABASE_URL"
        if dialect_of(connection).in_a_file
        else "give sqlq a schema of its own, as in SQLQ_SCHEMA=sqlq"
    )
    where = version.database(connection, version.effective_schema(connection, schema))
    return f"{where} holds {' and '.join(taken)} already, not made by sqlq: nothing was changed; {way_out}"


def present(connection: Connection, schema: str | None, names: Iterable[str]) -> list[str]:
    """Return the qualified names of those tables that the database has."""
    schema, existing = version.effective_schema(connection, schema), _relations(connection, schema)
    return [version.qualified(connection, schema, name) for name in names if name in existing]
