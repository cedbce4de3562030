"""sqlq's tables inside a host project's own Alembic.

In a migration of the host:

    import sqlq.alembic

    def upgrade() -> None:
        sqlq.alembic.upgrade(op, "0002")

    def downgrade() -> None:
        sqlq.alembic.downgrade(op, "base")

and in its env.py, or autogenerate proposes to drop every table of sqlq:

    context.configure(connection=connection, target_metadata=metadata, include_name=sqlq.alembic.include_name)
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol, cast

from alembic import context
from alembic.runtime.migration import MigrationContext

from sqlq.config import urls
from sqlq.database import migrate, standing
from sqlq.database.dialects import NAMES, dialect_named
from sqlq.errors import ConfigurationError, UnsupportedDatabaseError
from sqlq.schema import version


class HasContext(Protocol):
    """The host's `op`: the module `alembic.op`, or an `Operations`."""

    def get_context(self) -> MigrationContext: ...


def upgrade(op: HasContext, revision: str = "head", schema: str | None = None) -> None:
    """Bring sqlq's tables to a revision, on the connection and in the transaction of the host's migration.

    Name the revision rather than "head", so that the host's migration does the same next year. `schema` is as
    in SQLQ_SCHEMA, which counts when it is None. The number goes into sqlq's own version table, and the
    host's `op` is as usable afterwards as before. In the host's offline mode (`--sql`) the contents of the
    database are unknown. The SQL starts from nothing, or from the first of two revisions given as
    "0001:0002".

    Raises `SchemaVersionError` for tables newer than this sqlq, and `ConfigurationError` for an unknown
    revision or for other tables with sqlq's names.
    """
    start, _, end = revision.rpartition(":")
    _run(op.get_context(), urls.schema_name(schema), "up", start or None, end)


def downgrade(op: HasContext, revision: str, schema: str | None = None) -> None:
    """Take sqlq's tables back to an older revision, "base" for none; jobs that are in them go with them.

    Otherwise as `upgrade`. In offline mode the revision must be given as "0002:0001".
    """
    start, _, end = revision.rpartition(":")
    if not start and op.get_context().as_sql:
        raise ConfigurationError(
            "offline, sqlq.alembic.downgrade cannot know where it starts: give both revisions, as in "
            f"{version.HEAD + ':' + end!r}"
        )
    _run(op.get_context(), urls.schema_name(schema), "down", start or None, end)


def include_name(
    name: str | None, type_: str, parent_names: Mapping[str, Any], schema: str | None = None
) -> bool:
    """Keep the host's autogenerate away from sqlq's tables; everything else is included.

    Only tables in sqlq's own schema are left out: `schema`, else SQLQ_SCHEMA, else the default one, and on
    SQLite always that. A `jobs` in another schema is the host's. Beside a function of the host's own:

        def include_name(name, type_, parent_names):
            return sqlq.alembic.include_name(name, type_, parent_names) and name != "legacy"
    """
    if type_ != "table" or name not in standing.OWN_NAMES | {version.TABLE}:
        return True
    own, default = urls.schema_name(schema), cast("str | None", "public")
    # Outside of an env.py there is no context. Alembic raises a NameError then, and an AttributeError once an
    # environment has run in this process.
    with suppress(NameError, AttributeError):
        connection = context.get_bind()
        # guard: the-hosts-default-schema
        own, default = version.effective_schema(connection, own), connection.dialect.default_schema_name
    # Alembic calls the default schema None, whatever its name is.
    return (parent_names.get("schema_name") or default) != (own or default)


def _run(
    host: MigrationContext, schema: str | None, direction: migrate.Direction, start: str | None, end: str
) -> None:
    if host.dialect.name not in NAMES:
        raise UnsupportedDatabaseError(
            f"sqlq runs on PostgreSQL, MariaDB and SQLite; this migration is for {host.dialect.name}"
        )
    if host.as_sql:
        migrate.write(
            host.dialect,
            host.output_buffer,
            None if dialect_named(host.dialect.name).in_a_file else schema,
            direction,
            start,
            end,
        )
    else:
        assert host.connection is not None
        with migrate.prepared(host.connection, schema):
            migrate.run(host.connection, schema, direction, end)
