"""The rights that a role needs for what it does."""

from __future__ import annotations

from sqlq.config.urls import shown
from sqlq.database.database import Database
from sqlq.errors import ConfigurationError
from sqlq.store import rights


class Grants:
    """The rights of one role. Raises `ConfigurationError` for a database without kinds of roles."""

    def __init__(self, database: Database, kind: str, role: str, *, only: bool = False) -> None:
        """With `only` the role loses its other rights on these tables."""
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
        self._database = database
        self._rights = (kind, role, database.requested_schema or database.schema or "")
        self._only = only

    def statements(self) -> list[str]:
        """Return the statements that give the rights."""
        return rights.statements(*self._rights, only=self._only)

    def apply(self) -> None:
        """Run the statements, as the role that owns the tables."""
        self._database.require_tables()
        with self._database.begin() as conn:
            rights.apply(conn, *self._rights, only=self._only)
