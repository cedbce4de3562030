"""A worker whose tables are migrated beneath it goes on, or logs the reason and stops in good order."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest
from sqlalchemy import Engine, text

import sqlq
from sqlq.schema import version
from sqlq.worker.maintain import services
from tests.kit import execute, wait_until

NEWER = "UPDATE sqlq_version SET version_num = '0002'"
TOO_NEW = "UPDATE sqlq_version SET version_num = '0003', oldest_code = '0002'"


class Running:
    """A worker in a thread, and what its `run()` ended with."""

    def __init__(self, app: sqlq.App) -> None:
        self.worker = app.worker()
        self.raised: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.worker.run()
        except BaseException as error:
            self.raised = error

    def ended(self) -> bool:
        return not self._thread.is_alive()

    def stop(self) -> None:
        if not self.ended():
            self.worker.stop()
        self._thread.join(20)


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
    running = Running(app)
    try:
        wait_until(
            lambda: execute(engine, "SELECT count(*) FROM sqlq_workers") == 1, what="the worker being there"
        )
        execute(engine, NEWER)
        wait_until(
            lambda: (
                "at revision 0002, newer than the 0001 of this sqlq, which works with them" in caplog.text
            ),
            what="the line",
        )
        job = app.enqueue(task.new())
        wait_until(lambda: app.jobs.get(job.id).state == "finished", what="a job done after that")
    finally:
        running.stop()
    assert running.raised is None
    assert [r.__dict__["event"] for r in caplog.records].count("schema_newer") == 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda engine: execute(engine, TOO_NEW),
            "at revision 0003, newer than the 0001 this sqlq knows: install the newer sqlq here",
        ),
        (
            lambda engine: execute(engine, "UPDATE sqlq_version SET version_num = '0000'"),
            "older than the 0001 this sqlq needs: run",
        ),
    ],
    ids=["too new", "too old"],
)
def test_a_worker_left_behind_stops_in_good_order(
    app: sqlq.App,
    engine: Engine,
    change: Callable[[Engine], None],
    sentence: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    began, go = threading.Event(), threading.Event()

    @app.task(name="t")
    def slow() -> str:
        began.set()
        go.wait(20)
        return "done all the same"

    job = app.enqueue(slow.new())
    running = Running(app)
    try:
        assert began.wait(10)
        change(engine)
        wait_until(lambda: "stopping:" in caplog.text, what="the worker stopping")
        go.set()
        wait_until(running.ended, timeout=60, what="the worker's end")
    finally:
        go.set()
        running.stop()
    assert isinstance(running.raised, sqlq.errors.SchemaVersionError)
    assert sentence in str(running.raised)
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
        with pytest.raises(sqlq.errors.SchemaVersionError, match="newer than"):
            other.enqueue(task.new(), session=connection)
        assert connection.execute(text("SELECT count(*) FROM jobs")).scalar() == 1, (
            "the caller's transaction is still usable"
        )
    other.close()
