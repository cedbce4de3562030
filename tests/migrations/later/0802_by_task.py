"""An addition of a later release: an index, built while jobs come and go."""

from __future__ import annotations

from alembic.operations import Operations

revision = "0802"
down_revision = "0801"
branch_labels = None
depends_on = None
concurrently = ("jobs", "jobs_by_task")


def upgrade(op: Operations, schema: str | None) -> None:
    if op.get_context().dialect.name == "mariadb":
        before = f"{op.get_context().dialect.identifier_preparer.quote_schema(schema)}." if schema else ""
        op.execute(
            f"CREATE INDEX IF NOT EXISTS jobs_by_task ON {before}jobs (task, id) "
            "ALGORITHM = INPLACE LOCK = NONE"
        )
        return
    op.create_index(
        *("jobs_by_task", "jobs", ["task", "id"]),
        schema=schema,
        if_not_exists=True,
        postgresql_concurrently=op.get_context().opts["live"],
    )


def downgrade(op: Operations, schema: str | None) -> None:
    op.drop_index("jobs_by_task", "jobs", schema=schema, if_exists=True)
