"""A role that may only enqueue, or nothing at all, floods tables and channels: jobs and waiters go on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from uuid import uuid4

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, make_url

import sqlq
from sqlq.model.retry import PUT_BACK_NAMES
from sqlq.store.limits import admit
from tests.kit import drain, execute, needs, wait_until
from tests.kit.command import grant

pytestmark = needs("roles")


@pytest.fixture
def role(database_url: str, engine: Engine) -> Iterator[Callable[..., Engine]]:
    """Make a role of a kind by the command, or one without any right, and return its engine."""
    opened: list[Engine] = []

    def make(kind: str | None = None) -> Engine:
        name = f"flood_{uuid4().hex[:12]}"
        execute(engine, f"CREATE ROLE {name} LOGIN PASSWORD '{name}'")
        if kind is not None:
            grant(database_url, name, kind)
        opened.append(create_engine(make_url(database_url).set(username=name, password=name)))
        return opened[-1]

    yield make
    for each in opened:
        each.dispose()
        execute(engine, f"DROP OWNED BY {each.url.username}; DROP ROLE {each.url.username}")


def test_old_wakes_hold_up_no_limit(app: sqlq.App, role: Callable[..., Engine], engine: Engine) -> None:
    """At the next look a job of a limit starts, although its wake is the last of many."""
    app.limit("stripe", running=2)
    charge = app.task(name="charge", limit="stripe")(lambda: None)
    execute(
        role("producer"),
        "INSERT INTO sqlq_wakes (at, limit_key, max_running) "
        f"SELECT '1970-01-01', 'k' || i, 1 FROM generate_series(1, {2 * admit.WAKES_AT_ONCE + 1}) i",
    )
    job = app.enqueue(charge.new())
    assert admit.look(app.database).number == 1
    assert app.jobs.get(job.id).state == "available"
    with engine.connect() as conn:
        (rule,) = conn.exec_driver_sql("SELECT max_running FROM sqlq_limits WHERE limit_key = 'stripe'").all()
    assert rule == (2,)


def test_a_statement_ends_when_its_client_gives_up(app: sqlq.App, engine: Engine) -> None:
    with app.database.for_loops.engine.connect() as conn:
        driver = conn.connection.driver_connection
        assert isinstance(driver, psycopg.Connection)
        driver.pgconn.send_query(b"SELECT pg_sleep(3600)")
        driver.pgconn.flush()
        sleeping = "SELECT count(*) FROM pg_stat_activity WHERE query = 'SELECT pg_sleep(3600)'"

        def number() -> int:
            with engine.connect() as other:
                return int(other.exec_driver_sql(sleeping).scalar_one())

        wait_until(lambda: number() == 1, what="the statement running")
        conn.invalidate()
    wait_until(lambda: number() == 0, what="its end")


def test_many_rows_of_unknown_tasks_are_few_lines_of_the_log(
    app: sqlq.App, role: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    execute(
        role("untrusted-producer"),
        "INSERT INTO jobs (task, payload) SELECT 'no.' || i % 60, '{}' FROM generate_series(1, 300) i",
    )
    with caplog.at_level(logging.INFO, "sqlq"):
        assert drain(app).released >= 300  # of a slow drain some are due again
    lines = [record for record in caplog.records if "no." in record.getMessage()]
    assert len(lines) < 2 * PUT_BACK_NAMES
    assert all(line.levelno == logging.WARNING for line in lines)
