"""Statements that are compiled once, for a driver to run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlq.schema.qualify import qualified
from sqlq.schema.tables import TOKEN_SCHEMA


def compiled_for(statement: Any, dialect: Any, schema: str | None, keys: Sequence[str]) -> Any:
    """Return a statement as SQLAlchemy compiles it, for a driver with these parameters, in a schema."""
    return statement.compile(
        dialect=qualified(dialect),
        column_keys=list(keys),
        schema_translate_map={TOKEN_SCHEMA: schema},
        render_schema_translate=True,
    )


class Compiled(NamedTuple):
    """A statement as a driver takes it, compiled once. Compiling it anew, or looking it up, takes about as
    long as the database takes to run it."""

    statement: str
    constants: dict[str, Any]
    order: Sequence[str] | None

    @classmethod
    def of(cls, statement: Any, dialect: Any, schema: str | None, keys: Sequence[str]) -> Compiled:
        """`keys` are the parameters that differ from job to job."""
        compiled = compiled_for(statement, dialect, schema, keys)
        constants = {name: value for name, value in compiled.params.items() if name not in keys}
        return cls(str(compiled), constants, compiled.positiontup)

    def parameters(self, row: dict[str, Any]) -> Any:
        """Return them by name or in order, whichever the driver takes."""
        every = {**self.constants, **row} if self.constants else row
        return every if self.order is None else tuple(every[name] for name in self.order)
