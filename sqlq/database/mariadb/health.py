"""Queries of `sqlq doctor` for MariaDB: settings, sessions and tables. They read only.

Each function is one query, so that an account without the right to one of them still gets the others.
"""

from __future__ import annotations

import re
from typing import Any

from sqlalchemy import URL, Connection, bindparam, text
from sqlalchemy.exc import DBAPIError

from sqlq.config.command_hint import OWNER
from sqlq.database.schemas import schema_of
from sqlq.database.values import Burden, Session, TableSize
from sqlq.schema.tables import INDEXES, LARGEST_TOKEN, TABLE_NAMES

OWN_INDEXES = INDEXES - {"jobs_admitted", "finished_jobs_expire", "failed_jobs_expire"} | {"jobs_live_key"}
"""Another index has the rows of those that are missing, too."""
COLLATION = "utf8mb4_nopad_bin"
LAST_ID = "a row of jobs had an id near the largest one, and ids continue behind it, if there is one left"
LOWER_IDS = f"DELETE FROM jobs WHERE id > {LARGEST_TOKEN}, then ALTER TABLE jobs AUTO_INCREMENT = 1"


def setting(conn: Connection, name: str) -> Any:
    """Return a variable of the server."""
    return conn.exec_driver_sql(f"SELECT @@global.{name}").scalar()


def status(conn: Connection, name: str) -> int:
    """Return a counter of the server."""
    return int(conn.exec_driver_sql(f"SHOW GLOBAL STATUS LIKE '{name}'").one()[1])


def unfit(conn: Connection) -> str | None:
    return None


def unpurged_transactions(conn: Connection) -> int:
    return status(conn, "Innodb_history_list_length")


def old_transactions(conn: Connection, *, older_than_s: float = 0) -> list[Session]:
    """Return the oldest open transactions of the server, the oldest first."""
    # the server writes their start in its own time zone, whatever the session's
    query = text(
        "SET STATEMENT time_zone = 'SYSTEM' FOR "
        "SELECT t.trx_mysql_thread_id, CONCAT(p.user, '@', p.host), p.command, "
        "TIMESTAMPDIFF(SECOND, t.trx_started, NOW()) AS seconds, "
        "LEFT(COALESCE(t.trx_query, ''), 1000) "
        "FROM information_schema.innodb_trx t "
        "JOIN information_schema.processlist p ON p.id = t.trx_mysql_thread_id "
        "WHERE p.id <> CONNECTION_ID() AND t.trx_started <= NOW() - INTERVAL :seconds SECOND "
        "ORDER BY t.trx_started LIMIT 5"
    )
    return [
        Session(number, program, state, float(seconds), query)
        for number, program, state, seconds, query in conn.execute(query, {"seconds": older_than_s})
    ]


def burden(conn: Connection) -> Burden:
    try:
        oldest = old_transactions(conn)
    except DBAPIError as error:
        if not _denied(error):
            raise
        return Burden(unpurged_transactions=unpurged_transactions(conn))
    return Burden(
        oldest_transaction_seconds=oldest[0].seconds if oldest else 0.0,
        unpurged_transactions=unpurged_transactions(conn),
    )


def connections(conn: Connection) -> tuple[int, int]:
    """Return the number of connections, and their limit."""
    return status(conn, "Threads_connected"), setting(conn, "max_connections")


def size(conn: Connection) -> int:
    """Return the bytes of the whole database, with the tables of others."""
    query = text(
        "SELECT COALESCE(SUM(data_length + index_length), 0) FROM information_schema.tables "
        "WHERE table_schema = :schema"
    )
    return int(conn.execute(query, {"schema": schema_of(conn)}).scalar_one())


def tables(conn: Connection) -> list[TableSize]:
    rows = _of_tables(
        conn,
        "SELECT table_name, table_rows, NULL, data_length, index_length FROM information_schema.tables "
        "WHERE table_schema = :schema AND table_name IN :names ORDER BY data_length DESC",
    )
    return [TableSize(*row) for row in rows]


def other_engines(conn: Connection) -> list[tuple[str, str]]:
    """Return those of our tables that are not InnoDB's, and their engines."""
    return _of_tables(
        conn,
        "SELECT table_name, engine FROM information_schema.tables WHERE table_schema = :schema "
        "AND table_name IN :names AND engine <> 'InnoDB' ORDER BY 1",
    )


def other_collations(conn: Connection) -> list[tuple[str, str]]:
    """Return those of our tables with text in another collation, and that."""
    return _of_tables(
        conn,
        "SELECT table_name, MIN(collation_name) FROM information_schema.columns "
        "WHERE table_schema = :schema AND table_name IN :names "
        f"AND collation_name <> '{COLLATION}' GROUP BY table_name ORDER BY 1",
    )


def indexes(conn: Connection) -> dict[str, bool]:
    rows = _of_tables(
        conn,
        "SELECT DISTINCT index_name, ignored FROM information_schema.statistics "
        "WHERE table_schema = :schema AND table_name IN :names",
    )
    return {name: ignored == "NO" for name, ignored in rows}


def last_id(conn: Connection) -> int | None:
    query = text(
        "SELECT auto_increment FROM information_schema.tables "
        "WHERE table_schema = :schema AND table_name = 'jobs'"
    )
    upcoming = conn.scalar(query, {"schema": schema_of(conn)})
    return None if upcoming is None else int(upcoming) - 1


def _of_tables(conn: Connection, question: str) -> list[Any]:
    query = text(question).bindparams(bindparam("names", TABLE_NAMES, expanding=True))
    return [tuple(row) for row in conn.execute(query, {"schema": schema_of(conn)})]


def missing_grant(error: BaseException, url: URL | None, kind: str | None) -> str | None:
    """Return the advice for an account that lacks rights; None for any other error."""
    denied = _denied(error)
    if not denied:
        return None
    if denied["account"] is None:
        return "GRANT PROCESS ON *.* to the account in the URL"
    rights = {"reader": "SELECT", OWNER: "ALL"}.get(kind or "", "SELECT, INSERT, UPDATE, DELETE")
    return f"an administrator mends it: GRANT {rights} on all tables of the database TO {denied['account']}"


_DENIED = re.compile(r"command denied to user (?P<account>'[^']*'@'[^']*')|the PROCESS privilege")


def _denied(error: BaseException) -> re.Match[str] | None:
    return _DENIED.search(str(error.orig)) if isinstance(error, DBAPIError) else None
