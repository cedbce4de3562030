"""The time until which a limit is closed: `sqlq_limits.closed_until`."""

from __future__ import annotations

from alembic.operations import Operations

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_COLUMN = {
    "postgresql": "closed_until {prefix}sqlq_moment",
    "mariadb": "IF NOT EXISTS closed_until DATETIME(6)",
    "sqlite": "closed_until INTEGER CONSTRAINT sqlq_limits_closed_in_range CHECK ("
    "typeof(closed_until) IN ('integer', 'null') AND closed_until >= 0 AND closed_until < 253370764800000)",
}
"""MariaDB adds no column with a CHECK beside the traffic."""


def upgrade(op: Operations, schema: str | None) -> None:
    _alter(op, schema, f"ADD COLUMN {_COLUMN[op.get_context().dialect.name]}")


def downgrade(op: Operations, schema: str | None) -> None:
    exists = "IF EXISTS " if op.get_context().dialect.name == "mariadb" else ""
    _alter(op, schema, f"DROP COLUMN {exists}closed_until")


def _alter(op: Operations, schema: str | None, change: str) -> None:
    dialect = op.get_context().dialect
    prefix = f"{dialect.identifier_preparer.quote_schema(schema)}." if schema else ""
    online = ", ALGORITHM = INSTANT, LOCK = NONE" if dialect.name == "mariadb" else ""
    op.execute(f"ALTER TABLE {prefix}sqlq_limits {change.format(prefix=prefix)}{online}")
