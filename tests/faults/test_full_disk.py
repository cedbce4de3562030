"""A disk that is full: outcomes are kept, and written when there is room.

No job is refused for it, and no attempt is counted twice.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Engine, event, text

import sqlq
from tests.faults import guard
from tests.kit import execute, needs, wait_until, working

RESULT = "x" * 200_000


def triggered(engine: Engine, table: str, body: str, *before: str) -> Iterator[None]:
    """Have each row of a table refused by a trigger."""
    trigger = f"CREATE TRIGGER full_disk BEFORE INSERT ON {table} FOR EACH ROW {body}"
    with engine.begin() as conn:
        for statement in (*before, trigger):
            conn.exec_driver_sql(statement)
    yield
    execute(engine, f"DROP TRIGGER full_disk {f'ON {table}' if before else ''}")


@contextmanager
def full(app: sqlq.App, engine: Engine, table: str) -> Iterator[None]:
    """Have the database answer as for a full disk. On SQLite the file grows no more for all connections here.
    PostgreSQL answers with its SQLSTATE, and MariaDB as where InnoDB cannot extend the table's file."""
    if engine.dialect.name == "postgresql":
        says = "ERRCODE = '53100', MESSAGE = 'could not extend file: No space left on device'"
        function = "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS"
        function += f" $$ BEGIN RAISE EXCEPTION USING {says}; END $$"
        yield from triggered(engine, table, "EXECUTE FUNCTION full_disk()", function)
    elif engine.dialect.name == "mariadb":
        says = f"SET MYSQL_ERRNO = 1114, MESSAGE_TEXT = 'The table {table} is full'"
        yield from triggered(engine, table, f"SIGNAL SQLSTATE 'HY000' {says}")
    else:
        limit = [execute(app.database.engine, "PRAGMA page_count")]

        @event.listens_for(app.database.engine, "checkout")
        def _limited(dbapi_connection: Any, record: Any, proxy: Any) -> None:
            dbapi_connection.execute(f"PRAGMA max_page_count = {limit[0]}").fetchall()

        app.database.close()
        yield
        limit[0] = 1_000_000


def test_outcomes_wait_while_the_disk_is_full(
    app: sqlq.App, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    guard.install(engine)
    caplog.set_level(logging.WARNING)
    go_on = threading.Event()

    @app.task(name="t", max_attempts=1)
    def works() -> str:
        go_on.wait(30)
        return RESULT

    made = app.enqueue_many([works.new() for _ in range(5)])
    with working(app, concurrency=5):
        wait_until(lambda: len(app.jobs.list(state="running")) == 5, what="all running")
        with full(app, engine, "finished_jobs"):
            go_on.set()
            meets = "takes no writes"
            wait_until(lambda: any(meets in each for each in caplog.messages), timeout=20, what="it full")
            states = {app.jobs.get(job.id).state for job in made}
            assert "running" in states <= {"running", "finished"}
        wait_until(lambda: len(app.jobs.list(state="finished")) == 5, what="all written")
    found = [app.jobs.get(job.id) for job in made]
    assert {(job.attempts, job.result, job.reason) for job in found} == {(1, RESULT, None)}
    said = "\n".join(caplog.messages)
    assert said.count("takes no writes") == 1
    assert "the database is back" in said
    assert "refuses" not in said
    assert guard.ILLEGAL not in said
    guard.check(engine)


@needs("one_writer")
@pytest.mark.parametrize("many", [False, True])
def test_a_write_lock_that_is_held_for_long_is_reported_in_one_sentence(
    app: sqlq.App, engine: Engine, monkeypatch: pytest.MonkeyPatch, many: bool
) -> None:
    monkeypatch.setattr("sqlq.database.sqlite.driver.BUSY_TIMEOUT_MS", 20)
    task = app.task(name="t")(lambda: None)
    sqlq.configure_sqlite(engine)
    held = "another program held the write lock for longer than this connection waits"
    with engine.connect() as rival:
        rival.execute(text("DELETE FROM jobs"))
        with pytest.raises(sqlq.EnqueueError, match=held):
            app.enqueue_many([task.new()] * 2) if many else app.enqueue(task.new())
        with engine.connect() as conn, pytest.raises(sqlq.EnqueueError, match=held):
            app.enqueue(task.new(), session=conn)
        rival.rollback()
    app.enqueue(task.new())
    assert len(app.jobs.list()) == 1
