"""The tables of the first release, their indexes and views, by a script for each database in 0001/.

A revision describes its day: it imports nothing of sqlq, and stays as it is when the tables change.
"""

from __future__ import annotations

import re
from pathlib import Path

from alembic.operations import Operations

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade(op: Operations, schema: str | None) -> None:
    """Build everything. Nothing is dropped first: a view that is there already is somebody else's."""
    _run(op, schema, 0)


def downgrade(op: Operations, schema: str | None) -> None:
    """Take everything away, jobs included."""
    _run(op, schema, 1)


def _run(op: Operations, schema: str | None, part: int) -> None:
    dialect = op.get_context().dialect
    prefix = f"{dialect.identifier_preparer.quote_schema(schema)}." if schema else ""
    for statement in statements(dialect.name, prefix)[part]:
        op.execute(statement)


def statements(database: str, prefix: str) -> list[list[str]]:
    """Return the statements that go up, and those that go down."""
    script = (Path(__file__).with_name("0001") / f"{database}.sql").read_text(encoding="utf-8")
    parts = [re.sub("(?m)^--.*\n", "", part) for part in script.split("-- down\n")]
    return [part.replace("{prefix}", prefix).strip().removesuffix(";").split(";\n\n") for part in parts]
