"""Guards of one line each that no other test would miss."""

from __future__ import annotations

import logging
import re
import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, NullPool, create_engine, make_url, text
from sqlalchemy.exc import DBAPIError

import sqlq
from sqlq.database.database import Database
from sqlq.database.values import Claimant, ClaimRequest, Execute
from sqlq.model.outcome import Finished, Settlement
from sqlq.store.jobs import lease, settle
from sqlq.store.jobs.lease import LeaseState
from sqlq.worker.claim.claimer import Claimer
from sqlq.worker.options import WorkerOptions
from tests.kit import claim_on, count, needs, wait_until, working
from tests.kit.postgresql import OwnPostgreSQL
from tests.kit.standby import standby_of

pytestmark = pytest.mark.each_database

ASKS_THE_TIME = {
    *("config/durations.py", "cli/commands/health.py", "cli/terminal/logs.py", "app/inline.py"),
    *("app/here.py", "web/pages.py", "store/workers/workers.py", "events.py", "model/history.py"),
    *("model/retry.py", "worker/attempt/attempt.py", "worker/report/meter.py"),
}
"""The modules that read the machine's clock: for errors, log lines, events, metrics, and ages on pages.
A worker writes it, for the doctor to compare.

No module that decides when a job runs is among them.
"""


@needs("one_writer")
def test_a_transaction_of_sqlqs_own_has_the_write_lock_from_its_beginning(
    app: sqlq.App, database_url: str
) -> None:
    """So it never reads first and finds, when it writes, that somebody else has written."""
    with closing(sqlite3.connect(make_url(database_url).database or "", timeout=0)) as rival:
        with app.database.begin(), pytest.raises(sqlite3.OperationalError, match="locked"):
            rival.execute("BEGIN IMMEDIATE")
        with app.database.read():
            rival.execute("BEGIN IMMEDIATE")  # one that only reads keeps nobody waiting


@needs("postgresql")
def test_a_claim_in_a_long_transaction_uses_the_statements_time(app: sqlq.App) -> None:
    task = app.task(name="t")(lambda: None)
    with app.database.begin() as conn:
        conn.execute(text("SELECT 1"))
        app.enqueue(task.new())  # due after this transaction began
        assert claim_on(conn)
        times = "SELECT now(), reserved_at, lease_expires_at FROM jobs"
        began, reserved, expires = conn.execute(text(times)).one()
    assert reserved > began
    assert (expires - reserved).total_seconds() == 30, "a whole lease from the claim"


@needs("postgresql")
def test_a_claim_recovers_after_a_change_of_a_column_type(
    database_url: str, app: sqlq.App, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prepared statement cannot return another type on its connection; on the next connection it can."""
    task = app.task(name="t")(lambda: None)
    app.enqueue_many([task.new(), task.new()])
    callers = create_engine(database_url, pool_size=1, max_overflow=0)
    with closing(Database(callers.url, engine=callers)) as one_connection:
        claimer = Claimer(one_connection, "me", WorkerOptions(("default",), 1, 60_000))
        # the scan cursor has another statement
        monkeypatch.setattr("sqlq.worker.claim.claimer.DEAR_SECONDS", 60.0)
        assert len(claimer.claim(1)) == 1
        with engine.begin() as conn:
            conn.execute(text("DROP VIEW job_states"))  # stands on the column
            conn.execute(text("ALTER TABLE jobs ALTER COLUMN priority TYPE bigint"))
        with pytest.raises(DBAPIError, match="cached plan") as caught:
            claimer.claim(1)
        assert caught.value.connection_invalidated
        assert len(claimer.claim(1)) == 1


def test_a_job_is_enqueued_when_its_notification_cannot_be_sent(
    restartable_postgresql: OwnPostgreSQL,
) -> None:
    """The server's queue of notifications is full: an idle listener in a transaction keeps them there."""
    server = restartable_postgresql
    url = server.create_database()
    engine = create_engine(url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
    with engine.connect() as conn:
        if conn.scalar(text("SELECT count(*) FROM pg_settings WHERE name = 'max_notify_queue_pages'")) == 0:
            pytest.skip("before PostgreSQL 17 there is room for gigabytes")
        conn.execute(text("ALTER SYSTEM SET max_notify_queue_pages = 64"))
    server.restart()
    try:
        with closing(sqlq.App(url)) as app, engine.connect() as listener, engine.connect() as talker:
            app.migrate()
            listener.execute(text("LISTEN talk"))
            listener.execute(text("BEGIN"))
            with pytest.raises(DBAPIError, match="too many notifications"):  # noqa: PT012 - one of them is too many
                for _ in range(100):
                    talker.execute(text("SELECT pg_notify('talk', repeat('.', 7900))"))
            assert app.enqueue(app.task(name="t")(print).new()).created
            assert len(app.jobs.list()) == 1
    finally:
        with engine.connect() as conn:
            conn.execute(text("ALTER SYSTEM RESET max_notify_queue_pages"))
        server.drop_database(url)
        server.restart()


def test_final_states_are_not_read_from_a_standby(restartable_postgresql: OwnPostgreSQL) -> None:
    """It may not have the claim yet, and would show another owner of the job."""
    url = restartable_postgresql.create_database()
    with closing(sqlq.App(url)) as app:
        app.migrate()
    try:
        with (
            standby_of(restartable_postgresql) as standby,
            Database(make_url(standby.url(make_url(url).database or ""))) as database,
            pytest.raises(DBAPIError, match="the server is read-only"),
            database.read() as conn,
        ):
            lease.states_of(conn, [(1, 1)])
    finally:
        restartable_postgresql.drop_database(url)


def test_a_claim_beyond_its_limit_is_rolled_back(app: sqlq.App, monkeypatch: pytest.MonkeyPatch) -> None:
    """Should a plan ever claim more than its limit, the claim is undone instead of hoarding."""
    task = app.task(name="t")(lambda: None)
    app.enqueue_many([task.new() for _ in range(3)])
    honest = app.database.dialect.sql.claim

    def greedy(ask: Execute, wanted: ClaimRequest, by: Claimant) -> Any:
        return honest(ask, wanted._replace(limit=3), by)

    monkeypatch.setattr(app.database.dialect.sql, "claim", greedy)
    refused = pytest.raises(AssertionError, match="claimed 3 jobs instead of at most 2")
    with refused, app.database.begin() as conn:
        claim_on(conn, limit=2)
    assert {job.state for job in app.jobs.list()} == {"available"}


@needs("one_writer")
def test_an_interrupted_claim_keeps_no_lock(
    app: sqlq.App, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where the pool, being made as the caller's is, does not roll back."""
    app.enqueue(app.task(name="t")(lambda: None).new())
    engine = create_engine(database_url, pool_reset_on_return=None)
    with closing(Database(engine.url, engine=engine)) as database:
        claimer = Claimer(database, "me", WorkerOptions(("default",), 1, 60_000))
        with monkeypatch.context() as patched:
            patched.setattr("sqlq.store.jobs.lease.ClaimedJob._make", lambda *_, **__: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                claimer.claim(1)
        assert len(claimer.claim(1)) == 1


def test_a_missing_row_counts_as_settled_if_its_handler_completed_the_job(app: sqlq.App) -> None:
    task = app.task(name="t")(lambda: None)
    app.enqueue(task.new())
    with app.database.begin() as conn:
        (job,) = claim_on(conn)
        right = (job.id, job.lease_token)
        assert settle.settle(conn, [Settlement(*right, 1, Finished())]) == {right}
    app.jobs.prune(finished="0s")
    with app.database.read() as conn:
        assert lease.states_of(conn, [right], completed=[right]) == {right: LeaseState.SETTLED}
        assert lease.states_of(conn, [right]) == {right: LeaseState.LOST}


@needs("postgresql")
@pytest.mark.parametrize("by", ["engine", "url"])
def test_sqlqs_own_transactions_are_read_committed_whatever_the_default(
    engine: Engine, database_url: str, by: str
) -> None:
    with engine.begin() as conn:
        name = make_url(database_url).database
        conn.execute(text(f"ALTER DATABASE \"{name}\" SET default_transaction_isolation = 'repeatable read'"))
    stricter = create_engine(database_url, isolation_level="SERIALIZABLE")
    app = sqlq.App(engine=stricter) if by == "engine" else sqlq.App(database_url)
    for database in (app.database, app.database.for_loops):
        for how in (database.begin, database.read, database.single_statements):
            with how() as conn:
                assert conn.scalar(text("SHOW transaction_isolation")) == "read committed", how
    started: list[str] = []
    task = app.task(name="t")(started.append)
    app.enqueue_many([task.new(queue).set(queue=queue) for queue in "aabb"])
    app.worker(drain=True, concurrency=1).run()
    assert started in (list("abab"), list("baba")), "a claim goes by queues in turn as ever"
    app.close()
    stricter.dispose()


@needs("listen")
def test_no_transaction_is_open_while_a_handler_runs(app: sqlq.App, engine: Engine) -> None:
    """However many run: connections do not grow with the slots."""
    slots = 40
    together = threading.Barrier(slots + 1)  # nobody is the last, so they wait until it is broken
    task = app.task(name="t")(lambda: together.wait(30))
    app.enqueue_many([task.new() for _ in range(slots)])
    app.close()

    def sessions(where: str) -> int:
        mine = "datname = current_database() AND pid <> pg_backend_pid()"
        return count(engine, f"pg_stat_activity WHERE {mine} AND {where}")

    with working(app, concurrency=slots):
        wait_until(lambda: together.n_waiting == slots, timeout=30, what="every slot at work")
        # a heartbeat's may be open for a short time
        wait_until(lambda: sessions("xact_start IS NOT NULL") == 0, what="no transaction being open")
        assert 1 <= sessions("true") <= 8, "claim, settle, heartbeat, maintenance, LISTEN, and the App's own"
        together.abort()


@needs("postgresql")
def test_a_job_that_commits_late_is_found_though_later_ids_are_done(app: sqlq.App, engine: Engine) -> None:
    task = app.task(name="t")(lambda: None)
    with engine.begin() as slow:
        late = app.enqueue(task.new(), session=slow)
        early = app.enqueue(task.new())
        assert early.id > late.id
        assert app.worker(drain=True).run().finished == 1
        assert app.jobs.get(early.id).state == "finished"
    assert app.worker(drain=True).run().finished == 1
    assert app.jobs.get(late.id).state == "finished"


def test_no_argument_appears_in_the_logs(app: sqlq.App, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "sqlq")

    def fails(word: str) -> None:
        raise ValueError("no")

    def snoozes(word: str) -> None:
        raise sqlq.Snooze("1h")

    elsewhere = sqlq.App(app.database.engine.url.render_as_string(hide_password=False))
    unknown = elsewhere.task(name="unknown")(lambda word: None)
    misfit = elsewhere.task(name="misfit")(lambda word, more: None)
    app.task(name="misfit")(lambda word: None)
    handlers: dict[str, Any] = {"ends": len, "fails": fails, "snoozes": snoozes}
    tasks = [app.task(name=name)(handler) for name, handler in handlers.items()]
    app.enqueue_many([task.new("s3cret") for task in tasks])
    elsewhere.enqueue_many([unknown.new("s3cret"), misfit.new("s3cret", more="s3cret")])
    elsewhere.close()
    app.worker(drain=True).run()
    elsewhere.close()
    assert len([record for record in caplog.records if hasattr(record, "job_id")]) >= len(tasks) + 2
    assert "s3cret" not in caplog.text
    assert "s3cret" not in "".join(str(vars(record)) for record in caplog.records)


def test_the_machines_clock_decides_nothing() -> None:
    """The database's clock decides what is due or expired; a monotonic clock measures durations."""
    wall_clock = re.compile(r"\btime\.time\(|datetime\.now\(|utcnow\(|\.today\(")
    package = Path(sqlq.__file__).parent
    assert {
        str(file.relative_to(package))
        for file in package.rglob("*.py")
        if wall_clock.search(file.read_text())
    } == ASKS_THE_TIME
