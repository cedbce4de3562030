"""The hot statements that each database receives, and their plans.

The golden files hold the statements as the driver gets them. The code that builds them does not show an error
of a template or a parameter. `SQLQ_TEST_WRITE_GOLDEN=1` writes them anew; read the difference before
committing it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest
from psycopg._queries import PostgresQuery
from psycopg.adapt import Transformer
from sqlalchemy import Connection, Engine, text

import sqlq
from sqlq.database.database import Database
from sqlq.store.jobs import insert as inserting
from sqlq.store.jobs import lease
from sqlq.store.workers import workers
from sqlq.worker.claim.claimer import Claimer
from sqlq.worker.options import WorkerOptions
from tests.kit import claim_on, for_each, needs, received
from tests.kit.databases import DATABASES, fresh_database, sqlite_url
from tests.kit.plans import explained, pages, scans, walk
from tests.kit.postgresql import PostgreSQL
from tests.sql.statements import STATEMENTS, claim_two, new

pytestmark = pytest.mark.each_database

SCHEDULED_AT_A_HIGHER_PRIORITY = 20_000
AVAILABLE = 20_000
RUNNING = 200
OLD = 10
HOT = ("jobs", "finished_jobs", "failed_jobs")


@pytest.fixture
def database(app: sqlq.App) -> Database:
    return app.database


@for_each("name", STATEMENTS)
def test_the_database_receives_the_golden_statement(database: Database, name: str) -> None:
    with database.connect() as conn, conn.begin() as transaction:
        inserting.insert(conn, [new(), new()])
        held = [] if name.startswith("claim") else claim_two(conn)
        with received(conn) as got:
            STATEMENTS[name](conn, held)
        transaction.rollback()
        actual = "".join(f"{statement.strip()};\n\n" for statement, _ in got)
    if database.engine.dialect.name == "mariadb":
        actual = actual.replace(str(database.schema), "shop")  # each test's database has a name of its own
    golden = Path(__file__).parent / database.engine.dialect.name / f"{name}.sql"
    if os.environ.get("SQLQ_TEST_WRITE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(actual)
    assert actual == golden.read_text(), (
        f"{golden.name} is not what the database receives: SQLQ_TEST_WRITE_GOLDEN=1 writes it again"
    )


# ── How they are run ────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def crowded_sqlite(migrated_sqlite: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("crowded") / "sqlq.db"
    shutil.copyfile(migrated_sqlite, file)
    crowd(sqlite_url(file))
    assert list(file.parent.iterdir()) == [file]
    return file


@pytest.fixture(scope="module")
def crowded_postgresql(postgresql: PostgreSQL, migrated_postgresql: str) -> Iterator[str]:
    with fresh_database(postgresql, template=migrated_postgresql) as url:
        crowd(url)
        yield url


@pytest.fixture(params=DATABASES)
def crowded(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """A database in which a careless statement would read tens of thousands of rows: a copy of one, which
    takes a second to make."""
    with ExitStack() as stack:
        if request.param == "sqlite":
            url = sqlite_url(tmp_path / "sqlq.db")
            shutil.copyfile(request.getfixturevalue("crowded_sqlite"), tmp_path / "sqlq.db")
        else:
            server, template = map(request.getfixturevalue, ("postgresql", "crowded_postgresql"))
            url = stack.enter_context(fresh_database(server, template=template))
        yield stack.enter_context(closing(sqlq.App(url))).database


def crowd(url: str) -> None:
    with closing(sqlq.App(url)) as app:
        fill(app.database)


def fill(database: Database) -> None:
    with database.begin() as conn:
        prefix = f"{database.schema}." if database.schema else ""
        later, soon = ("now() + interval '1 day'", "now()") if database.schema else ("10000000000000", "1")
        numbers = "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :rows)"
        columns = "(queue, task, payload, priority, available_at)"
        for rows, priority, due in ((SCHEDULED_AT_A_HIGHER_PRIORITY, 5, later), (AVAILABLE, 0, soon)):
            insert = (
                f"INSERT INTO {prefix}jobs {columns} {numbers} SELECT 'mail', 't', '{{}}', {priority}, "
                f"{due} FROM n"
            )
            conn.execute(text(insert), {"rows": rows})
        for queue in ("other", "third"):
            conn.execute(
                text(
                    f"INSERT INTO {prefix}jobs {columns} {numbers} SELECT '{queue}', 't', '{{}}', 0, {due} "
                    "FROM n"
                ),
                {"rows": 2_000},
            )
        carried = (
            "queue, task, payload, priority, attempts, max_attempts, available_at, lease_token, "
            "unique_until, releases, created_at"
        )
        # which of them are old does not depend on how long this takes
        past = "now() - interval '1 day'" if database.schema else "1000"
        source = (
            f"SELECT -id, {carried}, 'finished', CASE WHEN id <= {OLD} THEN {past} ELSE {later} END "
            f"FROM {prefix}jobs WHERE queue = 'mail'"
        )
        conn.execute(
            text(f"INSERT INTO {prefix}finished_jobs (id, {carried}, outcome, finished_at) {source}")
        )
        # and as many with a retention of their own
        for table, column, ending in (("finished", "outcome", "finished"), ("failed", "reason", "error")):
            source = (
                f"SELECT -100000 - id, {carried}, '{ending}', CASE WHEN id <= {OLD} THEN {past} ELSE {later} "
                f"END, 1000 FROM {prefix}jobs WHERE queue = 'mail'"
            )
            columns = f"(id, {carried}, {column}, {table}_at, retention_ms)"
            conn.execute(text(f"INSERT INTO {prefix}{table}_jobs {columns} {source}"))
        claim_on(conn, ["other"], limit=RUNNING, owner="somebody")
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
        # not when autovacuum gets to it: what it has not seen yet is planned, and read, otherwise
        conn.exec_driver_sql("VACUUM (ANALYZE)" if database.schema else "ANALYZE")


BUFFERS = {
    "insert": 40,
    "insert_many": 60,
    "insert_unlike": 60,
    "insert_keyed": 60,
    "insert_replacing": 80,
    "insert_expiring": 40,
    "claim": 120,
    "rescue": 2_000,
    "due_in": 30,
    "due_in_all": 90,
    "look": 300,
    "prune": 200,
    "prune_expired": 200,
}
"""How many pages a statement may touch here; the tables have some thousand. Those not named get 150."""


@pytest.mark.parametrize("crowded", ["postgresql"], indirect=True)
@for_each("name", STATEMENTS)
def test_postgresql_reads_a_bounded_number_of_pages(crowded: Database, name: str) -> None:
    with crowded.connect() as conn, conn.begin() as transaction:
        held = [] if name.startswith("claim") else claim_two(conn)
        with received(conn) as got:
            STATEMENTS[name](conn, held)
        transaction.rollback()
    with crowded.connect() as conn, conn.begin() as transaction:
        if name != "claim":
            claim_two(conn)
        for statement, parameters in got:
            if "SAVEPOINT" in statement:
                continue
            plan = explained(conn, statement, parameters)
            assert not scans(plan, *HOT), json.dumps(plan, indent=1)
            assert pages(plan) <= BUFFERS.get(name, 150), json.dumps(plan, indent=1)
        transaction.rollback()


OTHERS = 5_000
"""The number of jobs that other workers hold."""
OWNED: dict[str, Callable[[Connection], Any]] = {
    "stand_in": lambda conn: workers.stand_in(conn, ["me", "you"], lease_ms=30_000),
    "owned": lambda conn: lease.owned(conn, "me"),
    "cancelled": lambda conn: workers.cancelled(conn, "me"),
}


def hold_many(database: Database) -> None:
    """Have ten workers hold many jobs, and one two of them."""
    with database.begin() as conn:
        for number in range(10):
            claim_on(conn, ["mail"], limit=OTHERS // 10, owner=f"other {number}")
        claim_two(conn)
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
        conn.exec_driver_sql("VACUUM (ANALYZE)" if database.schema else "ANALYZE")


@pytest.mark.parametrize("crowded", ["postgresql"], indirect=True)
def test_a_worker_reads_no_job_that_others_hold(crowded: Database) -> None:
    hold_many(crowded)
    for name, run in OWNED.items():
        with crowded.connect() as conn, conn.begin() as transaction, received(conn) as got:
            run(conn)
            transaction.rollback()
        with crowded.connect() as conn, conn.begin() as transaction:
            for statement, parameters in got:
                plan = explained(conn, statement, parameters)
                of_jobs = [node for node in walk(plan) if node.get("Relation Name") == "jobs"]
                read = [node["Actual Rows"] + node.get("Rows Removed by Filter", 0) for node in of_jobs]
                assert max(read, default=0) <= 2, f"{name}\n{json.dumps(plan, indent=1)}"
                assert pages(plan) <= 60, name
            transaction.rollback()


@pytest.mark.parametrize("crowded", ["sqlite"], indirect=True)
def test_a_worker_finds_its_jobs_by_their_owner_on_sqlite(crowded: Database) -> None:
    hold_many(crowded)
    for name, run in OWNED.items():
        with crowded.connect() as conn, conn.begin() as transaction:
            with received(conn) as got:
                run(conn)
            plans = [
                row[3]
                for statement, parameters in got
                if "reserved_by" in statement
                for row in conn.exec_driver_sql("EXPLAIN QUERY PLAN " + statement, parameters)
            ]
            transaction.rollback()
        assert any("jobs_rescue (reserved_by=?" in step for step in plans), f"{name}\n" + "\n".join(plans)


@pytest.mark.parametrize("crowded", ["postgresql"], indirect=True)
def test_a_heartbeat_changes_no_index(crowded: Database) -> None:
    """Such an update is HOT, where its page has room."""
    hold_many(crowded)
    sql = text(
        "SELECT pg_stat_get_xact_tuples_updated(CAST('jobs' AS regclass)), "
        "pg_stat_get_xact_tuples_hot_updated(CAST('jobs' AS regclass))"
    )
    with crowded.connect() as conn, conn.begin() as transaction:
        before = conn.execute(sql).one()  # of transactions of this session that are not reported yet
        for _ in range(3):
            workers.stand_in(conn, ["me"], lease_ms=30_000)
        after = conn.execute(sql).one()
        transaction.rollback()
    assert after[0] - before[0] == 6
    assert after[1] - before[1] >= 4, "all but those that leave a full page"


@pytest.mark.parametrize("crowded", ["postgresql"], indirect=True)
@for_each("name", STATEMENTS)
def test_a_generic_plan_finds_the_indexes(crowded: Database, name: str) -> None:
    """A plan that is made before the parameters are known; `blocked_by = $1` finds no index of such jobs."""
    with crowded.connect() as conn, conn.begin() as transaction:
        held = [] if name.startswith("claim") else claim_two(conn)
        with received(conn) as got:
            STATEMENTS[name](conn, held)
        transaction.rollback()
    with crowded.connect() as conn:
        driver: Any = conn.connection.driver_connection
        for statement, parameters in got:
            if not statement.startswith(("SELECT", "WITH", "UPDATE", "DELETE")):
                continue  # the types of an INSERT's parameters are not known so
            one = parameters[0] if isinstance(parameters, list) else parameters
            query = PostgresQuery(Transformer.from_context(driver))
            query.convert(statement, one or None)
            explain = b"EXPLAIN (GENERIC_PLAN, FORMAT JSON) " + query.query
            (plan,) = conn.exec_driver_sql(explain.decode().replace("%", "%%")).scalar_one()
            assert not scans(plan["Plan"], *HOT), json.dumps(plan, indent=1)


@pytest.mark.parametrize("crowded", ["sqlite"], indirect=True)
def test_sqlite_uses_an_index(crowded: Database) -> None:
    for name, run in STATEMENTS.items():
        with crowded.connect() as conn, conn.begin() as transaction:
            held = [] if name.startswith("claim") else claim_two(conn)
            with received(conn) as got, suppress(pytest.skip.Exception):
                run(conn, held)
            for statement, parameters in got:
                plan = [row[3] for row in conn.exec_driver_sql("EXPLAIN QUERY PLAN " + statement, parameters)]
                whole = [step for step in plan if step.startswith("SCAN") and step.split()[1] in HOT]
                assert not [step for step in whole if "INDEX" not in step], f"{statement}\n" + "\n".join(plan)
            transaction.rollback()


def test_a_claim_skips_scheduled_jobs_of_a_higher_priority(crowded: Database) -> None:
    with crowded.begin() as conn:
        claimed = claim_on(conn, ["mail"], limit=10)
        assert conn.scalars(text("SELECT priority FROM jobs WHERE reserved_by = 'me'")).all() == [0] * 10
    assert [job.id for job in claimed] == sorted(job.id for job in claimed)


ROWS = 30_000


@needs("plans")
def test_a_claim_planned_on_an_empty_table_is_fast_on_a_full_one(app: sqlq.App, engine: Engine) -> None:
    """It is prepared and planned once. Nothing analyses the table, and its plan has to hold."""
    claims = app.database.for_claims
    claimer = Claimer(app.database, "somebody", WorkerOptions(("default",), 10, 30_000))
    for _ in range(2):
        assert claimer.claim(10) == []
    with engine.begin() as conn:
        conn.execute(text("ALTER TABLE jobs SET (autovacuum_enabled = off)"))
        rows = (
            "SELECT 'default', 't', '{}', 100 * (n % 2), now() + (n % 2) * interval '1 day' FROM "
            "generate_series(1, :rows) AS n"
        )
        conn.execute(
            text(f"INSERT INTO jobs (queue, task, payload, priority, available_at) {rows}"), {"rows": ROWS}
        )
    with claims.connect() as conn, conn.begin() as transaction:
        sql = (
            "SELECT name, custom_plans, generic_plans FROM pg_prepared_statements WHERE statement LIKE :words"
        )
        name, *plans = conn.execute(text(sql), {"words": "%SKIP LOCKED%"}).one()
        assert plans == [0, 2]
        assert conn.scalar(text("SHOW jit")) == "off"
        for limit in (1, 100):
            plan = explained(conn, f"EXECUTE {name} ('{{default}}', {limit}, 'me', 30000, '{{}}')")
            assert plan["Actual Rows"] == limit
            assert pages(plan) < 60 + 25 * limit, json.dumps(plan, indent=1)
        transaction.rollback()
    assert [job.priority for job in claimer.claim(10)] == [0] * 10
