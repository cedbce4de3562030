"""Regressions of cost: rules that are read anew for each row, needless statements, and whole lines that an
admission reads.

The tests count, and do not measure time.
"""

from __future__ import annotations

import json
import re
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import Engine, event, text

import sqlq
from sqlq.database import dialects
from sqlq.database.dialect import Dialect
from sqlq.model.checks import Rule
from sqlq.model.outcome import Finished, Settlement
from sqlq.store.jobs import settle
from sqlq.store.limits import admit
from sqlq.store.limits.grant import Grant, pick
from sqlq.store.workers import workers
from sqlq.worker.claim.claimer import Claimer
from sqlq.worker.options import WorkerOptions
from tests.kit import count, insert_many, needs, received
from tests.kit.plans import explained, pages, scans, walk

pytestmark = pytest.mark.each_database

HOT = ("jobs", "finished_jobs", "failed_jobs")


@contextmanager
def statements(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Collect what this process sends, past SQLAlchemy and through it, without what begins and ends
    transactions, and without what other threads send."""
    found: list[str] = []
    thread = threading.current_thread()

    def note(statement: str) -> None:
        if threading.current_thread() is thread and not re.match("BEGIN|COMMIT|ROLLBACK", statement):
            found.append(" ".join(statement.split()))

    def executing(conn: Any, cursor: Any, statement: str, *rest: Any) -> None:
        note(statement)

    def counting(dialect: Dialect) -> Any:
        run = dialect.driver.run

        def counted(driver: Any, statement: str, parameters: Any) -> Any:
            note(statement)
            return run(driver, statement, parameters)

        return counted

    with monkeypatch.context() as patch:
        for dialect in map(dialects.dialect_named, dialects.NAMES):
            patch.setattr(dialect.driver, "run", counting(dialect))
        event.listen(Engine, "before_cursor_execute", executing)
        try:
            yield found
        finally:
            event.remove(Engine, "before_cursor_execute", executing)


@needs("postgresql")
@pytest.mark.parametrize("table", HOT)
def test_no_rule_of_a_hot_table_is_read_for_each_write(app: sqlq.App, engine: Engine, table: str) -> None:
    """PostgreSQL parses the text of a table's CHECK for each statement that writes, and keeps a domain's."""
    assert count(engine, f"pg_constraint WHERE conrelid = '{table}'::regclass AND contype = 'c'") == 0
    assert count(engine, f"pg_trigger WHERE tgrelid = '{table}'::regclass AND NOT tgisinternal") == 0


@needs("file")
def test_the_cheap_form_of_a_rule_refuses_wrong_types(app: sqlq.App, engine: Engine) -> None:
    """`x IS NULL OR typeof(x) = 'integer'` takes half the time of `typeof(x) IN ('integer', 'null')`."""
    with engine.connect() as conn:
        (definition,) = conn.execute(text("SELECT sql FROM sqlite_master WHERE name = 'jobs'")).one()
    assert "IN ('integer', 'null')" not in definition
    raw = sqlite3.connect(engine.url.database or "")
    try:
        for column, value in (
            *(("available_at", value) for value in ("2026-01-01", b"1", 1.5)),
            *(("attempts", value) for value in ("x", 0.5)),
            ("timeout_ms", "soon"),
        ):
            with pytest.raises(sqlite3.IntegrityError):
                raw.execute(f"INSERT INTO jobs (queue, task, {column}) VALUES ('q', 't', ?)", (value,))
        raw.execute("INSERT INTO jobs (queue, task, timeout_ms) VALUES ('q', 't', NULL)")
    finally:
        raw.close()


@pytest.mark.parametrize("number", [1, 100])
def test_an_enqueue_is_one_statement(app: sqlq.App, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    new = [app.task(name="t")(lambda: None).new()] * number
    app.enqueue_many(new)
    with statements(monkeypatch) as sent:
        app.enqueue_many(new)
    assert len(sent) == 1, sent


CLAIMS = {"postgresql": 1, "mariadb": 3}
SETTLES = {"postgresql": 1, "mariadb": 3, "sqlite": 2}


def test_a_lone_job_is_one_claim_and_one_settle(app: sqlq.App, monkeypatch: pytest.MonkeyPatch) -> None:
    """On SQLite a claim and a settle are several in one transaction, as they cost no round trips there.
    MariaDB locks the jobs, looks for another priority and reserves them; it locks, copies and deletes."""
    database, task = app.database, app.task(name="t")(lambda: None)
    app.enqueue(task.new())
    claimer = Claimer(database.for_loops, "me", WorkerOptions(("default",), 10, 30_000))
    claimer.claim(10)  # connects, and knows the queue from now on
    app.enqueue(task.new())
    with statements(monkeypatch) as sent:
        (job,) = claimer.claim(10)
    writes = [statement for statement in sent if re.search("UPDATE [^S]", statement)]
    assert len(writes) == 1, sent
    if not database.dialect.in_a_file:
        assert len(sent) == CLAIMS[database.engine.dialect.name], sent
    settlement = Settlement(job.id, job.lease_token, job.attempts, Finished())
    with database.for_loops.single_statements() as conn, statements(monkeypatch) as sent:
        settle.settle(conn, [settlement])
    assert len(sent) == SETTLES[database.engine.dialect.name], sent


def test_an_idle_poll_is_one_reading_statement(app: sqlq.App, monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle worker looks once a second, and does nothing else but send heartbeats."""
    claimer = Claimer(app.database.for_loops, "me", WorkerOptions(None, 10, 30_000))
    claimer.claim(10)
    with statements(monkeypatch) as sent:
        assert claimer.claim(10, quiet=True) == []
    (look,) = sent
    assert not re.search("UPDATE|INSERT|DELETE", look)


# ── Beside long lines ───────────────────────────────────────────────────────────────────────────────────────

IN_LINE, ADMITTED = 30_000, 20_000
PAGES = 400
NOW = datetime(2026, 1, 1, tzinfo=UTC)
GRANTS = [
    Grant("full", Rule(10), NOW, None, 1_000, NOW),
    Grant("rated", Rule(), NOW, None, 5, NOW),
    Grant("serial", Rule(1, in_order=True, holds=True), NOW, None, 1_000, NOW),
]


def crowd(engine: Engine, rows: int, admitted: int) -> None:
    """Let a line be long, another hold many slots, a third wait in order; nobody analyses the table."""
    postgresql = engine.dialect.name == "postgresql"
    far, now = ("'9998-01-01 00:00+00'", "now()") if postgresql else ("253339228800000", "1")
    with engine.begin() as conn:
        if postgresql:
            conn.execute(text("ALTER TABLE jobs SET (autovacuum_enabled = off)"))
        into = "jobs (task, limit_key, blocked_by, priority, available_at, due_at)"
        for key, number in (("full", rows), ("serial", rows // 10), ("rated", rows // 10)):
            insert_many(conn, number, into, f"'t', '{key}', 'limit', i % 7, {far}, {now}")
        insert_many(conn, admitted, "jobs (task, limit_key, available_at)", f"'t', 'rated', {now}")


@needs("plans")
def test_admissions_and_sweeps_read_no_more_beside_long_waiting_lists(app: sqlq.App, engine: Engine) -> None:
    crowd(engine, IN_LINE, ADMITTED)
    plans: list[dict[str, Any]] = []
    wanted = ["jobs"]

    def explain(conn: Any, cursor: Any, statement: str, given: Any, *_: Any) -> None:
        if wanted[-1] in statement and not statement.startswith("EXPLAIN"):
            plans.append(explained(conn, statement, given))

    claims = app.database.for_claims
    event.listen(claims.engine, "before_cursor_execute", explain)
    for id, queues in (("one", None), ("two", ["default"])):
        with claims.begin() as conn:
            workers.register(conn, id=id, host="here", pid=1, version="0", queues=queues, concurrency=1)
            assert len(list(pick(conn, GRANTS))) == 16
    wanted.append("RECURSIVE each_limit_key")
    with claims.begin() as conn:
        keys, _ = admit.sweep_on(conn, "", 500)
    event.remove(claims.engine, "before_cursor_execute", explain)
    *of_picks, of_sweep = plans
    assert (keys, [plan["Actual Rows"] for plan in of_picks]) == (["full", "rated", "serial"], [0, 15, 1] * 2)
    assert pages(of_sweep) < 60, "it steps from key to key"
    for plan in of_picks:
        assert not scans(plan, "jobs"), json.dumps(plan, indent=1)
        assert pages(plan) < PAGES, json.dumps(plan, indent=1)
        of_jobs = [node for node in walk(plan) if node.get("Relation Name") == "jobs"]
        assert max(node["Actual Rows"] for node in of_jobs) <= 10, json.dumps(of_jobs, indent=1)


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
                whole = [step for step in plan if step.startswith("SCAN jobs") and "INDEX" not in step]
                assert not whole, plan
