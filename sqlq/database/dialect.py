"""A database that sqlq runs on: a few facts, and what differs from other databases in three parts.

Another database writes the statements of `Sql` that have no default. The defaults need RETURNING, UPDATE …
FROM, ON CONFLICT and common table expressions. `Driver` is about connections, `Migrations` about tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

from sqlalchemy import URL, Connection, Engine, text

from sqlq.database.sql import Sql
from sqlq.database.timeouts import AnswerTimeout
from sqlq.database.values import Problem, RawRows
from sqlq.schema import version


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

    def prepare(self, engine: Engine, timeout: AnswerTimeout, *, plans_once: bool) -> None:
        """Set up an engine of sqlq's own: how its transactions begin, how long they wait.

        With `plans_once`, statements prepared on its connections are planned once, for tables of any size.
        Planning a claim takes as long as running it. A plan for an empty table stays when there are a million
        rows in it, until it is analysed. So the plan may only use indexes, whose order makes sorting
        needless.
        """
        raise NotImplementedError

    def is_sound(self, engine: Engine, driver: Any, *, pings: bool) -> bool:
        """Whether the other end has not closed a driver's idle connection, as far as the socket shows. With
        `pings` a query also finds out whether it answers, and its session is as it was made."""
        return not pings or bool(engine.dialect.do_ping(driver))

    def run(self, driver: Any, statement: str, parameters: Any) -> RawRows:
        """Run a statement on a driver's connection and return its rows."""
        with driver.cursor() as cursor:
            cursor.execute(statement, parameters or None)
            return cast("RawRows", cursor.fetchall())

    def problem(self, error: BaseException) -> Problem:
        """Return the meaning of an error of the database or its driver."""
        raise NotImplementedError

    def commits_at_once(self, pooled: Any) -> bool:
        """Whether each write on this pooled connection commits at once: its driver has no open transaction,
        and begins none."""
        raise NotImplementedError

    def limit_time(self, conn: Connection, of: str, ms: int) -> None:
        """Limit the time of this transaction's waits for locked rows ("lock"), or of its statements
        ("statement"), if the database can do so."""


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


@dataclass(frozen=True, eq=False, kw_only=True)
class Dialect:
    """One database. There is one of each, found with `dialects.dialect_of`, `dialect_at` or
    `dialect_named`."""

    name: str
    title: str
    """Its name for people."""
    oldest: tuple[int, ...]
    """The oldest version that sqlq runs on."""
    sql: Sql
    driver: Driver
    migrations: Migrations
    health: Any
    """The module with the queries about the state of its servers. `burden` returns the causes of a slow
    database, `indexes` those of our tables, and whether queries can use each. `OWN_INDEXES` are their names.
    `unfit` returns why this server breaks a promise of sqlq's, though it speaks like a supported one.
    `missing_grant` returns the advice for the role in a URL where an error means that it lacks a right of its
    kind."""
    in_a_file: bool = False
    """Whether a database is a file, without a server, schemas and roles.

    One transaction at a time may write there, and keeps all others waiting. A connection sees another's
    commit without a statement, and so needs no notification. An id is given again after a rollback.
    """
    notifies: bool = False
    """Whether a statement notifies idle workers."""
    has_kinds_of_roles: bool = False
    """Whether `store.rights` has the rights that each kind of role needs."""
    schemas_are_databases: bool = False
    locks_on_one_node: bool = False
    """Whether a cluster may have several writers, each with row locks of its own. They see what the others
    wrote, and not what they locked."""
