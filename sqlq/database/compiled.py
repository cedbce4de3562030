"""Statements that are compiled once, for a driver to run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlq.schema.qualify import qualified
from sqlq.schema.tables import TOKEN_SCHEMA


def compiled_for(statement: Any, dialect: Any, schema: str | None, keys: Iterable[str]) -> Any:
    """Return a statement as SQLAlchemy compiles it, for a driver with these parameters, in a schema."""
    return statement.compile(
        dialect=qualified(dialect),
        column_keys=list(keys),
        schema_translate_map={TOKEN_SCHEMA: schema},
        render_schema_translate=True,
    )
