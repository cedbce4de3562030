"""The log names a transaction that holds vacuum back, where it matters."""

from __future__ import annotations

import logging

import pytest
from sqlalchemy import Engine, text

import sqlq
from sqlq.database.postgresql import health
from sqlq.worker.maintain import services
from sqlq.worker.maintain.services import Vacuum
from tests.waiting import wait_until

postgresql = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)


@postgresql
def test_an_old_transaction_before_many_dead_rows_is_named(
    app: sqlq.App, engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(services, "OLD_SECONDS", 0.0)
    monkeypatch.setattr(services, "DEAD_ROWS", 10)
    app.enqueue_many([app.task(name="t")(lambda: None).new()] * 50)
    ended = [10, 2_000, 4_000]
    watch = Vacuum(app.database, lambda: ended.pop(0))

    def dead() -> int:
        with app.database.read() as conn:
            rows = health.dead_rows(conn)
        return rows.dead if rows else 0

    with engine.connect().execution_options(isolation_level="REPEATABLE READ") as old:
        old.execute(text("SELECT set_config('application_name', 'old-report', false)"))
        old.execute(text("SELECT count(*) FROM jobs"))
        with engine.begin() as conn:
            conn.execute(text("DELETE FROM jobs"))
            conn.execute(text("SELECT pg_stat_force_next_flush()"))
        wait_until(lambda: dead() > 10, what="the statistics")
        with caplog.at_level(logging.WARNING, "sqlq.worker"):
            watch.run()
            assert caplog.records == [], "too few jobs to matter"
            watch.run()
            watch.run()
    (record,) = caplog.records
    assert "old-report" in record.message
    assert "dead rows" in record.message


@postgresql
def test_vacuum_logs_nothing_without_an_old_transaction(
    app: sqlq.App, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "sqlq.worker"):
        Vacuum(app.database, lambda: 2_000).run()
    assert caplog.records == []
