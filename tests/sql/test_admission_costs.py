"""How an admission and its sweep run beside long lines: by indexes, in pages that do not grow with them."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Engine, event, text

import sqlq
from sqlq.model.checks import Rule
from sqlq.store.limits import admit
from sqlq.store.limits.grant import Grant, pick
from sqlq.store.workers import workers
from tests.kit import needs, received
from tests.kit.plans import explained, pages, scans, walk

IN_LINE, ADMITTED = 100_000, 20_000
PAGES = 400
NOW = datetime(2026, 1, 1, tzinfo=UTC)
GRANTS = [
    Grant("full", Rule(10), NOW, None, 1_000),
    Grant("rated", Rule(), NOW, None, 5),
    Grant("serial", Rule(1, in_order=True, holds=True), NOW, None, 1_000),
]


def crowd(engine: Engine, rows: int, admitted: int) -> None:
    """Let a line be long, another hold many slots, a third wait in order; nobody analyses the table."""
    postgresql = engine.dialect.name == "postgresql"
    numbers = "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :rows)"
    far = "'9998-01-01 00:00+00'" if postgresql else "253339228800000"
    now = "now()" if postgresql else "1"
    columns = "task, limit_key, blocked_by, priority, available_at, due_at"
    with engine.begin() as conn:
        if postgresql:
            conn.execute(text("ALTER TABLE jobs SET (autovacuum_enabled = off)"))
        for key, number in (("full", rows), ("serial", rows // 10), ("rated", rows // 10)):
            waits = f"SELECT 't', '{key}', 'limit', i % 7, {far}, {now} FROM n"
            conn.execute(text(f"INSERT INTO jobs ({columns}) {numbers} {waits}"), {"rows": number})
        holds = f"SELECT 't', 'rated', NULL, 0, {now}, NULL FROM n"
        conn.execute(text(f"INSERT INTO jobs ({columns}) {numbers} {holds}"), {"rows": admitted})


@needs("plans")
def test_an_admission_reads_no_more_beside_a_long_waiting_list(app: sqlq.App, engine: Engine) -> None:
    crowd(engine, IN_LINE, ADMITTED)
    plans: list[dict[str, Any]] = []

    def explain(conn: Any, cursor: Any, statement: str, given: Any, *_: Any) -> None:
        if "jobs" in statement and not statement.startswith("EXPLAIN"):
            plans.append(explained(conn, statement, given))

    claims = app.database.for_claims
    event.listen(claims.engine, "before_cursor_execute", explain)
    for id, queues in (("one", None), ("two", ["default"])):
        with claims.begin() as conn:
            workers.register(conn, id=id, host="here", pid=1, version="0", queues=queues, concurrency=1)
            assert len(list(pick(conn, GRANTS))) == 16
    event.remove(claims.engine, "before_cursor_execute", explain)
    assert len(plans) == 6
    for plan in plans:
        assert not scans(plan, "jobs"), json.dumps(plan, indent=1)
        assert pages(plan) < PAGES, json.dumps(plan, indent=1)
        of_jobs = [node for node in walk(plan) if node.get("Relation Name") == "jobs"]
        assert max(node["Actual Rows"] for node in of_jobs) <= 10, json.dumps(of_jobs, indent=1)
    assert [plan["Actual Rows"] for plan in plans] == [0, 15, 1] * 2


@needs("sessions")
def test_a_sweep_steps_from_key_to_key_of_long_waiting_lists(app: sqlq.App, engine: Engine) -> None:
    crowd(engine, IN_LINE, 10)
    touched: list[int] = []

    def look(conn: Any, cursor: Any, statement: str, given: Any, *_: Any) -> None:
        if "RECURSIVE each_limit_key" in statement and not statement.startswith("EXPLAIN"):
            touched.append(pages(explained(conn, statement, given)))

    claims = app.database.for_claims
    event.listen(claims.engine, "before_cursor_execute", look)
    with claims.begin() as conn:
        keys, _ = admit.sweep_on(conn, "", 500)
    event.remove(claims.engine, "before_cursor_execute", look)
    assert keys == ["full", "rated", "serial"]
    assert len(touched) == 1
    assert touched[0] < 60


@needs("file")
def test_sqlite_admits_by_indexes(app: sqlq.App, engine: Engine) -> None:
    crowd(engine, 2_000, 100)
    with app.database.begin() as conn:
        conn.execute(admit._LOCK, {"keys": ["full"]})
        admit._add(conn, {grant.key: Rule(grant.rule.max_running) for grant in GRANTS})
    with received(app.database.engine) as asked, app.database.begin() as conn:
        assert len(list(pick(conn, GRANTS))) == 16
        admit.sweep_on(conn, "", 500)
    with engine.connect() as conn:
        for statement, given in asked:
            if "jobs" in statement:
                plan = [row[3] for row in conn.exec_driver_sql("EXPLAIN QUERY PLAN " + statement, given)]
                assert not [step for step in plan if step.startswith("SCAN jobs") and "INDEX" not in step], (
                    plan
                )
