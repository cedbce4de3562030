"""Regressions of cost: rules that are read anew for each row, and needless statements.

The tests count, and do not measure time.
"""

from __future__ import annotations

import re
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Engine, event, text

import sqlq
from sqlq.database import dialects
from sqlq.database.dialect import Dialect
from sqlq.model.outcome import Finished, Settlement
from sqlq.store.jobs import settle
from sqlq.worker.claim.claimer import Claimer
from sqlq.worker.options import WorkerOptions
from tests.kit import needs

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
def test_no_rule_of_a_hot_table_is_read_anew_for_each_statement(
    app: sqlq.App, engine: Engine, table: str
) -> None:
    """PostgreSQL parses the text of a table's CHECK for each statement that writes, and keeps a domain's."""
    with engine.connect() as conn:
        of_table = {"table": table}
        checks = text(
            "SELECT conname FROM pg_constraint WHERE conrelid = CAST(:table AS regclass) AND contype = 'c'"
        )
        assert conn.scalars(checks, of_table).all() == []
        triggers = text(
            "SELECT tgname FROM pg_trigger WHERE tgrelid = CAST(:table AS regclass) AND NOT tgisinternal"
        )
        assert conn.scalars(triggers, of_table).all() == []


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
def test_jobs_are_enqueued_by_one_statement(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    new = [app.task(name="t")(lambda: None).new()] * number
    app.enqueue_many(new)
    with statements(monkeypatch) as sent:
        app.enqueue_many(new)
    assert len(sent) == 1, sent


CLAIMS = {"postgresql": 1, "mariadb": 3}
SETTLES = {"postgresql": 1, "mariadb": 3, "sqlite": 2}


def test_a_lone_job_takes_one_claim_and_one_settle_statement(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_an_idle_poll_is_one_statement_that_writes_nothing(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle worker looks once a second, and does nothing else but send heartbeats."""
    claimer = Claimer(app.database.for_loops, "me", WorkerOptions(None, 10, 30_000))
    claimer.claim(10)
    with statements(monkeypatch) as sent:
        assert claimer.claim(10, quiet=True) == []
    (look,) = sent
    assert not re.search("UPDATE|INSERT|DELETE", look)
