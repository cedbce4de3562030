"""complete(session): the handler's writes and the end of its job are one transaction."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
from sqlalchemy import (
    Column,
    Engine,
    Integer,
    MetaData,
    NullPool,
    Table,
    create_engine,
    event,
    insert,
    select,
    text,
)
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

import sqlq
from sqlq import EnqueueError
from sqlq.database.schemas import in_schema
from sqlq.errors import ConfigurationError
from sqlq.model.outcome import Finished, Settlement
from sqlq.store.jobs import lease, settle
from sqlq.testing import drain
from sqlq.worker.attempt.context import attempt_of
from tests.kit import NOW, claim_on, execute, needs, run_one, wait_until, waiting_for_locks
from tests.kit.postgresql import async_database_url

pytestmark = pytest.mark.each_database

payments = Table("payments", MetaData(), Column("n", Integer))


@pytest.fixture
def shop(engine: Engine) -> Engine:
    if engine.dialect.name == "sqlite":
        sqlq.configure_sqlite(engine, immediate=True)
    payments.create(engine)
    return engine


def paid(engine: Engine) -> list[int]:
    with engine.connect() as conn:
        return sorted(conn.scalars(select(payments.c.n)))


def ways(engine: Engine) -> dict[str, Callable[[], Any]]:
    def session() -> str:
        with Session(engine) as session, session.begin():
            session.execute(insert(payments).values(n=1))
            sqlq.current_job().complete(session, {"paid": 1})
        return "is not stored"

    def connection() -> None:
        with engine.begin() as conn:
            conn.execute(insert(payments).values(n=1))
            sqlq.current_job().complete(conn, {"paid": 1})

    def completing() -> None:
        with sqlq.current_job().completing(engine, {"paid": 1}) as session:
            session.execute(insert(payments).values(n=1))

    def with_a_factory() -> None:
        with sqlq.current_job().completing(sessionmaker(engine), {"paid": 1}) as session:
            session.execute(insert(payments).values(n=1))

    return {way.__name__: way for way in (session, connection, completing, with_a_factory)}


@pytest.mark.parametrize("way", ["session", "connection", "completing", "with_a_factory"])
def test_the_effect_and_the_completion_commit_together(app: sqlq.App, shop: Engine, way: str) -> None:
    done = run_one(app, ways(shop)[way])
    assert (done.state, done.attempts, done.result, paid(shop)) == ("finished", 1, {"paid": 1}, [1])


@pytest.mark.parametrize("convenient", [True, False])
def test_async_handlers_complete_their_jobs(
    app: sqlq.App, shop: Engine, database_url: str, convenient: bool
) -> None:
    async def pay() -> None:
        engine = create_async_engine(async_database_url(database_url))
        if convenient:
            async with sqlq.current_job().acompleting(engine, 1) as session:
                await session.execute(insert(payments).values(n=1))
        else:
            async with AsyncSession(engine) as session, session.begin():
                await session.execute(insert(payments).values(n=1))
                await sqlq.current_job().acomplete(session, 1)
        await engine.dispose()

    done = run_one(app, pay)
    assert (done.state, done.result, paid(shop)) == ("finished", 1, [1])


def test_a_rollback_after_complete_is_a_failed_attempt_with_the_reason(app: sqlq.App, shop: Engine) -> None:
    def pay() -> None:
        with Session(shop) as session:
            session.execute(insert(payments).values(n=sqlq.current_job().attempt))
            sqlq.current_job().complete(session)
            if sqlq.current_job().attempt == 2:
                session.commit()

    done = run_one(app, pay)
    assert (done.state, done.attempts, paid(shop)) == ("finished", 2, [2])
    assert "complete() was called, but its transaction did not commit" in done.errors[0]["message"]


@pytest.mark.parametrize("way", ["complete", "checkpoint", "acomplete", "acheckpoint"])
def test_a_rollback_on_an_unconfigured_sqlite_engine_keeps_nothing(
    app: sqlq.App, database_url: str, way: str
) -> None:
    """Nothing was written before that Python's driver for SQLite would have begun a transaction for."""

    def sync() -> None:
        with Session(create_engine(database_url, poolclass=NullPool)) as session:
            job = sqlq.current_job()
            job.complete(session) if way == "complete" else job.checkpoint(session, 1)

    async def asynchronous() -> None:
        own = create_async_engine(async_database_url(database_url), poolclass=NullPool)
        async with AsyncSession(own) as session:
            job = sqlq.current_job()
            await (job.acomplete(session) if way == "acomplete" else job.acheckpoint(session, 1))

    left = run_one(app, asynchronous if way.startswith("a") else sync, max_attempts=1)
    if way.endswith("complete"):
        assert (left.state, left.attempts) == ("failed", 1)
    else:
        assert (left.state, left.cursor) == ("finished", None)


def test_effects_and_callbacks_commit_together_on_an_unconfigured_engine(
    app: sqlq.App, engine: Engine, database_url: str
) -> None:
    payments.create(engine)
    plain = create_engine(database_url, poolclass=NullPool)

    @app.task(name="receipt")
    def receipt(ended: sqlq.JobOutcome) -> None:
        pass

    @app.task(name="pay", max_attempts=2, backoff="0s")
    def pay() -> None:
        with sqlq.current_job().completing(plain) as session:
            session.execute(insert(payments).values(n=sqlq.current_job().attempt))
            if sqlq.current_job().attempt == 1:
                session.execute(text("INSERT INTO no_such_table VALUES (1)"))

    job = app.enqueue(pay.new().set(on_success=receipt))
    app.worker(drain=True).run()
    assert (app.jobs.get(job.id).state, app.jobs.get(job.id).attempts, paid(engine)) == ("finished", 2, [2])
    assert [found.state for found in app.jobs.list(task="receipt")] == ["finished"]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_job_is_completed_once_in_a_block_that_does_so(
    app: sqlq.App, shop: Engine, database_url: str, is_async: bool
) -> None:
    def pay() -> None:
        with sqlq.current_job().completing(shop) as session:
            session.execute(insert(payments).values(n=1))
            sqlq.current_job().complete(session)

    async def apay() -> None:
        engine = create_async_engine(async_database_url(database_url), poolclass=NullPool)
        async with sqlq.current_job().acompleting(engine) as session:
            await session.execute(insert(payments).values(n=1))
            await sqlq.current_job().acomplete(session)

    done = run_one(app, apay if is_async else pay, max_attempts=1)
    assert (done.state, paid(shop)) == ("failed", [])
    assert "which completes it at its end: leave" in (done.message or "")


def test_a_result_returned_after_a_completion_without_one_is_warned_of(
    app: sqlq.App, shop: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    def handler(result: Any) -> str:
        with sqlq.current_job().completing(shop, result):
            pass
        return "lost"

    task = app.task(name="shop.url")(handler)
    lost, kept = (app.enqueue(task.new(result)).id for result in (None, "kept"))
    drain(app)
    assert [app.jobs.get(id).result for id in (lost, kept)] == [None, "kept"]
    (warning,) = (line for line in caplog.messages if "complete(session, result)" in line)
    assert warning.startswith(f"job {lost}: shop.url returned a result after it was completed without one")


def test_blocks_refuse_asynchronous_sessions_in_a_sentence(app: sqlq.App, shop: Engine) -> None:
    engine = create_async_engine("sqlite+aiosqlite://")
    refused: list[str] = []

    @app.task(name="shop.pay")
    def pay() -> None:
        job = sqlq.current_job()
        for block in cast("Any", (job.completing, job.step("bill").finishing)):
            for sessions in (engine, async_sessionmaker(engine), AsyncSession(engine)):
                with pytest.raises(ConfigurationError) as error, block(sessions):
                    pass
                refused.append(str(error.value))
        with pytest.raises(EnqueueError, match=r"await the call of the same name with an a before it"):
            job.complete(cast("Any", AsyncSession(engine)))

    app.enqueue(pay.new())
    assert drain(app).finished == 1
    said = ["an AsyncEngine", "an async_sessionmaker", "an AsyncSession"]
    asked = "write async with acompleting(…), or afinishing(…) of a step"
    assert refused == [f"this block is given {kind}: {asked}" for kind in said] * 2


def test_an_exception_after_the_commit_changes_nothing(app: sqlq.App, shop: Engine) -> None:
    def pay() -> None:
        with sqlq.current_job().completing(shop) as session:
            session.execute(insert(payments).values(n=1))
        raise ValueError("the reply to COMMIT was lost, say")

    done = run_one(app, pay)
    assert (done.state, done.attempts, done.errors, paid(shop)) == ("finished", 1, [], [1])


def test_an_exception_before_the_commit_rolls_back(app: sqlq.App, shop: Engine) -> None:
    def pay() -> None:
        with Session(shop) as session, session.begin():
            session.execute(insert(payments).values(n=1))
            sqlq.current_job().complete(session)
            raise ValueError("no")

    done = run_one(app, pay, max_attempts=1)
    assert (done.state, done.exception, paid(shop)) == ("failed", "ValueError", [])


def test_a_zombie_cannot_complete(app: sqlq.App, shop: Engine) -> None:
    """The fence of complete() itself: the token has moved on, so its transaction rolls back."""
    seen: list[BaseException] = []

    def pay() -> None:
        job = sqlq.current_job()
        if job.attempt == 1:
            with shop.begin() as conn:
                conn.execute(text("UPDATE jobs SET lease_token = lease_token + 1"))
        try:
            with job.completing(shop) as session:
                session.execute(insert(payments).values(n=job.attempt))
        except sqlq.LeaseLostError as error:
            seen.append(error)
            raise

    job = app.enqueue(app.task(name="t")(pay).new())
    worker = app.worker()
    thread = threading.Thread(target=worker.run)
    thread.start()
    wait_until(lambda: worker._settler.counts.lost, what="the loss noticed")
    worker.stop()
    thread.join(10)
    assert len(seen) == 1
    assert paid(shop) == []
    assert app.jobs.get(job.id).state == "running", "its row is somebody else's business"


def test_a_completed_job_counts_as_completed_if_it_is_pruned_at_once(app: sqlq.App, shop: Engine) -> None:
    def pay() -> None:
        with sqlq.current_job().completing(shop) as session:
            session.execute(insert(payments).values(n=sqlq.current_job().attempt))
        assert app.jobs.prune(finished="0s").finished == 1

    app.enqueue(app.task(name="t")(pay).new())
    counts = app.worker(drain=True).run()
    assert (counts.finished, counts.retried, paid(shop), app.jobs.list()) == (1, 0, [1], [])


@needs("postgresql")
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_stricter_isolation_level_is_refused_in_a_sentence(app: sqlq.App, shop: Engine, level: str) -> None:
    def pay() -> None:
        with shop.connect().execution_options(isolation_level=level) as conn, conn.begin():
            sqlq.current_job().complete(conn)

    done = run_one(app, pay, max_attempts=1)
    assert done.exception == "sqlq.errors.ConfigurationError"
    assert f"at {level}" in done.message
    assert "READ COMMITTED" in done.message


@needs("mariadb")
def test_complete_at_mariadbs_own_level_reads_the_newest_row(app: sqlq.App, shop: Engine) -> None:
    def pay() -> None:
        running = sqlq.current_job()
        with shop.connect() as conn, conn.begin():
            assert conn.scalar(text("SELECT @@tx_isolation")) == "REPEATABLE-READ"
            before = conn.scalar(text("SELECT lease_expires_at FROM jobs"))
            with app.database.begin() as heartbeat:
                right = attempt_of(running).right
                assert list(lease.extend(heartbeat, [right], lease_ms=90_000)) == [right]
                heartbeat.execute(text("UPDATE jobs SET label = 'newest'"))
            assert conn.scalar(text("SELECT lease_expires_at FROM jobs")) == before
            conn.execute(insert(payments).values(n=running.attempt))
            running.progress(1, of=2)
            running.checkpoint(conn, 1)
            running.complete(conn)

    app.enqueue(app.task(name="t")(pay).new())
    counts = app.worker(drain=True).run()
    assert (counts.finished, counts.retried, paid(shop)) == (1, 0, [1])
    assert [job.label for job in app.jobs.list()] == ["newest"]


@needs("mariadb")
def test_an_enqueue_of_the_key_waits_for_an_open_complete(app: sqlq.App, shop: Engine) -> None:
    made: list[sqlq.Job] = []

    def produce() -> None:
        with shop.begin() as conn:
            made.append(app.enqueue(task.new().set(unique_key="k"), session=conn))

    producer = threading.Thread(target=produce)

    def pay() -> None:
        with shop.connect() as conn, conn.begin():

            @event.listens_for(conn, "before_cursor_execute")
            def before(conn: Any, cursor: Any, statement: str, *more: Any) -> None:
                if "finished_jobs" not in statement or producer.ident:
                    return
                producer.start()
                wait_until(lambda: waiting_for_locks(shop), what="the producer waiting")

            sqlq.current_job().complete(conn)

    task = app.task(name="t", max_attempts=1)(pay)
    job = app.enqueue(task.new().set(unique_key="k"))
    counts = app.worker(drain=True, concurrency=1).run()
    producer.join(20)
    assert app.jobs.get(job.id).state == "finished"
    assert (counts.failed, made[0].created, made[0].id > job.id) == (0, True, True)


@needs("mariadb")
def test_a_transaction_that_keeps_to_its_snapshot_is_refused(app: sqlq.App, shop: Engine) -> None:
    def pay() -> None:
        with shop.connect() as conn, conn.begin():
            conn.execute(text("SET SESSION innodb_snapshot_isolation = ON"))
            sqlq.current_job().complete(conn)

    done = run_one(app, pay, max_attempts=1)
    assert done.exception == "sqlq.errors.ConfigurationError"
    assert "at REPEATABLE READ" in done.message


@needs("sessions")
def test_complete_waits_for_a_heartbeat_and_a_heartbeat_skips_it(app: sqlq.App, shop: Engine) -> None:
    job = app.enqueue(app.task(name="t")(lambda: None).new())
    with app.database.begin() as conn:
        (claimed,) = claim_on(conn, limit=1)
    right = (claimed.id, claimed.lease_token)
    done: list[bool] = []

    def complete() -> None:
        with shop.begin() as conn, in_schema(conn, "public"):
            done.append(settle.complete(conn, right, Finished()))

    with app.database.begin() as heartbeat:
        assert list(lease.extend(heartbeat, [right], lease_ms=30_000)) == [right]
        thread = threading.Thread(target=complete)
        thread.start()
        with shop.connect() as look:
            waiting = text(
                "SELECT count(*) FROM pg_stat_activity "
                "WHERE datname = current_database() AND wait_event_type = 'Lock'"
            )
            wait_until(lambda: look.execute(waiting).scalar(), what="complete() waiting for the row")
        assert done == []
    thread.join(10)
    assert done == [True]
    assert app.jobs.get(job.id).state == "finished"

    second = app.enqueue(app.task(name="u")(lambda: None).new())
    with app.database.begin() as conn:
        (claimed,) = claim_on(conn, limit=1)
    with shop.begin() as conn, in_schema(conn, "public"):
        assert settle.complete(conn, (claimed.id, claimed.lease_token), Finished())
        with app.database.begin() as heartbeat:
            assert lease.extend(heartbeat, [(claimed.id, claimed.lease_token)], lease_ms=30_000) == {}
            settlement = Settlement(claimed.id, claimed.lease_token, 1, Finished(None))
            assert settle.settle(heartbeat, [settlement]) == set(), "an open complete() blocks no batch"
    assert app.jobs.get(second.id).state == "finished"


def test_complete_refuses_a_missing_session(app: sqlq.App) -> None:
    def nothing() -> None:
        sqlq.current_job().complete(None)  # type: ignore[arg-type]

    done = run_one(app, nothing, max_attempts=1)
    assert "session is a NoneType" in done.message


def test_a_result_that_is_not_json_is_stored_as_null(app: sqlq.App, shop: Engine) -> None:
    def pay() -> None:
        with sqlq.current_job().completing(shop, result={1, 2}):
            pass

    done = run_one(app, pay)
    assert (done.state, done.result) == ("finished", None)


def test_inline_mode_completes_with_the_session(app: sqlq.App, shop: Engine) -> None:
    from sqlq.testing import inline

    def pay() -> None:
        with sqlq.current_job().completing(shop) as session:
            session.execute(insert(payments).values(n=1))

    task = app.task(name="t")(pay)
    with inline(app) as ran:
        app.enqueue(task.new())
    assert [job.state for job in ran.jobs] == ["finished"]
    assert paid(shop) == [1]


# -- cancellation, seen by the heartbeat ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["thread", "coroutine"])
def test_a_running_job_sees_its_cancel_request_and_ends_cancelled(
    app: sqlq.App, engine: Engine, kind: str
) -> None:
    import asyncio

    began = threading.Event()

    def in_a_thread() -> None:
        job = sqlq.current_job()
        began.set()
        wait_until(job.should_stop, what="the handler being told")
        raise RuntimeError("stopped half-way")

    async def on_the_loop() -> None:
        began.set()
        await asyncio.sleep(60)

    job = app.enqueue(app.task(name="t")(in_a_thread if kind == "thread" else on_the_loop).new())
    worker = app.worker(lease="1s")
    thread = threading.Thread(target=worker.run)
    thread.start()
    assert began.wait(10)
    execute(engine, f"UPDATE jobs SET cancel_requested_at = {NOW[engine.dialect.name]}")
    wait_until(lambda: app.jobs.get(job.id).state == "cancelled", what="the job cancelled")
    worker.stop()
    thread.join(10)
    assert app.jobs.get(job.id).reason == "cancelled on request"


def test_a_waiting_job_with_a_cancel_request_does_not_start(app: sqlq.App, engine: Engine) -> None:
    ran: list[int] = []
    job = app.enqueue(app.task(name="t")(lambda: ran.append(1)).new())
    execute(engine, f"UPDATE jobs SET cancel_requested_at = {NOW[engine.dialect.name]}")
    app.worker(drain=True).run()
    assert (app.jobs.get(job.id).state, ran) == ("cancelled", [])
