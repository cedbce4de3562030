"""The tables of signals, and of the jobs that wait for them, by a script for each database in 0003/."""

from __future__ import annotations

import re
from pathlib import Path

from alembic.operations import Operations

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade(op: Operations, schema: str | None) -> None:
    _run(op, schema, 0)


def downgrade(op: Operations, schema: str | None) -> None:
    _run(op, schema, 1)


def _run(op: Operations, schema: str | None, part: int) -> None:
    dialect = op.get_context().dialect
    prefix = f"{dialect.identifier_preparer.quote_schema(schema)}." if schema else ""
    script = (Path(__file__).with_name("0003") / f"{dialect.name}.sql").read_text(encoding="utf-8")
    statements = re.sub("(?m)^-- up\n", "", script).split("-- down\n")[part]
    for statement in statements.replace("{prefix}", prefix).strip().removesuffix(";").split(";\n\n"):
        op.execute(statement)
