"""A job in slices: what each slice writes and how far the job has come are one transaction."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Column, Engine, Integer, MetaData, Table, create_engine, insert, select, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import sqlq
from sqlq.config.constants import CURSOR_BYTES, MAX_RELEASES
from sqlq.model.outcome import ErrorText, Failed, Released, Retried, Settlement
from sqlq.store.jobs import lease, settle
from sqlq.testing import inline
from sqlq.worker.attempt.attempt import Attempt, Target
from sqlq.worker.attempt.context import JobContext, attempt_of
from tests.kit import NOW, claim, execute, needs, run_one, wait_until, working
from tests.kit.drivers import Caller, Mode, automatic, common_modes
from tests.kit.postgresql import async_database_url

SLICES = 4
given = Table("given", MetaData(), Column("n", Integer))


@pytest.fixture
def shop(engine: Engine) -> Engine:
    if engine.dialect.name == "sqlite":
        sqlq.configure_sqlite(engine, immediate=True)
    given.create(engine)
    return engine


def done_by(engine: Engine) -> list[int]:
    with engine.connect() as conn:
        return sorted(conn.scalars(select(given.c.n)))


@asynccontextmanager
async def disposed(engine: AsyncEngine) -> AsyncIterator[AsyncEngine]:
    try:
        yield engine
    finally:
        await engine.dispose()


def set_row(engine: Engine, changes: str) -> None:
    execute(engine, f"UPDATE jobs SET {changes}")


def cursor_in(engine: Engine) -> str:
    """Return the column's name as it is written in SQL: on MariaDB it is a reserved word."""
    return "`cursor`" if engine.dialect.name == "mariadb" else "cursor"


def held(app: sqlq.App, *, cursor: str | None = None) -> sqlq.JobContext:
    """A job as its handler sees it."""
    app.enqueue(app.task(name="held")(lambda: None).new())
    (claimed,) = claim(app)
    attempt = Attempt(claimed, None, float("inf"), Target(lambda: app.database, schema=app.database.schema))
    return JobContext(attempt)


# -- each slice once -----------------------------------------------------------------------------------------

KINDS: dict[str, Callable[[Engine], Any]] = {
    "session": Session,
    "scoped_session": lambda engine: scoped_session(sessionmaker(engine)),
    "connection": lambda engine: engine.connect(),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dies", ["before the commit", "after the commit"])
def test_the_next_attempt_goes_on_where_the_last_one_committed(
    app: sqlq.App, shop: Engine, kind: str, dies: str
) -> None:
    """Each attempt gets one slice further, and each slice is written once."""
    began: list[Any] = []

    def give() -> None:
        job = sqlq.current_job()
        began.append(job.cursor)
        for n in range(job.cursor or 0, SLICES):
            session = KINDS[kind](shop)
            session.execute(insert(given).values(n=n))
            job.checkpoint(session, n + 1)
            assert job.cursor == n + 1
            if n == job.attempt - 1 and dies == "before the commit":
                session.close() if kind != "scoped_session" else session.remove()
                raise RuntimeError("no")
            session.commit()
            session.close()
            if n == job.attempt - 1:
                raise RuntimeError("no")

    done = run_one(app, give, max_attempts=10)
    assert done.state == "finished"
    assert done_by(shop) == list(range(SLICES))
    expected = [None, None, 1, 2, 3] if dies == "before the commit" else [None, 1, 2, 3, 4]
    assert began == expected[: done.attempts]
    assert done.cursor == SLICES, "kept, for those who look"


@pytest.mark.parametrize("kind", [AsyncSession, AsyncConnection])
def test_async_handlers_continue_at_their_checkpoint(
    app: sqlq.App, shop: Engine, database_url: str, kind: type[Any]
) -> None:
    async def give() -> None:
        job = sqlq.current_job()
        async with disposed(create_async_engine(async_database_url(database_url))) as engine:
            for n in range(job.cursor or 0, SLICES):
                async with AsyncSession(engine) if kind is AsyncSession else engine.connect() as session:
                    await session.execute(insert(given).values(n=n))
                    await job.acheckpoint(session, n + 1)
                    await session.commit()
                if job.attempt == 1:
                    raise RuntimeError("no")

    done = run_one(app, give)
    assert (done.state, done.attempts, done_by(shop)) == ("finished", 2, list(range(SLICES)))


def checkpoint_by(caller: Caller, running: sqlq.JobContext, cursor: Any) -> None:
    if caller.mode.is_async:
        caller.do(running.acheckpoint(caller.connection, cursor))
    else:
        running.checkpoint(caller.connection, cursor)


@common_modes
def test_checkpoints_on_drivers_connections_continue(
    app: sqlq.App, shop: Engine, database_url: str, mode: Mode
) -> None:
    def give() -> None:
        job = sqlq.current_job()
        with Caller(database_url, mode) as caller:
            for n in range(job.cursor or 0, SLICES):
                caller.begin()
                caller.execute(f"INSERT INTO given (n) VALUES ({n})")
                checkpoint_by(caller, job, n + 1)
                if n == 1 and job.attempt == 1:
                    caller.rollback()
                    raise RuntimeError("no")
                caller.commit()

    done = run_one(app, give)
    assert (done.state, done.attempts, done_by(shop)) == ("finished", 2, list(range(SLICES)))


@automatic
def test_a_checkpoint_without_a_transaction_is_refused(
    app: sqlq.App, shop: Engine, database_url: str, mode: Mode
) -> None:
    def give() -> None:
        with Caller(database_url, mode) as caller:
            checkpoint_by(caller, sqlq.current_job(), 1)

    done = run_one(app, give, max_attempts=1)
    assert (done.state, done.cursor) == ("failed", None)
    assert "its driver begins none, so that this would be committed at once, and alone" in done.message


def test_an_isolated_job_continues_at_its_checkpoint(
    app: sqlq.App, shop: Engine, database_url: str, tmp_path: Path
) -> None:
    from tests.kit.processes import worker_process

    (tmp_path / "alone.py").write_text(
        f"""
import os, signal
import sqlq
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session
app = sqlq.App()
engine = create_engine({database_url!r})
if engine.dialect.name == "sqlite":
    sqlq.configure_sqlite(engine, immediate=True)

@app.task(isolate=True, max_attempts=3)
def give() -> None:
    job = sqlq.current_job()
    for n in range(job.cursor or 0, {SLICES}):
        with Session(engine) as session, session.begin():
            session.execute(text("INSERT INTO given (n) VALUES (:n)"), {{"n": n}})
            job.checkpoint(session, n + 1)
        if n == 1:
            os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    job = app.enqueue(app.named("alone.give").new())
    with worker_process(tmp_path, "alone:app", database_url):
        wait_until(lambda: app.jobs.get(job.id).state == "finished", what="the job finished")
    assert (app.jobs.get(job.id).attempts, done_by(shop)) == (2, list(range(SLICES)))


# -- what does not fit ---------------------------------------------------------------------------------------


def test_a_zombie_saves_nothing(app: sqlq.App, shop: Engine) -> None:
    """The fence of a checkpoint: the token has moved on, so its transaction rolls back."""
    running = held(app)
    set_row(shop, "lease_token = lease_token + 1")
    with Session(shop) as session:
        session.execute(insert(given).values(n=1))
        with pytest.raises(sqlq.LeaseLostError, match="belongs to another owner"):
            running.checkpoint(session, 1)
    assert (done_by(shop), app.jobs.get(running.id).cursor, running.cursor) == ([], None, None)


def test_a_checkpoint_after_a_rolled_back_one_is_refused(app: sqlq.App, shop: Engine) -> None:
    """A handler that swallows what undid a slice, and goes on with the next, is stopped before it leaves one
    out."""

    def give() -> None:
        job = sqlq.current_job()
        for n in range(job.cursor or 0, SLICES):
            with Session(shop) as session:
                session.execute(insert(given).values(n=n))
                job.checkpoint(session, n + 1)
                if n == 2 and job.attempt == 1:
                    session.rollback()
                else:
                    session.commit()

    done = run_one(app, give)
    assert (done.state, done.attempts, done_by(shop)) == ("finished", 2, list(range(SLICES)))
    assert done.errors[0]["exception"] == "sqlq.errors.ExecutionError"
    assert "an earlier checkpoint of job" in done.errors[0]["message"]


def test_the_last_checkpoint_of_a_transaction_counts(app: sqlq.App, shop: Engine) -> None:
    running = held(app)
    with Session(shop) as session, session.begin():
        running.checkpoint(session, 1)
        running.checkpoint(session, {"after": [2]})
    assert app.jobs.get(running.id).cursor == {"after": [2]}
    with Session(shop) as session, session.begin():
        running.checkpoint(session, None)
    assert app.jobs.get(running.id).cursor is None


def test_the_last_slice_and_the_end_may_be_one_transaction(app: sqlq.App, shop: Engine) -> None:
    def give() -> None:
        with Session(shop) as session, session.begin():
            sqlq.current_job().checkpoint(session, "end")
            sqlq.current_job().complete(session, "result")

    done = run_one(app, give)
    assert (done.state, done.result, done.cursor) == ("finished", "result", "end")


def test_a_checkpoint_after_the_end_is_refused(app: sqlq.App, shop: Engine) -> None:
    seen: list[str] = []

    def give() -> None:
        job = sqlq.current_job()
        with Session(shop) as session, session.begin():
            job.complete(session)
            with pytest.raises(sqlq.errors.ConfigurationError) as refused:
                job.checkpoint(session, 1)
            seen.append(str(refused.value))
            session.execute(insert(given).values(n=1))

    done = run_one(app, give)
    assert (done.state, done_by(shop)) == ("finished", [1])
    assert "was completed in this attempt: a checkpoint comes before complete()" in seen[0]


@pytest.mark.parametrize(
    ("cursor", "says"),
    [
        (object, "the cursor is <class 'object'>"),
        ({1}, r"the cursor is \{1\} of type set, which is not JSON"),
        ([float("nan")], r"the cursor\[0\] is nan"),
        ({1: 2}, "the cursor has the key 1"),
        ("\0", "holds a NUL"),
        ("x" * CURSOR_BYTES, "the cursor takes 65,538 bytes as JSON, more than the 65,536 allowed"),
        ({"sqlq.steps": {}}, "'sqlq.steps', which is sqlq's own"),
    ],
    ids=("class", "set", "nan", "key", "NUL", "size", "own name"),
)
def test_a_bad_cursor_is_refused_before_anything_is_written(
    app: sqlq.App, shop: Engine, cursor: Any, says: str
) -> None:
    running = held(app)
    with Session(shop) as session, session.begin():
        with pytest.raises(sqlq.errors.ArgumentsError, match=says):
            running.checkpoint(session, cursor)
        session.execute(insert(given).values(n=1))
    assert (done_by(shop), app.jobs.get(running.id).cursor) == ([1], None)


def test_checkpoint_refuses_autocommit_and_wrong_sessions(app: sqlq.App, shop: Engine) -> None:
    running = held(app)
    automatic = create_engine(shop.url, isolation_level="AUTOCOMMIT")
    with automatic.connect() as conn, pytest.raises(sqlq.EnqueueError, match="is in AUTOCOMMIT"):
        running.checkpoint(conn, 1)
    automatic.dispose()
    with pytest.raises(sqlq.EnqueueError, match="session is a NoneType"):
        running.checkpoint(None, 1)  # type: ignore[arg-type]
    with (
        Session(shop) as session,
        pytest.raises(sqlq.EnqueueError, match="use the call of the same name without the a"),
    ):
        asyncio.run(running.acheckpoint(session, 1))  # type: ignore[arg-type]
    assert app.jobs.get(running.id).cursor is None


@needs("postgresql")
def test_a_stricter_isolation_level_is_refused(app: sqlq.App, shop: Engine) -> None:
    running = held(app)
    strict = shop.connect().execution_options(isolation_level="REPEATABLE READ")
    with strict as conn, conn.begin(), pytest.raises(sqlq.errors.ConfigurationError) as refused:
        running.checkpoint(conn, 1)
    assert str(refused.value).startswith("checkpoint() was called in a transaction at REPEATABLE READ")


@needs("sessions")
def test_a_checkpoint_waits_for_a_heartbeat_and_a_heartbeat_skips_it(app: sqlq.App, shop: Engine) -> None:
    running = held(app)
    done: list[bool] = []

    def save() -> None:
        with Session(shop) as session, session.begin():
            running.checkpoint(session, 1)
        done.append(True)

    with app.database.begin() as heartbeat:
        assert list(lease.extend(heartbeat, [attempt_of(running).right], lease_ms=30_000)) == [
            attempt_of(running).right
        ]
        thread = threading.Thread(target=save)
        thread.start()
        with shop.connect() as look:
            waiting = text(
                "SELECT count(*) FROM pg_stat_activity "
                "WHERE datname = current_database() AND wait_event_type = 'Lock'"
            )
            wait_until(lambda: look.execute(waiting).scalar(), what="the checkpoint waiting for the row")
    thread.join(10)
    assert (done, app.jobs.get(running.id).cursor) == ([True], 1)
    with Session(shop) as session, session.begin():
        running.checkpoint(session, 2)
        with app.database.begin() as heartbeat:
            assert lease.extend(heartbeat, [attempt_of(running).right], lease_ms=30_000) == {}
    assert app.jobs.get(running.id).cursor == 2


@pytest.mark.parametrize("written", ["'no JSON'", "'{'", "''"])
def test_a_cursor_that_is_not_json_fails_its_job_alone(app: sqlq.App, engine: Engine, written: str) -> None:
    ran: list[int] = []
    task = app.task(name="t")(lambda: ran.append(1))
    bad = app.enqueue(task.new())
    set_row(engine, f"{cursor_in(engine)} = {written}")
    good = app.enqueue(task.new())
    app.worker(drain=True).run()
    assert (app.jobs.get(bad.id).state, app.jobs.get(bad.id).reason) == ("failed", "bad_payload")
    assert "the cursor is not JSON" in (app.jobs.get(bad.id).error or "")
    assert (app.jobs.get(good.id).state, ran) == ("finished", [1])


# -- it travels ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["retry", "snooze", "rescue", "failed retry"])
def test_the_cursor_stays_through_every_outcome(app: sqlq.App, shop: Engine, way: str) -> None:
    running = held(app)
    with Session(shop) as session, session.begin():
        running.checkpoint(session, [7])
    error = ErrorText("ValueError", "no")
    with app.database.begin() as conn:
        match way:
            case "rescue":
                conn.execute(text("UPDATE jobs SET lease_expires_at = created_at"))
                assert len(settle.rescue(conn)) == 1
            case "snooze":
                settle.settle(conn, [Settlement(*attempt_of(running).right, 1, Released(0, snoozed=True))])
            case "retry":
                settle.settle(conn, [Settlement(*attempt_of(running).right, 1, Retried(0, error))])
            case _:
                settle.settle(conn, [Settlement(*attempt_of(running).right, 1, Failed("error", error))])
    assert app.jobs.get(running.id).cursor == [7]
    if way == "failed retry":
        assert app.jobs.retry([running.id]) == [running.id]
    (again,) = claim(app)
    assert json.loads(again.cursor) == [7]


@pytest.mark.parametrize("moves", [True, False])
def test_a_snooze_counts_only_without_a_moved_cursor(app: sqlq.App, shop: Engine, moves: bool) -> None:
    """So a job may have any number of slices, and still none goes round for ever."""

    def give() -> None:
        job = sqlq.current_job()
        n = job.cursor or 0
        if n == SLICES:
            return
        with Session(shop) as session, session.begin():
            session.execute(insert(given).values(n=n))
            job.checkpoint(session, n + 1 if moves else n)
        raise sqlq.Snooze("0s")

    task = app.task(name="t", backoff="0s", max_attempts=2)(give)
    job = app.enqueue(task.new())
    set_row(shop, f"releases = {MAX_RELEASES}, {cursor_in(shop)} = '0'")
    app.worker(drain=True).run()
    done = app.jobs.get(job.id)
    if moves:
        assert (done.state, done.attempts, done.releases) == ("finished", 1, 1)
        assert done_by(shop) == list(range(SLICES))
    else:
        assert (done.state, done.attempts, done.exception) == ("failed", 2, "sqlq.model.retry.Snooze")


@pytest.mark.parametrize(("cursor", "expected"), [(1, (5, 3)), (2, (0, 1))])
def test_only_a_moved_cursor_resets_the_counts(
    app: sqlq.App, shop: Engine, cursor: int, expected: tuple[int, int]
) -> None:
    running = held(app)
    for saved in (1, cursor):
        with Session(shop) as session, session.begin():
            running.checkpoint(session, saved)
        if saved == 1 and attempt_of(running).claimed.losses == 0:
            set_row(shop, "releases = 5, losses = 3")
            attempt_of(running).claimed = attempt_of(running).claimed._replace(losses=3)
    with app.database.read() as conn:
        row = conn.execute(text("SELECT releases, losses FROM jobs")).one()
    assert tuple(row) == expected


def test_a_handler_in_a_thread_sees_at_a_checkpoint_that_an_operator_cancels(
    app: sqlq.App, shop: Engine
) -> None:
    """At the end of a slice, long before the next heartbeat."""

    def give() -> None:
        job = sqlq.current_job()
        for n in range(SLICES):
            if job.should_stop():
                return
            with Session(shop) as session, session.begin():
                session.execute(insert(given).values(n=n))
                if n == 1:
                    moment = NOW[shop.dialect.name]
                    session.execute(text(f"UPDATE jobs SET cancel_requested_at = {moment}"))
                job.checkpoint(session, n + 1)

    done = run_one(app, give)
    assert (done.state, done.reason, done.cursor) == ("cancelled", "cancelled on request", 2)
    assert done_by(shop) == [0, 1]


# -- steps ---------------------------------------------------------------------------------------------------


def test_each_step_is_done_once(app: sqlq.App, shop: Engine) -> None:
    seen: list[Any] = []

    def handler() -> None:
        job = sqlq.current_job()
        first = job.step("first")
        if not first.done:
            with first.finishing(shop) as session:
                session.execute(insert(given).values(n=1))
        slices = job.step("slices")
        while not slices.done:
            with Session(shop) as session, session.begin():
                n = slices.cursor or 10
                session.execute(insert(given).values(n=n))
                if n == 12:
                    slices.finish(session)
                else:
                    slices.checkpoint(session, n + 1)
            seen.append((job.attempt, n))
            if n == 10 + job.attempt - 1 and job.attempt < 3:
                raise RuntimeError("no")
        last = job.step("last")
        assert (first.done, slices.done, last.done, last.cursor) == (True, True, False, None)
        with last.finishing(sessionmaker(shop)) as session:
            session.execute(insert(given).values(n=20))

    done = run_one(app, handler)
    assert done.state == "finished", done.traceback
    assert done_by(shop) == [1, 10, 11, 12, 20]
    assert seen == [(1, 10), (2, 11), (3, 12)]
    assert done.cursor == {"sqlq.steps": {"first": True, "slices": True, "last": True}}


def test_steps_of_async_handlers_run_once(app: sqlq.App, shop: Engine, database_url: str) -> None:
    async def handler() -> None:
        job = sqlq.current_job()
        async with disposed(create_async_engine(async_database_url(database_url))) as engine:
            for n, name in enumerate(("one", "two")):
                step = job.step(name)
                if step.done:
                    continue
                async with AsyncSession(engine) as session, session.begin():
                    await session.execute(insert(given).values(n=n))
                    await step.acheckpoint(session, "half")
                async with step.afinishing(engine) as session:
                    await session.execute(insert(given).values(n=n + 10))
                if job.attempt == 1:
                    raise RuntimeError("no")

    done = run_one(app, handler)
    assert (done.state, done_by(shop)) == ("finished", [0, 1, 10, 11]), done.traceback


def test_an_exception_in_a_step_rolls_it_back(app: sqlq.App, shop: Engine) -> None:
    def handler() -> None:
        job = sqlq.current_job()
        with job.step("one").finishing(shop) as session:
            session.execute(insert(given).values(n=job.attempt))
            if job.attempt == 1:
                raise RuntimeError("no")

    done = run_one(app, handler)
    assert (done.state, done_by(shop)) == ("finished", [2])


def test_a_job_has_steps_or_checkpoints(app: sqlq.App, shop: Engine) -> None:
    running = held(app)
    with Session(shop) as session, session.begin():
        running.step("one").checkpoint(session, 1)
        with pytest.raises(
            sqlq.errors.ConfigurationError, match=r"has steps: write step.checkpoint\(session"
        ):
            running.checkpoint(session, 2)
        running.step("one").finish(session)
        with pytest.raises(
            sqlq.errors.ConfigurationError, match=r"the step 'one' of job \d+ is done: ask step.done"
        ):
            running.step("one").finish(session)
    assert app.jobs.get(running.id).cursor == {"sqlq.steps": {"one": True}}
    with app.database.begin() as conn:
        assert (
            lease.save(
                conn,
                attempt_of(running).right,
                attempt_of(running).claimed.cursor,
                "7",
            )
            is False
        )
    attempt_of(running).claimed = attempt_of(running).claimed._replace(cursor="7")
    with pytest.raises(sqlq.errors.ConfigurationError, match="a job has checkpoints or steps, not both"):
        running.step("two")
    attempt_of(running).claimed = attempt_of(running).claimed._replace(cursor=None)
    for name in ("", "x" * 256, None):
        with pytest.raises(sqlq.errors.ConfigurationError, match="the name of a step"):
            running.step(name)  # type: ignore[arg-type]


# -- where nothing is written --------------------------------------------------------------------------------


def test_checkpoints_work_inline(app: sqlq.App, shop: Engine) -> None:
    began: list[Any] = []

    def give() -> None:
        job = sqlq.current_job()
        began.append(job.cursor)
        for n in range(job.cursor or 0, SLICES):
            with Session(shop) as session, session.begin():
                session.execute(insert(given).values(n=n))
                job.checkpoint(session, n + 1)
            if n == 1 and job.attempt == 1:
                raise sqlq.Retry

    task = app.task(name="t")(give)
    with inline(app) as ran:
        app.enqueue(task.new())
    assert [job.state for job in ran.jobs] == ["finished"]
    assert (began, done_by(shop)) == ([None, 2], list(range(SLICES)))


def test_a_rolled_back_savepoint_undoes_its_checkpoint_inline(app: sqlq.App, shop: Engine) -> None:
    began: list[Any] = []

    def give() -> None:
        job = sqlq.current_job()
        began.append(job.cursor)
        with Session(shop) as session, session.begin():
            job.checkpoint(session, 1)
            with session.begin_nested() as savepoint:
                job.checkpoint(session, 2)
                savepoint.rollback()
        if job.attempt == 1:
            raise sqlq.Retry

    with inline(app):
        app.enqueue(app.task(name="t")(give).new())
    assert began == [None, 1]


@pytest.mark.parametrize("kind", ["session", "connection"])
def test_an_eager_job_continues_at_its_committed_checkpoint(shop: Engine, kind: str) -> None:
    began: list[Any] = []

    def give() -> None:
        job = sqlq.current_job()
        began.append(job.cursor)
        with KINDS[kind](shop) as session:
            for n in range(job.cursor or 0, SLICES):
                session.execute(insert(given).values(n=n))
                job.checkpoint(session, n + 1)
                if n == 2 and job.attempt == 1:
                    session.rollback()
                    session.execute(insert(given).values(n=100))
                    session.commit()
                    raise RuntimeError("no")
                session.commit()

    with closing(sqlq.App("postgresql://nobody@127.0.0.1:1/nothing", eager=True)) as eager:
        eager.enqueue(eager.task(name="t")(give).new())
    assert (began, done_by(shop)) == ([None, 2], [*range(SLICES), 100])


def test_steps_run_once_inline(app: sqlq.App, shop: Engine) -> None:
    def handler() -> None:
        job = sqlq.current_job()
        for n, name in enumerate(("one", "two")):
            step = job.step(name)
            if not step.done:
                with step.finishing(shop) as session:
                    session.execute(insert(given).values(n=n))
                raise sqlq.Retry

    with inline(app) as ran:
        app.enqueue(app.task(name="t")(handler).new())
    assert [(job.state, job.attempts) for job in ran.jobs] == [("finished", 3)]
    assert done_by(shop) == [0, 1]


def test_a_worker_that_runs_on_is_not_disturbed(app: sqlq.App, shop: Engine) -> None:
    """A checkpoint changes nothing that the heartbeat, or the settle, goes by."""
    go_on = threading.Event()

    def give() -> None:
        with Session(shop) as session, session.begin():
            sqlq.current_job().checkpoint(session, 1)
        go_on.wait(60)

    job = app.enqueue(app.task(name="t")(give).new())
    with working(app, lease="3s"):
        try:
            wait_until(lambda: app.jobs.get(job.id).cursor == 1, what="the checkpoint")
            token = app.jobs.get(job.id).lease_token
            first = expires(app)
            wait_until(lambda: expires(app) > first, what="a renewal after it")
        finally:
            go_on.set()
        wait_until(lambda: app.jobs.get(job.id).state == "finished", what="the end")
    assert app.jobs.get(job.id).lease_token == token


def expires(app: sqlq.App) -> Any:
    with app.database.read() as conn:
        return conn.execute(text("SELECT lease_expires_at FROM jobs")).scalar_one()
