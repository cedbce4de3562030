"""How MariaDB runs the statements: how many rows each reads and locks, whatever the size of the tables is.

A statement that reads a row locks it, if it locks at all. So a filesort, or the scan of a small table, makes
workers wait for one another, or deadlock.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import pytest
from sqlalchemy import Connection, event, text

import sqlq
from sqlq.database.database import Database
from sqlq.store.jobs import claim
from tests.conftest import fresh_database
from tests.kit import for_each
from tests.mariadb import MariaDB
from tests.sql.test_statements import STATEMENTS, claim_two

pytestmark = pytest.mark.integration

SIZES = (0, 60, 50_000)
HELD_BY_OTHERS = 20
READ, LOCKED = 150, 20
"""The most rows that a statement may read, in tables and in batches, and those that a verb may lock."""
READS_MORE = {"rescue": 200, "sweep_limits": 300, "look": 300, "replay": 3 * SIZES[-1]}
"""A rescue reads each reserved job. A replay by task reads all ended jobs, without a lock."""


@pytest.fixture(scope="module", params=SIZES)
def database(request: pytest.FixtureRequest, mariadb: MariaDB) -> Iterator[Database]:
    """A database with so many jobs in each table, and some that another worker holds."""
    with fresh_database(mariadb) as url, closing(sqlq.App(url)) as app:
        app.migrate()
        fill(app.database, request.param)
        yield app.database


def fill(database: Database, number: int) -> None:
    if not number:
        return
    carried = (
        "id, queue, task, payload, priority, attempts, max_attempts, available_at, lease_token, "
        "unique_until, releases, created_at"
    )
    with database.begin() as conn:
        conn.execute(
            text(
                f"INSERT INTO jobs (queue, task, payload, priority, available_at, unique_key) "
                f"SELECT IF(seq % 3, 'mail', 'other'), 't', '{{}}', seq % 2, "
                f"UTC_TIMESTAMP(6) + INTERVAL IF(seq % 5, -1, 1) HOUR, IF(seq % 7, NULL, seq) "
                f"FROM seq_1_to_{number}"
            )
        )
        for table, column, end in (("finished", "outcome", "completed"), ("failed", "reason", "error")):
            conn.execute(
                text(
                    f"INSERT INTO {table}_jobs ({carried}, {column}, {table}_at) "
                    f"SELECT {carried}, '{end}', UTC_TIMESTAMP(6) + INTERVAL 1 DAY FROM jobs"
                )
            )
            # their ids are those of other jobs
            conn.execute(text(f"UPDATE {table}_jobs SET id = id + 1000000 ORDER BY id DESC"))
        claim.claim(conn, ["other"], limit=HELD_BY_OTHERS, owner="somebody", lease_ms=30_000)
    with database.engine.connect() as conn:
        conn.exec_driver_sql("ANALYZE TABLE jobs, finished_jobs, failed_jobs")


def number(conn: Connection, statement: str) -> int:
    return int(conn.exec_driver_sql(statement).scalar() or 0)


LOCKS = (
    "SELECT trx_rows_locked FROM information_schema.innodb_trx WHERE trx_mysql_thread_id = CONNECTION_ID()"
)


def reads(conn: Connection) -> int:
    rows = conn.execution_options(no_parameters=True).exec_driver_sql(
        "SHOW SESSION STATUS LIKE 'Handler_read%'"
    )
    return sum(int(count) for _, count in rows)


@for_each("name", STATEMENTS)
def test_a_statement_reads_and_locks_a_bounded_number_of_rows(database: Database, name: str) -> None:
    with database.connect() as conn, conn.begin() as transaction:
        held = [] if name.startswith("claim") else claim_two(conn) or two(conn)
        transaction.rollback()
    with database.connect() as conn, conn.begin() as transaction:
        if held:
            claim_two(conn) or two(conn)
        counts: list[tuple[int, str]] = []
        before: list[int] = []

        def begins(*given: Any) -> None:
            before.append(reads(given[0])) if not before and given[2] != STATUS else None

        def ends(*given: Any) -> None:
            if before and given[2] != STATUS:
                counts.append((reads(given[0]) - before.pop(), given[2]))

        event.listen(conn, "before_cursor_execute", begins)
        event.listen(conn, "after_cursor_execute", ends)
        locked = number(conn, LOCKS)
        counts.clear()
        with suppress(pytest.skip.Exception):
            STATEMENTS[name](conn, held)
        event.remove(conn, "before_cursor_execute", begins)
        event.remove(conn, "after_cursor_execute", ends)
        locks = number(conn, LOCKS) - locked
        transaction.rollback()
    assert counts
    for count, statement in counts:
        assert count <= READS_MORE.get(name, READ), f"{count} rows read by {statement}"
    assert locks <= LOCKED, f"{locks} rows locked"


STATUS = "SHOW SESSION STATUS LIKE 'Handler_read%'"


def two(conn: Connection) -> list[Any]:
    conn.execute(text("INSERT INTO jobs (queue, task) VALUES ('mail', 't'), ('mail', 't')"))
    return claim_two(conn)
