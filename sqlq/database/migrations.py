"""How the tables of a database are migrated: what each `Migrations` does, with defaults."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sqlalchemy import Connection, text

from sqlq.schema import version


class Migrations:
    """The migrations of one database; stateless, a part of its `Dialect`."""

    locks: str
    """The query that tries to lock the migrations of a `:schema`, and whether it could."""
    unlocks = ""
    """The query that unlocks them, where the lock does not end with the transaction."""
    holder = ""
    """The query for who holds the lock, and how to end that session. It has no row where nobody does."""
    relations: str
    """The query for the names of all relations of a `:schema`."""
    finds_schema = ""
    """The query for whether there is a `:schema`, for databases that have several."""
    script: tuple[str, str, str]
    """The program that runs a script, and the begin and the end of its transaction."""
    in_transactions = True
    """Whether a transaction can create and change tables. Otherwise each such statement commits. Then all are
    written so that they can be repeated, and a migration that was broken off goes on."""
    open_transactions = "other programs"
    """Where an operator finds the open transactions, and by which column the oldest."""
    build_index: Callable[..., None] | None = None
    """Build an index beside the traffic, outside transactions; None where a revision does it in its own."""

    def lock(self, conn: Connection, schema: str | None) -> bool:
        """Try to keep other migrators out of a schema until the transaction ends, or until `unlocks`.

        The caller retries instead of waiting for it. A waiting statement holds a snapshot on PostgreSQL, and
        CREATE INDEX CONCURRENTLY of the lock's holder would wait for that.
        """
        return bool(conn.scalar(text(self.locks), {"schema": version.effective_schema(conn, schema)}))

    def lock_tables(self, conn: Connection, tables: Iterable[str]) -> None:
        """Let no other session write to tables until the transaction ends, or they are dropped."""
