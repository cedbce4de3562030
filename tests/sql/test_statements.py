"""The hot statements that each database receives, and their plans.

The golden files hold the statements as the driver gets them. The code that builds them does not show an error
of a template or a parameter. `SQLQ_TEST_WRITE_GOLDEN=1` writes them anew; read the difference before
committing it.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest
from psycopg import sql
from psycopg._queries import PostgresQuery
from psycopg.adapt import Transformer
from sqlalchemy import Connection, Engine, text

import sqlq
from sqlq.database.database import Database
from sqlq.model.job import NewJob
from sqlq.model.outcome import Finished, Settlement
from sqlq.store.flows import unblock
from sqlq.store.jobs import insert as inserting
from sqlq.store.jobs import lease, settle
from sqlq.store.workers import workers
from sqlq.worker.claim.claimer import Claimer
from sqlq.worker.options import WorkerOptions
from tests.kit import claim_on, for_each, insert_many, needs, received
from tests.kit.databases import DATABASES, fresh_database, sqlite_url
from tests.kit.plans import explained, pages, scans, walk
from tests.kit.postgresql import PostgreSQL
from tests.sql.statements import STATEMENTS, claim_two, compare_with_golden, end_many, new

pytestmark = pytest.mark.each_database

SCHEDULED_AT_A_HIGHER_PRIORITY = 20_000
AVAILABLE = 20_000
RUNNING = 200
OLD = 10
HOT = ("jobs", "finished_jobs", "failed_jobs")


def sent(database: Database, name: str, new_jobs: int = 0) -> list[tuple[str, Any]]:
    """Return the statements that a verb sends, with their parameters, and undo it with its new jobs."""
    with database.connect() as conn, conn.begin() as transaction:
        inserting.insert(conn, [new()] * new_jobs)
        held = [] if name in OWNED or name.startswith("claim") else claim_two(conn)
        with received(conn) as got:
            OWNED[name](conn) if name in OWNED else STATEMENTS[name](conn, held)
        transaction.rollback()
    return got


@for_each("name", STATEMENTS)
def test_the_database_receives_the_golden_statement(app: sqlq.App, name: str) -> None:
    compare_with_golden(name, app.database, sent(app.database, name, new_jobs=2))


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
    postgresql = not database.dialect.in_a_file
    later, soon = ("now() + interval '1 day'", "now()") if postgresql else ("10000000000000", "1")
    past = "now() - interval '1 day'" if postgresql else "1000"
    with database.begin() as conn:
        into = "jobs (queue, task, payload, priority, available_at)"
        insert_many(conn, SCHEDULED_AT_A_HIGHER_PRIORITY, into, f"'mail', 't', '{{}}', 5, {later}")
        for queue, rows in (("mail", AVAILABLE), ("other", 2_000), ("third", 2_000)):
            insert_many(conn, rows, into, f"'{queue}', 't', '{{}}', 0, {soon}")
        # which of them are old does not depend on how long this takes
        at = f"CASE WHEN id <= {OLD} THEN {past} ELSE {later} END"
        end_many(conn, "finished", "-id", at, where="queue = 'mail'")
        for table in ("finished", "failed"):  # and as many with a retention of their own
            end_many(conn, table, "-100000 - id", at, "1000", "queue = 'mail'")
        claim_on(conn, ["other"], limit=RUNNING, owner="somebody")
    analyze(database)


def analyze(database: Database) -> None:
    """Not when autovacuum gets to it: what it has not seen yet is planned, and read, otherwise."""
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
        conn.exec_driver_sql("ANALYZE" if database.dialect.in_a_file else "VACUUM (ANALYZE)")


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
    got = sent(crowded, name)
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
    "stand_in for two": lambda conn: workers.stand_in(conn, ["me", "you"], lease_ms=30_000),
    "owned": lambda conn: lease.owned(conn, "me"),
    "cancelled": lambda conn: workers.cancelled(conn, "me"),
}


def hold_many(database: Database) -> None:
    """Have ten workers hold many jobs, and one two of them."""
    with database.begin() as conn:
        for number in range(10):
            claim_on(conn, ["mail"], limit=OTHERS // 10, owner=f"other {number}")
        claim_two(conn)
    analyze(database)


@pytest.mark.parametrize("crowded", ["postgresql"], indirect=True)
def test_a_worker_reads_no_job_that_others_hold(crowded: Database) -> None:
    hold_many(crowded)
    for name in OWNED:
        got = sent(crowded, name)
        with crowded.connect() as conn, conn.begin() as transaction:
            for statement, parameters in got:
                plan = explained(conn, statement, parameters)
                of_jobs = [node for node in walk(plan) if node.get("Relation Name") == "jobs"]
                read = [node["Actual Rows"] + node.get("Rows Removed by Filter", 0) for node in of_jobs]
                assert max(read, default=0) <= 2, f"{name}\n{json.dumps(plan, indent=1)}"
                assert pages(plan) <= 60, name
            transaction.rollback()


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
    got = sent(crowded, name)
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
        rows = f"FROM generate_series(1, {ROWS}) AS n"
        rows = f"SELECT 'default', 't', '{{}}', 100 * (n % 2), now() + (n % 2) * interval '1 day' {rows}"
        conn.execute(text(f"INSERT INTO jobs (queue, task, payload, priority, available_at) {rows}"))
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


# ── An unblock and the sweeps ───────────────────────────────────────────────────────────────────────────────


CALLS: dict[str, Callable[[Database], Any]] = {
    "unblock": lambda database: unblock.after(database, [1, 2]),
    "unblock_steps": lambda database: unblock._unblock(database, [3]),
    "waiting_for_recent": lambda database: unblock.sweep_recent(database, 21_000),
}
WAITING = 30_000


def job(task: str = "t") -> NewJob:
    return NewJob(task, "{}", "default", 5)


def asked(database: Database, call: Callable[[Database], Any]) -> list[tuple[str, Any]]:
    """Return the statements that a call sends, with their parameters."""
    with received(database.engine) as got:
        call(database)
    return got


@pytest.mark.parametrize("name", CALLS)
def test_the_database_receives_the_golden_statement_of_an_unblock(app: sqlq.App, name: str) -> None:
    """One of two waiting steps becomes free, and one is cancelled."""
    flow = sqlq.Flow()
    first, second = flow.add(job()), flow.add(job())
    flow.add(job(), after=[first])
    flow.add(job(), after=[second], when="failure")
    app.enqueue(flow)
    with app.database.begin() as conn:
        held = claim_on(conn, limit=9, lease_ms=60_000)
        done = [Settlement(each.id, each.lease_token, 1, Finished()) for each in held]
        assert len(settle.settle(conn, done)) == 2
    compare_with_golden(name, app.database, asked(app.database, CALLS[name]))


def let_steps_wait(engine: Engine) -> None:
    """Let many steps wait for job 1, which has failed, and one for job 2."""
    postgresql = engine.dialect.name == "postgresql"
    far, now = ("'9998-01-01 00:00+00'", "now()") if postgresql else ("253339228800000", "1")
    carried = "id, queue, task, payload, priority, attempts, available_at, lease_token, unique_until"
    carried += ", releases, created_at, flow_id"
    ended = f"'default', 't', '{{}}', 0, 1, {now}, 1, 'finish', 0, {now}, 1"
    with engine.begin() as conn:
        if postgresql:
            for table in ("jobs", "finished_jobs", "failed_jobs", "sqlq_edges"):
                conn.execute(text(f"ALTER TABLE {table} SET (autovacuum_enabled = off)"))
        blocked = "jobs (id, task, flow_id, blocked_by, available_at)"
        insert_many(conn, WAITING, blocked, f"1000 + i, 't', 1, 'flow', {far}")
        edges = "sqlq_edges (job_id, depends_on)"
        insert_many(conn, WAITING, edges, "1000 + i, CASE i WHEN 1 THEN 2 ELSE 1 END")
        insert_many(conn, 1, f"failed_jobs ({carried}, reason)", f"1, {ended}, 'error'")
        finished = f"CASE i WHEN 1 THEN 2 ELSE -i END, {ended}, 'finished'"
        insert_many(conn, WAITING, f"finished_jobs ({carried}, outcome)", finished)


@needs("plans")
def test_postgresql_unblocks_by_indexes_beside_tables_without_statistics(
    app: sqlq.App, engine: Engine
) -> None:
    let_steps_wait(engine)
    for database in (app.database.for_claims, app.database):
        with database.connect() as conn, conn.begin() as transaction:
            with received(conn) as got:
                assert conn.scalars(unblock._WAITING_FOR, {"id": 2}).all() == [1001]
                assert [row.id for row in unblock._judge_on(conn, [2], are_ended=True)] == [1001]
            transaction.rollback()
        with database.connect() as conn, conn.begin() as transaction:
            for statement, parameters in got:
                plan = explained(conn, statement, parameters)
                assert not scans(plan), json.dumps(plan, indent=1)
                assert pages(plan) < 120, json.dumps(plan, indent=1)
            transaction.rollback()
    assert unblock.after(app.database, [2]).free == 1


@needs("plans")
def test_a_statement_planned_on_empty_tables_is_fast_on_full_ones(app: sqlq.App, engine: Engine) -> None:
    """The unblock and the move of ended jobs are prepared and planned once. Nothing analyses the tables."""
    claims = app.database.for_claims

    def move() -> set[Any]:
        with claims.single_statements() as conn:
            return settle.settle(conn, [Settlement(1001, 1, 1, Finished())])

    with received(claims.engine) as sent:
        unblock.after(claims, [2])
        move()
    texts = {statement: parameters for statement, parameters in sent if "SKIP LOCKED" in statement}
    assert len(texts) == 2
    let_steps_wait(engine)
    with claims.connect() as conn, conn.begin() as transaction:
        prepared = conn.exec_driver_sql(
            "SELECT name, statement FROM pg_prepared_statements WHERE statement LIKE '%%SKIP LOCKED%%'"
        ).all()
        assert len(prepared) == 2
        for statement, parameters in texts.items():
            order = dict.fromkeys(re.findall(r"%\((\w+)\)s", statement))
            text_there = statement
            for number, each in enumerate(order, 1):
                text_there = text_there.replace(f"%({each})s", f"${number}")
            (name,) = (row.name for row in prepared if row.statement == text_there)
            values = sql.SQL(", ").join(sql.Literal(parameters[key]) for key in order).as_string()
            plan = explained(conn, f"EXECUTE {name} ({values})".replace("%", "%%"))
            assert pages(plan) < 120, json.dumps(plan, indent=1)
        transaction.rollback()


@needs("file")
def test_sqlite_unblocks_by_indexes(app: sqlq.App, engine: Engine) -> None:
    let_steps_wait(engine)
    with engine.connect() as conn:
        statements = [each for call in CALLS.values() for each in asked(app.database, call)]
        assert len(statements) >= len(CALLS)
        for statement, parameters in statements:
            plan = [row[3] for row in conn.exec_driver_sql("EXPLAIN QUERY PLAN " + statement, parameters)]
            whole = [step for step in plan if step.startswith("SCAN") and "INDEX" not in step]
            tables = ("ended", "step", "each", "held")
            assert not [step for step in whole if step.split()[1] not in tables], "\n".join(plan)
