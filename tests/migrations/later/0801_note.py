"""Additions of a later release: a column, and one view made anew."""

from __future__ import annotations

import runpy
from pathlib import Path

from alembic.operations import Operations

revision = "0801"
down_revision = "HEAD"  # the last one of today, which `write_history` names
branch_labels = None
depends_on = None


def upgrade(op: Operations, schema: str | None) -> None:
    _change(op, schema, "ADD COLUMN", "note TEXT")


def downgrade(op: Operations, schema: str | None) -> None:
    _change(op, schema, "DROP COLUMN", "note")


def _change(op: Operations, schema: str | None, change: str, column: str) -> None:
    dialect = op.get_context().dialect
    prefix = f"{dialect.identifier_preparer.quote_schema(schema)}." if schema else ""
    first = runpy.run_path(str(Path(__file__).with_name("0001_jobs.py")))
    statements = first["statements"](dialect.name, prefix)[0]
    if dialect.name == "mariadb":
        again = "IF NOT EXISTS" if change == "ADD COLUMN" else "IF EXISTS"
        op.execute("UNLOCK TABLES")  # by which a downgrade begins, and with which no view can be made
        op.execute(f"ALTER TABLE {prefix}jobs {change} {again} {column}, ALGORITHM = INSTANT, LOCK = NONE")
    else:
        if dialect.name == "sqlite":
            op.execute("DROP VIEW queue_stats")
        op.execute(f"ALTER TABLE {prefix}jobs {change} {column}")
    view = next(each for each in statements if f"VIEW {prefix}queue_stats AS" in each)
    if dialect.name == "postgresql":
        view = view.replace("CREATE VIEW", "CREATE OR REPLACE VIEW")
    op.execute(view)
