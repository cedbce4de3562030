"""A worker whose tables are migrated beneath it goes on, or logs the reason and stops in good order."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Engine, text

import sqlq
from sqlq.errors import SchemaVersionError
from sqlq.schema import version
from sqlq.worker.maintain import services
from tests.kit import execute, wait_until

NEWER = "UPDATE sqlq_version SET version_num = '0002'"
TOO_NEW = "UPDATE sqlq_version SET version_num = '0003', oldest_code = '0002'"


@pytest.fixture(autouse=True)
def looking_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "HEAD", "0001")
    version.log_newer.cache_clear()  # each test has a database of its own
    monkeypatch.setattr(services, "SCHEMA_SECONDS", 0.02)
    monkeypatch.setattr(services.SchemaWatch, "first_wait", 0.02)


def test_a_newer_revision_is_logged_once(
    app: sqlq.App, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sqlq")
    task = app.task(name="t")(lambda: None)
    said = "at revision 0002, newer than the 0001 of this sqlq, which works with them"
    with app.worker():
        execute(engine, NEWER)
        wait_until(lambda: said in caplog.text, what="the line")
        job = app.enqueue(task.new())
        wait_until(lambda: app.jobs.get(job.id).state == "finished", what="a job done after that")
    assert [r.__dict__["event"] for r in caplog.records].count("schema_newer") == 1


TOO_OLD = "UPDATE sqlq_version SET version_num = '0000'"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (TOO_NEW, "at revision 0003, newer than the 0001 this sqlq knows: install the newer sqlq here"),
        (TOO_OLD, "older than the 0001 this sqlq needs: run"),
    ],
    ids=["too new", "too old"],
)
def test_a_worker_left_behind_stops_in_good_order(
    app: sqlq.App, engine: Engine, change: str, sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    began, go = threading.Event(), threading.Event()

    @app.task(name="t")
    def slow() -> str:
        began.set()
        go.wait(20)
        return "done all the same"

    job = app.enqueue(slow.new())
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(app.worker().run)
        try:
            assert began.wait(10)
            execute(engine, change)
            wait_until(lambda: "stopping:" in caplog.text, timeout=20, what="the worker stopping")
        finally:
            go.set()
        with pytest.raises(SchemaVersionError, match=sentence):
            running.result(60)
    assert [r.__dict__.get("event") for r in caplog.records].count("schema_changed") == 1
    execute(engine, "UPDATE sqlq_version SET version_num = '0001', oldest_code = '0001'")
    assert app.jobs.get(job.id).result == "done all the same"


def test_enqueue_refuses_tables_that_are_too_new(app: sqlq.App, engine: Engine, database_url: str) -> None:
    task = app.task(name="t")(lambda: None)
    execute(engine, NEWER)
    with engine.begin() as connection:
        app.enqueue(task.new(), session=connection)
    execute(engine, TOO_NEW)
    other = sqlq.App(database_url)  # one that has not read the revision yet
    with engine.connect() as connection, connection.begin():
        with pytest.raises(SchemaVersionError, match="newer than"):
            other.enqueue(task.new(), session=connection)
        assert connection.execute(text("SELECT count(*) FROM jobs")).scalar() == 1, (
            "the caller's transaction is still usable"
        )
    other.close()
