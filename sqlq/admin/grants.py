"""The rights that a role needs for what it does."""

from __future__ import annotations

from sqlq.config.urls import shown
from sqlq.database.database import Database
from sqlq.errors import ConfigurationError
from sqlq.store import rights

KINDS = tuple(rights.RIGHTS)


def grant(
    database: Database, kind: str, role: str, *, only: bool = False, applies: bool = False
) -> list[str]:
    """Return the statements that give a role its rights, and run them if they are to be applied. With `only`
    the role loses its other rights on these tables. Raises `ConfigurationError` for a database without such
    roles."""
    if database.dialect.in_a_file:
        raise ConfigurationError(
            f"{shown(database.engine.url)} has no roles: who may write the file may do everything, who "
            "may read it may look"
        )
    if not database.dialect.has_kinds_of_roles:
        name = database.schema
        raise ConfigurationError(
            f"sqlq knows no kinds of roles on {database.dialect.title}, where who enqueues with a unique "
            f"key may change jobs: GRANT SELECT, INSERT, UPDATE, DELETE ON `{name}`.* TO who enqueues, "
            f"works or operates, and GRANT SELECT ON `{name}`.* TO who only looks"
        )
    of_role = (kind, role, database.requested_schema or database.schema or "")
    if applies:
        database.require_tables()
        with database.begin() as conn:
            rights.apply(conn, *of_role, only=only)
    return rights.statements(*of_role, only=only)
