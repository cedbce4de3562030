"""The rights that a role of PostgreSQL needs for what it does."""

from __future__ import annotations

from sqlq.config.urls import shown
from sqlq.database.database import Database
from sqlq.errors import ConfigurationError
from sqlq.store import rights


class Grants:
    """The rights of one role. Raises `ConfigurationError` for a database without roles."""

    def __init__(self, database: Database, kind: str, role: str, *, only: bool = False) -> None:
        """With `only` the role loses its other rights on these tables."""
        if database.dialect.in_a_file:
            raise ConfigurationError(
                f"{shown(database.engine.url)} has no roles: who may write the file may do everything, who "
                "may read it may look"
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
