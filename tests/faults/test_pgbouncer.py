"""Everything works through PgBouncer in transaction mode, with a pool of two, and without a single error."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import NullPool, create_engine, text
from sqlalchemy.orm import Session

from tests.faults.account import record
from tests.kit import needs, wait_until
from tests.kit.pgbouncer import PgBouncer, pgbouncer
from tests.kit.scenario import Scenario, readable_log

pytestmark = [pytest.mark.debian, needs("postgresql", empty=True)]


@pytest.fixture
def pooler(empty_database_url: str) -> Iterator[PgBouncer]:
    with pgbouncer(empty_database_url) as pooler:
        yield pooler


@pytest.fixture
def load(tmp_path: Path, pooler: PgBouncer, empty_database_url: str) -> Iterator[Scenario]:
    """A load on tables that were migrated through the pooler."""
    with Scenario(tmp_path / "work", pooler.url(empty_database_url)) as load:
        load.app.migrate()
        assert load.app.migrate() is not None, "the second time it finds them"
        yield load


def test_migrate_enqueue_and_work_through_a_pool_of_two(
    load: Scenario, pooler: PgBouncer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SQLQ_LISTEN_URL", raising=False)
    shop = create_engine(load.url, connect_args={"prepare_threshold": None})  # a user's
    with ExitStack() as stack:
        workers = [stack.enter_context(load.working("-c", "4")) for _ in range(3)]
        load.start(producers=8)  # more than the pool has connections
        for i in range(50):
            with Session(shop) as session, session.begin():
                load.app.enqueue(load.new("quick", 1_000_000 + i).set(unique_key=f"{i % 5}"), session=session)
        wait_until(lambda: len(load.ran()) >= 500, timeout=60, what="five hundred jobs done")
        load.stop()
        wait_until(lambda: load.count("jobs") == 0, timeout=60, what="no jobs left")
        for worker in workers:
            readable_log(worker, most=10)
            assert "WARNING" not in worker.log.read_text()
            assert worker.log.read_text().count("through a pooler") >= 1
            assert worker.stop() == 0
    shop.dispose()
    assert load.count("failed_jobs") == load.refused == load.ran_again() == 0
    errors = [line for line in pooler.log().splitlines() if re.search(" (ERROR|WARNING|FATAL) ", line)]
    assert not errors, "\n".join(errors)
    with create_engine(load.url, poolclass=NullPool).connect() as conn:
        servers = text("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()")
        assert conn.scalar(servers) in (1, 2)
        listens = text("SELECT count(*) FROM pg_listening_channels()")
        assert conn.scalar(listens) == 0, "LISTEN stayed on a shared session"
    record("PgBouncer, transaction mode, pool of two", lost=0, cases=len(load.ran()))


def test_no_statement_is_prepared_through_a_pooler(load: Scenario) -> None:
    for _ in range(10):
        load.enqueue_next()
    with load.app.database.read() as conn:
        driver: Any = conn.connection.dbapi_connection
        assert driver.prepare_threshold is None
        assert conn.execute(text("SELECT count(*) FROM pg_prepared_statements")).scalar_one() == 0


def test_settings_of_own_sessions_stay_with_them_behind_a_pooler(
    load: Scenario, pooler: PgBouncer, empty_database_url: str
) -> None:
    names = ("client_encoding", "DateStyle", "idle_in_transaction_session_timeout", "statement_timeout")
    question = f"SELECT {', '.join(f'current_setting({name!r})' for name in names)}"
    host = pooler.url(empty_database_url) + "?client_encoding=latin1"
    engine = create_engine(host, poolclass=NullPool)
    for _ in range(4):  # more transactions than the pool has server processes
        with load.app.database.begin() as conn:
            assert tuple(conn.exec_driver_sql(question).one()) == ("UTF8", "ISO, MDY", "20s", "0")
        with engine.connect() as conn:
            assert tuple(conn.exec_driver_sql(question).one()) == ("LATIN1", "ISO, MDY", "0", "0")


@pytest.mark.parametrize("direct", [True, False], ids=["a direct URL", "a URL that leads through the pooler"])
def test_workers_listen_at_the_listen_url(
    load: Scenario, pooler: PgBouncer, empty_database_url: str, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    monkeypatch.setenv("SQLQ_LISTEN_URL", empty_database_url if direct else load.url)
    with load.working() as worker:
        if direct:
            with create_engine(empty_database_url, poolclass=NullPool).connect() as conn:
                name = "current_database() AND query LIKE '%pg_listening_channels%'"
                listening = text(f"SELECT count(*) FROM pg_stat_activity WHERE datname = {name}")
                what = "the worker's session for LISTEN, asked for its sign of life"
                wait_until(lambda: conn.execute(listening).scalar_one() >= 1, timeout=20, what=what)
        load.enqueue_next()
        wait_until(load.ran, timeout=20, what="the job done")
        assert worker.stop() == 0
        log = worker.log.read_text()
    assert "Traceback" not in log
    assert log.count("WARNING") <= 1
    assert "through a pooler, which may not" not in log
