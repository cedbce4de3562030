"""${message}

A revision describes its day: it imports nothing of sqlq. It changes a view by CREATE OR REPLACE VIEW, which
keeps its grants and the views of users on it; on SQLite it drops the view first and creates it last. There it uses ADD COLUMN
or DDL written out, never batch mode, which fails beside a view and loses AUTOINCREMENT. `op` and `schema` are arguments, so that a host project's own `op` is left alone.

It works with the code of the release before: it adds, and never rewrites jobs. One that takes something away sets
`oldest_code` in sqlq_version to the oldest revision whose code still works (docs/decisions/0006). One that builds an index
does nothing else, names it as in `concurrently = ("jobs", "jobs_by_task")`, and passes `if_not_exists=True` and
`postgresql_concurrently=op.get_context().opts["live"]` to `op.create_index`.
"""

from __future__ import annotations

from alembic.operations import Operations

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = ${repr(branch_labels)}
depends_on = ${repr(depends_on)}


def upgrade(op: Operations, schema: str | None) -> None:
    """Build what is new."""
    ${upgrades if upgrades else "raise NotImplementedError"}


def downgrade(op: Operations, schema: str | None) -> None:
    """Take it away again."""
    ${downgrades if downgrades else "raise NotImplementedError"}
