"""What `sqlq doctor` asks the database: settings, sessions, statistics and files. Reads only, and changes
nothing.

Each function is one question, so that a role that may not ask one of them is still answered the others.
"""

from __future__ import annotations

import getpass
import os
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import URL, BigInteger, Connection, CursorResult, bindparam, func, literal, select, text
from sqlalchemy.exc import DBAPIError

from sqlq.commandline import granting
from sqlq.schema.moments import after, now
from sqlq.schema.qualify import in_catalog
from sqlq.schema.tables import jobs, metadata
from sqlq.store import cluster, counts
from sqlq.store.database import Database
from sqlq.store.dialect import schema_of


def _asked(conn: Connection, question: str, **given: Any) -> CursorResult[*tuple[Any, ...]]:
    """Ask PostgreSQL."""
    return conn.execute(text(in_catalog(question)), given)


STATEMENT_TIMEOUT_MS = 15_000
"""On PostgreSQL: an examination must not become the load that it looks for."""


def limit_time(conn: Connection) -> None:
    """Let no question of this transaction take long (PostgreSQL)."""
    if conn.dialect.name == "postgresql":
        _asked(conn, "SELECT set_config('statement_timeout', :ms, true)", ms=str(STATEMENT_TIMEOUT_MS))


@contextmanager
def reading(database: Database) -> Iterator[Connection]:
    """Read in a transaction in which no question takes long."""
    with database.read() as conn:
        limit_time(conn)
        yield conn


# -- PostgreSQL ----------------------------------------------------------------------------------------------


def setting(conn: Connection, name: str) -> str:
    """Return a setting as it is for this connection."""
    return str(_asked(conn, "SELECT current_setting(:name)", name=name).scalar())


def is_standby(conn: Connection) -> bool:
    return bool(_asked(conn, "SELECT pg_is_in_recovery()").scalar())


class Connections(NamedTuple):
    """How many connections clients have, and how many this role may have at most beside others'."""

    used: int
    limit: int


def connections(conn: Connection) -> Connections:
    row = _asked(
        conn,
        "SELECT (SELECT count(*) FROM pg_catalog.pg_stat_activity WHERE datid IS NOT NULL), "
        "current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int",
    ).one()
    return Connections(*row)


def creators(conn: Connection) -> list[tuple[str, str]]:
    """Return the schemas of the search_path, and of our tables, in which others than their owners and
    superusers may create, each with the role (or PUBLIC) that may."""
    rows = _asked(
        conn,
        "SELECT quote_ident(n.nspname), coalesce(quote_ident(r.rolname), 'PUBLIC') "
        "FROM pg_catalog.pg_namespace n CROSS JOIN LATERAL aclexplode(n.nspacl) a "
        "LEFT JOIN pg_catalog.pg_roles r ON r.oid = a.grantee "
        "WHERE (n.nspname = :schema OR n.nspname = ANY (current_schemas(false))) "
        "AND a.privilege_type = 'CREATE' AND a.grantee <> n.nspowner AND r.rolsuper IS NOT TRUE "
        "ORDER BY 1, 2",
        schema=schema_of(conn),
    )
    return [(schema, role) for schema, role in rows]


class Session(NamedTuple):
    """A session whose open transaction keeps dead rows from being removed."""

    pid: int
    program: str
    state: str
    seconds: float


def old_transactions(conn: Connection, *, older_than_s: float) -> list[Session]:
    """Return the oldest open transactions of this database that hold a snapshot or have written, the oldest
    first."""
    rows = _asked(
        conn,
        "SELECT pid, coalesce(application_name, ''), coalesce(state, '?'), EXTRACT(epoch FROM "
        "clock_timestamp() - xact_start) "
        "FROM pg_catalog.pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
        "AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL) "
        "AND xact_start < (clock_timestamp() - (:seconds * interval '1 second')) "
        "ORDER BY xact_start LIMIT 5",
        seconds=older_than_s,
    )
    return [Session(row[0], row[1], row[2], float(row[3])) for row in rows]


def hidden_sessions(conn: Connection) -> int:
    """Return how many sessions of this database the role may not look into."""
    hidden = (
        "SELECT count(*) FROM pg_catalog.pg_stat_activity WHERE datname = current_database() AND query = "
        "'<insufficient privilege>'"
    )
    return int(_asked(conn, hidden).scalar() or 0)


def prepared_transactions(conn: Connection, *, older_than_s: float) -> list[tuple[str, float]]:
    """Return the prepared transactions of this database that wait for their COMMIT PREPARED, and for how many
    seconds."""
    rows = _asked(
        conn,
        "SELECT gid, EXTRACT(epoch FROM clock_timestamp() - prepared) FROM pg_catalog.pg_prepared_xacts "
        "WHERE database = current_database() "
        "AND prepared < (clock_timestamp() - (:seconds * interval '1 second')) ORDER BY prepared LIMIT 5",
        seconds=older_than_s,
    )
    return [(row[0], float(row[1])) for row in rows]


def idle_slots(conn: Connection) -> list[tuple[str, int]]:
    """Return the replication slots without a user that hold back vacuum, and by how many transactions."""
    rows = _asked(
        conn,
        "SELECT slot_name, greatest(age(xmin), age(catalog_xmin)) FROM pg_catalog.pg_replication_slots "
        "WHERE NOT active AND (xmin IS NOT NULL OR catalog_xmin IS NOT NULL) ORDER BY 2 DESC LIMIT 5",
    )
    return [(row[0], int(row[1])) for row in rows]


class Rows(NamedTuple):
    """The rows of the table jobs by PostgreSQL's own estimate, and when they were vacuumed last."""

    live: int
    dead: int
    vacuumed_at: datetime | None


def dead_rows(conn: Connection) -> Rows | None:
    """Return the estimate for the table jobs; None where statistics know nothing of it."""
    row = _asked(
        conn,
        "SELECT n_live_tup, n_dead_tup, greatest(last_vacuum, last_autovacuum) "
        "FROM pg_catalog.pg_stat_all_tables WHERE schemaname = :schema AND relname = 'jobs'",
        schema=schema_of(conn),
    ).one_or_none()
    return None if row is None else Rows(*row)


def without_autovacuum(conn: Connection) -> list[str]:
    """Return those of our tables for which autovacuum was turned off by an option of the table."""
    rows = _asked(
        conn,
        "SELECT c.relname FROM pg_catalog.pg_class c "
        "JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
        "WHERE n.nspname = :schema AND c.relname = ANY(:names) "
        "AND EXISTS (SELECT 1 FROM pg_options_to_table(c.reloptions) o "
        "WHERE o.option_name = 'autovacuum_enabled' AND NOT o.option_value::boolean) ORDER BY 1",
        schema=schema_of(conn),
        names=_TABLES,
    )
    return list(rows.scalars())


def hears(database: Database, *, seconds: float) -> bool | None:
    """Whether a LISTEN where workers listen hears a NOTIFY from where jobs are enqueued; None where the
    driver cannot tell.

    On a channel of its own, so that no hint to workers is taken for it.
    """
    channel = f"sqlq_doctor_{uuid.uuid4().hex[:16]}"
    with (
        database.for_listening() as ear,
        ear.connect(isolation_level="AUTOCOMMIT") as listening,
        database.connect(isolation_level="AUTOCOMMIT") as calling,
    ):
        driver: Any = listening.connection.driver_connection
        if not callable(getattr(driver, "notifies", None)):
            return None
        try:
            listening.exec_driver_sql(f'LISTEN "{channel}"')
            deadline = time.monotonic() + seconds
            _asked(calling, "SELECT pg_notify(:channel, '')", channel=channel)
            while (left := deadline - time.monotonic()) > 0:
                if any(
                    notified.channel == channel for notified in driver.notifies(timeout=left, stop_after=1)
                ):
                    return True
            return False
        except _dbapi_error(listening):  # the driver's own, since SQLAlchemy is not in between
            return False
        finally:
            listening.invalidate()  # a listening connection must not return to the pool


def _dbapi_error(conn: Connection) -> type[Exception]:
    dbapi: Any = conn.dialect.loaded_dbapi
    error: type[Exception] = dbapi.Error
    return error


# -- SQLite --------------------------------------------------------------------------------------------------


def pragma(conn: Connection, name: str) -> Any:
    """Return the value of a pragma as it is for sqlq's own connections."""
    return conn.exec_driver_sql(f"PRAGMA {name}").scalar()


def database_file(conn: Connection) -> Path | None:
    """Return the file SQLite says it has open."""
    name = conn.exec_driver_sql("SELECT file FROM pragma_database_list WHERE name = 'main'").scalar()
    return Path(name) if name else None


def quick_check(conn: Connection) -> list[str]:
    """Return what `PRAGMA quick_check` finds wrong, at most ten complaints."""
    return [row[0] for row in conn.exec_driver_sql("PRAGMA quick_check(10)") if row[0] != "ok"]


# -- both ----------------------------------------------------------------------------------------------------


class Indexes(NamedTuple):
    """Which of our indexes are not there, and which are there but cannot be used."""

    missing: list[str]
    invalid: list[str]


def indexes(conn: Connection) -> Indexes:
    """Compare the indexes of our tables with what a migration makes."""
    wanted = {str(index.name) for table in metadata.tables.values() for index in table.indexes}
    if conn.dialect.name == "sqlite":
        found = {
            row[0]: True for row in conn.execute(text("SELECT name FROM sqlite_master WHERE type = 'index'"))
        }
    else:
        rows = _asked(
            conn,
            "SELECT c.relname, i.indisvalid FROM pg_catalog.pg_index i "
            "JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid "
            "JOIN pg_catalog.pg_class t ON t.oid = i.indrelid "
            "JOIN pg_catalog.pg_namespace n ON n.oid = t.relnamespace "
            "WHERE n.nspname = :schema AND t.relname = ANY(:names)",
            schema=schema_of(conn),
            names=_TABLES,
        )
        found = {row[0]: bool(row[1]) for row in rows}
    return Indexes(sorted(wanted - found.keys()), sorted(name for name, valid in found.items() if not valid))


class Stuck(NamedTuple):
    """Running jobs whose leases ran out long ago: how many, some ids, and since when the first."""

    number: int
    ids: list[int]
    seconds: float


def stuck(conn: Connection, *, longer_than_ms: int) -> Stuck | None:
    """Return the running jobs whose lease expired longer ago than that, though a rescue should have come
    by."""
    # a row that was reserved by hand need not say until when
    until = func.coalesce(jobs.c.lease_expires_at, jobs.c.reserved_at)  # guard: no-lease-is-one-that-ran-out
    late = until < after(bindparam("ago_ms", type_=BigInteger))
    where = (jobs.c.reserved_at.is_not(None), late)
    count, oldest, moment = conn.execute(
        select(func.count(), func.min(until, type_=until.type), now()).where(*where),
        {"ago_ms": -longer_than_ms},
    ).one()
    if not count:
        return None
    ids = conn.scalars(
        select(jobs.c.id).where(*where).order_by(jobs.c.id).limit(5), {"ago_ms": -longer_than_ms}
    )
    return Stuck(count, list(ids), (moment - oldest).total_seconds())


def unheeded_cancels(conn: Connection, *, longer_than_ms: int) -> list[int]:
    """Return running jobs, at most five, that were to be cancelled longer ago than that."""
    late = jobs.c.cancel_requested_at < after(bindparam("ago_ms", type_=BigInteger))
    query = select(jobs.c.id).where(jobs.c.reserved_at.is_not(None), late).order_by(jobs.c.id).limit(5)
    return list(conn.scalars(query, {"ago_ms": -longer_than_ms}))


class Unknown(NamedTuple):
    """A task that no worker knows, how many of its jobs are being put back, and since when the first one
    is."""

    task: str
    number: int
    seconds: float


PUT_BACK_WITHIN_MS = 3_600_000
"""A job that no worker knows is put back for less than this."""
LOOKED_AT = 1_000
LEVELS_LOOKED_AT = 50


def unknown_tasks(conn: Connection) -> list[Unknown]:
    """Return the tasks whose jobs workers put back because they do not know them, those waiting longest
    first.

    No index has these jobs. They are looked for where they must be while workers keep up: among the first
    that are due, and the first that will be, of each queue and priority.
    """
    firsts: dict[str, tuple[int, datetime]] = {}
    moment = cluster.moment(conn)
    due = jobs.c.available_at <= now()
    soon = jobs.c.available_at <= after(literal(PUT_BACK_WITHIN_MS, BigInteger))
    for level in counts.levels(conn)[:LEVELS_LOOKED_AT]:
        for when in (due, ~due & soon):
            some = (
                select(jobs.c.task, jobs.c.unknown_since)
                .where(jobs.c.queue == level.queue, jobs.c.priority == level.priority)
                .where(jobs.c.reserved_at.is_(None), when)
                .order_by(jobs.c.available_at)
                .limit(LOOKED_AT)
                .subquery()
            )
            since = func.min(some.c.unknown_since, type_=jobs.c.unknown_since.type)
            known = some.c.unknown_since.is_not(None)
            query = select(some.c.task, func.count(), since).where(known).group_by(some.c.task)
            for task, number, first in conn.execute(query):
                before, earliest = firsts.get(task, (0, first))
                firsts[task] = (before + number, min(first, earliest))
    found = [
        Unknown(task, number, (moment - first).total_seconds()) for task, (number, first) in firsts.items()
    ]
    return sorted(found, key=lambda unknown: -unknown.seconds)


_DENIED = re.compile(r"permission denied for (?:schema|relation|table|view) ")
_TAKES_ROLE = re.compile(r"-c\s*role=((?:\\.|\S)+)")
"""As libpq reads options, which escapes spaces."""


def missing_grant(error: BaseException, url: URL | None = None, kind: str | None = None) -> str | None:
    """Return what gives the role in a URL the rights that PostgreSQL denied it; None for any other error.

    That is all that a role of its kind needs: else each command would name one right after the other.
    """
    if not isinstance(error, DBAPIError) or not _DENIED.search(str(error.orig)):
        return None
    if kind == "producer" and "DO UPDATE" in (error.statement or ""):
        kind = "replacing-producer"
    return granting("ROLE" if url is None else role_in(url), url, kind=kind)


def role_in(url: URL) -> str:
    """Return the role that a URL connects as; "ROLE" where neither it nor the environment names one."""
    given = {name: value for name, value in url.query.items() if isinstance(value, str)}
    taken = _TAKES_ROLE.findall(given.get("options", ""))  # guard: a-role-that-is-taken-is-granted
    role = taken[-1].replace("\\ ", " ").replace("\\\\", "\\") if taken else None
    role = role or given.get("user") or url.username or os.environ.get("PGUSER")
    try:
        return role or getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in containers
        return "ROLE"


def refusal(error: BaseException) -> str:
    """Say in a few words why a question was not answered."""
    said = str(error.orig if isinstance(error, DBAPIError) else error).strip()
    return (said or type(error).__name__).splitlines()[0]


_TABLES: Sequence[str] = [table.name for table in metadata.tables.values()]
