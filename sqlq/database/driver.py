"""How the connections of a database behave: what each `Driver` does, with defaults."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from sqlalchemy import URL, Connection, Engine

from sqlq.database.timeouts import Patience
from sqlq.database.values import RawRows, Trouble


class Driver:
    """The connections of one database; stateless, a part of its `Dialect`."""

    sqlalchemy: Any
    """SQLAlchemy's dialect."""
    packages: tuple[str, ...] = ()
    """The packages of drivers whose errors mean nothing to another database, though they look alike."""
    own_options: Mapping[str, Any] = MappingProxyType({})
    """The execution options of sqlq's own connections, whose transactions are READ COMMITTED."""
    begins = ""
    """The statement that begins a transaction of several statements past SQLAlchemy; none where one statement
    does it all."""
    refuses_standby = ""
    """The statement that raises on a standby that may lag behind, since its rows may be out of date."""
    isolation = ""
    """The query for the isolation level of a transaction, where that matters."""
    default_isolation = ""
    """The query for the level of statements outside transactions, where they cannot change it."""
    keeps_snapshot = ""
    """The query for a setting, and whether it is ON: then REPEATABLE READ refuses rows that another
    transaction has changed. Without a query it always does."""
    in_transaction = ""
    """The query for whether a transaction is open, where an error may have ended it. A database that refuses
    all statements until the rollback does not need it."""
    server = ""
    """The query for the name of the database that a connection leads to, and for what is different on each
    server."""

    def ends(self, url: URL, connect_seconds: int) -> dict[str, Any]:
        """Return the driver's arguments for timeouts of connecting and of silence, without those that the URL
        or the environment sets."""
        return {}

    def prepare(self, engine: Engine, patience: Patience, *, plans_once: bool) -> None:
        """Set up an engine of sqlq's own: how its transactions begin, how long they wait.

        With `plans_once`, statements prepared on its connections are planned once, for tables of any size.
        Planning a claim takes as long as running it. A plan for an empty table stays when there are a million
        rows in it, until it is analysed. So the plan may only use indexes, whose order makes sorting
        needless.
        """
        raise NotImplementedError

    def is_sound(self, engine: Engine, driver: Any, *, asks: bool) -> bool:
        """Whether the other end has not closed a driver's idle connection, as far as the socket shows. With
        `asks` a query also finds out whether it answers, and its session is as it was made."""
        return not asks or bool(engine.dialect.do_ping(driver))

    def run(self, driver: Any, statement: str, parameters: Any) -> RawRows:
        """Run a statement on a driver's connection and return its rows."""
        with driver.cursor() as cursor:
            cursor.execute(statement, parameters or None)
            rows: RawRows = cursor.fetchall()
            return rows

    def trouble(self, error: BaseException) -> Trouble:
        """Return the meaning of an error of the database or its driver."""
        raise NotImplementedError

    def commits_at_once(self, pooled: Any) -> bool:
        """Whether each write on this pooled connection commits at once: its driver has no open transaction,
        and begins none."""
        raise NotImplementedError

    def limit_time(
        self, conn: Connection, *, lock_ms: int | None = None, statement_ms: int | None = None
    ) -> None:
        """Limit the time of this transaction's waits for locked rows, and of its statements, if the database
        can do so."""
