"""The statements of an unblock and the sweeps on each database, and their plans beside many waiting steps.

`SQLQ_TEST_WRITE_GOLDEN=1` writes the golden files anew; read the difference before committing it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from psycopg import sql
from sqlalchemy import Engine, text

import sqlq
from sqlq.database.database import Database
from sqlq.model.job import NewJob
from sqlq.model.outcome import Finished, Settlement
from sqlq.store.flows import unblock
from sqlq.store.jobs import settle
from tests.kit import claim_on, needs, received
from tests.kit.plans import explained, pages, scans

pytestmark = pytest.mark.each_database

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
def test_the_database_receives_the_golden_statement(app: sqlq.App, engine: Engine, name: str) -> None:
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
    actual = "".join(f"{statement.strip()};\n\n" for statement, _ in asked(app.database, CALLS[name]))
    if engine.dialect.name == "mariadb":
        actual = actual.replace(str(app.database.schema), "shop")  # as in test_statements.py
    golden = Path(__file__).parent / engine.dialect.name / f"{name}.sql"
    if os.environ.get("SQLQ_TEST_WRITE_GOLDEN"):
        golden.write_text(actual)
    assert actual == golden.read_text(), f"{golden.name} is not what the database receives"


def crowd(engine: Engine) -> list[int]:
    """Let many steps wait for one that has failed; return the ids of that and of one that others wait for."""
    postgresql = engine.dialect.name == "postgresql"
    numbers = "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :rows)"
    far = "'9998-01-01 00:00+00'" if postgresql else "253339228800000"
    carried = (
        "id, queue, task, payload, priority, attempts, available_at, lease_token, unique_until, releases, "
        "created_at, flow_id"
    )
    now = "now()" if postgresql else "1"
    ended = f"'default', 't', '{{}}', 0, 1, {now}, 1, 'finish', 0, {now}, 1"
    with engine.begin() as conn:
        if postgresql:
            for table in ("jobs", "finished_jobs", "failed_jobs", "sqlq_edges"):
                conn.execute(text(f"ALTER TABLE {table} SET (autovacuum_enabled = off)"))
        blocked = f"SELECT 1000 + i, 't', 1, 'flow', {far} FROM n"
        conn.execute(
            text(f"INSERT INTO jobs (id, task, flow_id, blocked_by, available_at) {numbers} {blocked}"),
            {"rows": WAITING},
        )
        conn.execute(
            text(
                f"INSERT INTO sqlq_edges (job_id, depends_on) {numbers} SELECT 1000 + i, 1 FROM n WHERE i > 1"
            ),
            {"rows": WAITING},
        )
        conn.execute(text("INSERT INTO sqlq_edges (job_id, depends_on) VALUES (1001, 2)"))
        conn.execute(text(f"INSERT INTO failed_jobs ({carried}, reason) SELECT 1, {ended}, 'error'"))
        conn.execute(
            text(
                f"INSERT INTO finished_jobs ({carried}, outcome) {numbers} SELECT CASE i WHEN 1 THEN 2 ELSE "
                f"-i END, {ended}, 'finished' FROM n"
            ),
            {"rows": WAITING},
        )
    return [1, 2]


@needs("plans")
@pytest.mark.parametrize("of_workers", [True, False])
def test_postgresql_unblocks_by_indexes_beside_tables_without_statistics(
    app: sqlq.App, engine: Engine, of_workers: bool
) -> None:
    database = app.database.for_claims if of_workers else app.database
    crowd(engine)
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
    assert unblock.after(database, [2]).free == 1


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
    crowd(engine)
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
    crowd(engine)
    with engine.connect() as conn:
        statements = [each for call in CALLS.values() for each in asked(app.database, call)]
        assert len(statements) >= len(CALLS)
        for statement, parameters in statements:
            plan = [row[3] for row in conn.exec_driver_sql("EXPLAIN QUERY PLAN " + statement, parameters)]
            whole = [step for step in plan if step.startswith("SCAN") and "INDEX" not in step]
            tables = ("ended", "step", "each", "held")
            assert not [step for step in whole if step.split()[1] not in tables], "\n".join(plan)
