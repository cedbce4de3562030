"""What a later release might add: a column, and one view made anew."""

from __future__ import annotations

from alembic.operations import Operations

from sqlq.schema.views import create_views, drop_views

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None
views = ("queue_stats",)


def upgrade(op: Operations, schema: str | None) -> None:
    _change(op, schema, "ADD COLUMN note TEXT")


def downgrade(op: Operations, schema: str | None) -> None:
    _change(op, schema, "DROP COLUMN note")


def _change(op: Operations, schema: str | None, change: str) -> None:
    prefix = f"{op.get_context().dialect.identifier_preparer.quote_schema(schema)}." if schema else ""
    for statement in (
        *drop_views(prefix, views),
        f"ALTER TABLE {prefix}jobs {change}",
        *create_views(op.get_context().dialect.name, prefix, views),
    ):
        op.execute(statement)
