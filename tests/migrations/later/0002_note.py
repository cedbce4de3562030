"""What a later release might add: a column, with the views taken away first and made again last."""

from __future__ import annotations

from alembic.operations import Operations

from sqlq.schema import views

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade(op: Operations, schema: str | None) -> None:
    _beneath_the_views(op, schema, "ADD COLUMN note TEXT")


def downgrade(op: Operations, schema: str | None) -> None:
    _beneath_the_views(op, schema, "DROP COLUMN note")


def _beneath_the_views(op: Operations, schema: str | None, change: str) -> None:
    prefix = f"{op.get_context().dialect.identifier_preparer.quote_schema(schema)}." if schema else ""
    for statement in (
        *views.drop_views(prefix),
        f"ALTER TABLE {prefix}jobs {change}",
        *views.create_views(op.get_context().dialect.name, prefix),
    ):
        op.execute(statement)
