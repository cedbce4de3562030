"""complete() and checkpoint(): one transaction has what the handler writes, and the end of its job or how far
it has come."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

import sqlq
from sqlq.config.constants import CURSOR_BYTES, MAX_RELEASES, RESULT_BYTES
from sqlq.database.batch import Right
from sqlq.database.schemas import in_schema
from sqlq.errors import ConfigurationError, EnqueueError
from sqlq.model.outcome import ErrorText, Finished, Outcome, Released, Retried, Settlement
from sqlq.payload.encryption import new_key
from sqlq.store.jobs import lease, settle
from sqlq.testing import inline
from sqlq.worker.attempt.attempt import Attempt, Target
from sqlq.worker.attempt.context import JobContext, attempt_of
from tests import kit
from tests.kit.callers import Way, common_ways
from tests.kit.postgresql import async_database_url
from tests.kit.processes import worker_process

pytestmark = pytest.mark.each_database

payments = sa.Table("payments", sa.MetaData(), sa.Column("n", sa.Integer))


@pytest.fixture
def shop(engine: sa.Engine) -> sa.Engine:
    if engine.dialect.name == "sqlite":
        sqlq.configure_sqlite(engine, immediate=True)
    payments.create(engine)
    return engine


def paid(engine: sa.Engine) -> list[int]:
    with engine.connect() as conn:
        return sorted(conn.scalars(sa.select(payments.c.n)))


def test_a_rollback_after_complete_is_a_failed_attempt_with_the_reason(
    app: sqlq.App, shop: sa.Engine
) -> None:
    def pay() -> None:
        with Session(shop) as session:
            session.execute(sa.insert(payments).values(n=sqlq.current_job().attempt))
            sqlq.current_job().complete(session)
            if sqlq.current_job().attempt == 2:
                session.commit()

    done = kit.run_one(app, pay)
    assert (done.state, done.attempts, paid(shop)) == ("finished", 2, [2])
    assert "complete() was called, but its transaction did not commit" in done.errors[0]["message"]


@pytest.mark.parametrize("way", ["complete", "checkpoint", "acomplete", "acheckpoint"])
def test_a_rollback_on_unconfigured_sqlite_keeps_nothing(app: sqlq.App, database_url: str, way: str) -> None:
    """Nothing was written before that Python's driver for SQLite would have begun a transaction for."""
    arguments = [] if way.endswith("complete") else [1]

    def sync() -> None:
        with Session(sa.create_engine(database_url, poolclass=sa.NullPool)) as session:
            getattr(sqlq.current_job(), way)(session, *arguments)

    async def asynchronous() -> None:
        own = create_async_engine(async_database_url(database_url), poolclass=sa.NullPool)
        async with AsyncSession(own) as session:
            await getattr(sqlq.current_job(), way)(session, *arguments)

    left = kit.run_one(app, asynchronous if way.startswith("a") else sync, max_attempts=1)
    expected = ("finished", 1, None) if arguments else ("failed", 1, None)
    assert (left.state, left.attempts, left.cursor) == expected


@pytest.mark.parametrize("is_async", [False, True])
def test_a_job_is_completed_once_in_a_block_that_does_so(
    app: sqlq.App, shop: sa.Engine, database_url: str, is_async: bool
) -> None:
    def pay() -> None:
        with sqlq.current_job().completing(shop) as session:
            session.execute(sa.insert(payments).values(n=1))
            sqlq.current_job().complete(session)

    async def apay() -> None:
        engine = create_async_engine(async_database_url(database_url), poolclass=sa.NullPool)
        async with sqlq.current_job().acompleting(engine) as session:
            await session.execute(sa.insert(payments).values(n=1))
            await sqlq.current_job().acomplete(session)

    done = kit.run_one(app, apay if is_async else pay, max_attempts=1)
    assert (done.state, paid(shop)) == ("failed", [])
    assert "which completes it at its end: leave" in (done.message or "")


@pytest.mark.parametrize("then", ["raises", "is pruned"])
def test_an_exception_after_the_commit_changes_nothing(app: sqlq.App, shop: sa.Engine, then: str) -> None:
    def pay() -> None:
        with sqlq.current_job().completing(shop) as session:
            session.execute(sa.insert(payments).values(n=sqlq.current_job().attempt))
        if then == "raises":
            raise ValueError("the reply to COMMIT was lost, say")
        assert app.jobs.prune(finished="0s").finished == 1

    app.enqueue(app.task(name="t")(pay).new())
    counts = app.worker(drain=True).run()
    assert (counts.finished, counts.retried, paid(shop)) == (1, 0, [1])
    assert [job.errors for job in app.jobs.list()] == ([[]] if then == "raises" else [])


@pytest.mark.parametrize(
    ("level", "database_url"),
    [("REPEATABLE READ", "postgresql"), ("SERIALIZABLE", "postgresql"), ("REPEATABLE READ", "mariadb")],
    indirect=["database_url"],
)
def test_a_stricter_isolation_level_is_refused_in_a_sentence(
    app: sqlq.App, shop: sa.Engine, level: str
) -> None:
    """On MariaDB, whose own level it is, only where a transaction keeps to its snapshot."""

    def pay() -> None:
        with shop.connect().execution_options(isolation_level=level) as conn, conn.begin():
            if conn.dialect.name == "mariadb":
                conn.execute(sa.text("SET SESSION innodb_snapshot_isolation = ON"))
            sqlq.current_job().complete(conn)

    done = kit.run_one(app, pay, max_attempts=1)
    assert done.exception == "sqlq.errors.ConfigurationError"
    assert f"at {level}" in done.message
    assert "READ COMMITTED" in done.message


@kit.needs("mariadb")
def test_complete_at_mariadbs_own_level_reads_the_newest_row(app: sqlq.App, shop: sa.Engine) -> None:
    def pay() -> None:
        running = sqlq.current_job()
        with shop.connect() as conn, conn.begin():
            assert conn.scalar(sa.text("SELECT @@tx_isolation")) == "REPEATABLE-READ"
            before = conn.scalar(sa.text("SELECT lease_expires_at FROM jobs"))
            with app.database.begin() as heartbeat:
                right = attempt_of(running).right
                assert list(lease.extend(heartbeat, [right], lease_ms=90_000)) == [right]
                heartbeat.execute(sa.text("UPDATE jobs SET label = 'newest'"))
            assert conn.scalar(sa.text("SELECT lease_expires_at FROM jobs")) == before
            conn.execute(sa.insert(payments).values(n=running.attempt))
            running.progress(1, of=2)
            running.checkpoint(conn, 1)
            running.complete(conn)

    app.enqueue(app.task(name="t")(pay).new())
    counts = app.worker(drain=True).run()
    assert (counts.finished, counts.retried, paid(shop)) == (1, 0, [1])
    assert [job.label for job in app.jobs.list()] == ["newest"]


@kit.needs("mariadb")
def test_an_enqueue_of_the_key_waits_for_an_open_complete(app: sqlq.App, shop: sa.Engine) -> None:
    made: list[sqlq.Job] = []

    def produce() -> None:
        with shop.begin() as conn:
            made.append(app.enqueue(task.new().set(unique_key="k"), session=conn))

    producer = threading.Thread(target=produce)

    def pay() -> None:
        with shop.connect() as conn, conn.begin():

            @sa.event.listens_for(conn, "before_cursor_execute")
            def before(conn: Any, cursor: Any, statement: str, *more: Any) -> None:
                if "finished_jobs" not in statement or producer.ident:
                    return
                producer.start()
                kit.wait_until(lambda: kit.waiting_for_locks(shop), what="the producer waiting")

            sqlq.current_job().complete(conn)

    task = app.task(name="t", max_attempts=1)(pay)
    job = app.enqueue(task.new().set(unique_key="k"))
    counts = app.worker(drain=True, concurrency=1).run()
    producer.join(20)
    assert app.jobs.get(job.id).state == "finished"
    assert (counts.failed, made[0].created, made[0].id > job.id) == (0, True, True)


@kit.needs("sessions")
@pytest.mark.parametrize("way", ["complete", "checkpoint"])
def test_an_owners_write_waits_for_a_heartbeat_and_a_heartbeat_skips_it(
    app: sqlq.App, shop: sa.Engine, noop: Any, way: str
) -> None:
    jobs = app.enqueue_many([noop.new()] * 2)
    rights = [(job.id, job.lease_token) for job in kit.claim(app)]

    def write(conn: sa.Connection, right: Right) -> None:
        with in_schema(conn, "public"):
            if way == "complete":
                assert settle.complete(conn, right, Finished())
            else:
                assert lease.save(conn, right, None, "7") is False

    def write_first() -> None:
        with shop.begin() as conn:
            write(conn, rights[0])

    with ThreadPoolExecutor(1) as pool:
        with app.database.begin() as heartbeat:
            assert list(lease.extend(heartbeat, rights[:1], lease_ms=30_000)) == rights[:1]
            written = pool.submit(write_first)
            kit.wait_until(lambda: written.done() or kit.waiting_for_locks(shop), what="a wait for the row")
            assert not written.done()
        written.result(10)
    with shop.begin() as conn, app.database.begin() as heartbeat:
        write(conn, rights[1])
        assert lease.extend(heartbeat, rights[1:], lease_ms=30_000) == {}
        settlement = Settlement(*rights[1], 1, Finished(None))
        assert settle.settle(heartbeat, [settlement]) == set(), "an open transaction blocks no batch"
    expected = ("finished", None) if way == "complete" else ("running", 7)
    assert [(job.state, job.cursor) for job in map(app.jobs.get, jobs)] == [expected] * 2


def test_a_waiting_job_with_a_cancel_request_does_not_start(app: sqlq.App, engine: sa.Engine) -> None:
    ran: list[int] = []
    job = app.enqueue(app.task(name="t")(lambda: ran.append(1)).new())
    kit.execute(engine, f"UPDATE jobs SET cancel_requested_at = {kit.NOW[engine.dialect.name]}")
    app.worker(drain=True).run()
    assert (app.jobs.get(job.id).state, ran) == ("cancelled", [])


SLICES = 4


def cursor_in(engine: sa.Engine) -> str:
    """Return the column's name as it is written in SQL: on MariaDB it is a reserved word."""
    return "`cursor`" if engine.dialect.name == "mariadb" else "cursor"


def save(engine: sa.Engine, job: Any, *cursors: Any) -> None:
    with Session(engine) as session, session.begin():
        for cursor in cursors:
            job.checkpoint(session, cursor)


@pytest.fixture
def running(app: sqlq.App) -> sqlq.JobContext:
    """A job as its handler sees it."""
    app.enqueue(app.task(name="held")(lambda: None).new())
    (claimed,) = kit.claim(app)
    attempt = Attempt(claimed, None, float("inf"), Target(lambda: app.database, schema=app.database.schema))
    return JobContext(attempt)


@common_ways
def test_checkpoints_in_each_way_continue(
    app: sqlq.App, shop: sa.Engine, database_url: str, way: Way
) -> None:
    def give() -> None:
        job = sqlq.current_job()
        with way(database_url) as caller:
            for n in range(job.cursor or 0, SLICES):
                caller.begin()
                caller.execute(f"INSERT INTO payments (n) VALUES ({n})")
                save = job.acheckpoint if caller.is_async else job.checkpoint
                caller.do(save(caller.session, n + 1))
                assert job.cursor == n + 1
                if n == 1 and job.attempt == 1:
                    caller.rollback()
                    raise RuntimeError("no")
                caller.commit()

    done = kit.run_one(app, give)
    assert (done.state, done.attempts, paid(shop)) == ("finished", 2, list(range(SLICES)))
    assert done.cursor == SLICES, "kept, for those who look"


def test_an_isolated_job_continues_at_its_checkpoint(
    app: sqlq.App, shop: sa.Engine, database_url: str, tmp_path: Path
) -> None:
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

@app.task(isolate=True, max_attempts=3, backoff="0s")
def give() -> None:
    job = sqlq.current_job()
    for n in range(job.cursor or 0, {SLICES}):
        with Session(engine) as session, session.begin():
            session.execute(text("INSERT INTO payments (n) VALUES (:n)"), {{"n": n}})
            job.checkpoint(session, n + 1)
        if n == 1:
            os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    job = app.enqueue(app.named("alone.give").new())
    with worker_process(tmp_path, "alone:app", database_url):
        kit.wait_until(lambda: app.jobs.get(job.id).state == "finished", what="the job finished")
    assert (app.jobs.get(job.id).attempts, paid(shop)) == (2, list(range(SLICES)))


def test_a_zombie_saves_nothing(app: sqlq.App, shop: sa.Engine, running: sqlq.JobContext) -> None:
    """The fence of a checkpoint: the token has moved on, so its transaction rolls back."""
    kit.execute(shop, "UPDATE jobs SET lease_token = lease_token + 1")
    with Session(shop) as session:
        session.execute(sa.insert(payments).values(n=1))
        with pytest.raises(sqlq.LeaseLostError, match="belongs to another owner"):
            running.checkpoint(session, 1)
    with pytest.raises(sqlq.LeaseLostError, match="belongs to another owner"):
        running.step("one").once(lambda: 1)
    assert (paid(shop), app.jobs.get(running.id).cursor, running.cursor) == ([], None, None)


def test_a_transactions_last_checkpoint_counts(
    app: sqlq.App, shop: sa.Engine, running: sqlq.JobContext
) -> None:
    for cursors in ([1, {"after": [2]}], [None], [3]):
        save(shop, running, *cursors)
        assert app.jobs.get(running.id).cursor == cursors[-1]


def test_a_checkpoint_after_a_rolled_back_one_is_refused(app: sqlq.App, shop: sa.Engine) -> None:
    """A handler that swallows what undid a slice, and goes on with the next, is stopped before it leaves one
    out."""

    def give() -> None:
        job = sqlq.current_job()
        for n in range(job.cursor or 0, SLICES):
            with Session(shop) as session:
                session.execute(sa.insert(payments).values(n=n))
                job.checkpoint(session, n + 1)
                if n == 2 and job.attempt == 1:
                    session.rollback()
                else:
                    session.commit()

    done = kit.run_one(app, give)
    assert (done.state, done.attempts, paid(shop)) == ("finished", 2, list(range(SLICES)))
    assert done.errors[0]["exception"] == "sqlq.errors.ExecutionError"
    assert "an earlier checkpoint of job" in done.errors[0]["message"]


def test_the_last_slice_and_the_end_may_be_one_transaction(app: sqlq.App, shop: sa.Engine) -> None:
    def give() -> None:
        job = sqlq.current_job()
        with Session(shop) as session, session.begin():
            job.checkpoint(session, "end")
            job.complete(session, "result")
            with pytest.raises(ConfigurationError, match="a checkpoint comes before complete"):
                job.checkpoint(session, 1)
            with pytest.raises(ConfigurationError, match="a checkpoint comes before complete"):
                job.step("one")
            session.execute(sa.insert(payments).values(n=1))

    done = kit.run_one(app, give)
    assert (done.state, done.result, done.cursor, paid(shop)) == ("finished", "result", "end", [1])


@kit.for_each(
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
)
def test_a_bad_cursor_is_refused_before_anything_is_written(
    app: sqlq.App, shop: sa.Engine, cursor: Any, says: str, running: sqlq.JobContext
) -> None:
    before = paid(shop)
    with Session(shop) as session, session.begin():
        with pytest.raises(sqlq.errors.ArgumentsError, match=says):
            running.checkpoint(session, cursor)
        session.execute(sa.insert(payments).values(n=1))
    assert (paid(shop), app.jobs.get(running.id).cursor) == ([*before, 1], None)


def test_a_cursor_that_is_not_json_fails_its_job_alone(app: sqlq.App, engine: sa.Engine) -> None:
    ran: list[int] = []
    task = app.task(name="t")(lambda: ran.append(1))
    *bad, good = app.enqueue_many([task.new()] * 4)
    for job, written in zip(bad, ("no JSON", "{", ""), strict=True):
        kit.execute(engine, f"UPDATE jobs SET {cursor_in(engine)} = '{written}' WHERE id = {job.id}")
    app.worker(drain=True).run()
    for job in bad:
        found = app.jobs.get(job.id)
        assert (found.state, found.reason) == ("failed", "bad_payload")
        assert "the cursor is not JSON" in (found.error or "")
    assert (app.jobs.get(good.id).state, ran) == ("finished", [1])


OUTCOMES: list[Outcome | None] = [Retried(0, ErrorText("E", "no")), Released(0, snoozed=True), kit.BOOM, None]


@kit.for_each("outcome", OUTCOMES)
def test_the_cursor_stays_through_every_outcome(
    app: sqlq.App, shop: sa.Engine, running: sqlq.JobContext, outcome: Outcome | None
) -> None:
    """None is a rescue, and a job that has failed is retried by an operator."""
    attempt = attempt_of(running)
    if attempt.claimed.cursor is None:
        save(shop, running, [7])
    if outcome is not None:
        kit.settle(app, attempt.claimed, outcome)
    else:
        kit.execute(shop, "UPDATE jobs SET lease_expires_at = created_at")
        assert len(kit.rescue(app)) == 1
    assert app.jobs.get(running.id).cursor == [7]
    if outcome is kit.BOOM:
        assert app.jobs.retry([running.id]) == [running.id]
    (attempt.claimed,) = kit.claim(app)
    assert json.loads(attempt.claimed.cursor or "") == [7]


@pytest.mark.parametrize("moves", [True, False])
def test_a_snooze_counts_only_without_a_moved_cursor(app: sqlq.App, shop: sa.Engine, moves: bool) -> None:
    """So a job may have any number of slices, and still none goes round for ever."""

    def give() -> None:
        job = sqlq.current_job()
        n = job.cursor or 0
        if n == SLICES:
            return
        with Session(shop) as session, session.begin():
            session.execute(sa.insert(payments).values(n=n))
            job.checkpoint(session, n + 1 if moves else n)
        raise sqlq.Snooze("0s")

    task = app.task(name="t", backoff="0s", max_attempts=2)(give)
    job = app.enqueue(task.new())
    kit.execute(shop, f"UPDATE jobs SET releases = {MAX_RELEASES}, {cursor_in(shop)} = '0'")
    app.worker(drain=True).run()
    done = app.jobs.get(job.id)
    if moves:
        assert (done.state, done.attempts, done.releases) == ("finished", 1, 1)
        assert paid(shop) == list(range(SLICES))
    else:
        assert (done.state, done.attempts, done.exception) == ("failed", 2, "sqlq.model.retry.Snooze")


@pytest.mark.parametrize(("cursor", "expected"), [(1, (5, 3)), (2, (0, 1))])
def test_only_a_moved_cursor_resets_the_counts(
    app: sqlq.App, shop: sa.Engine, cursor: int, expected: tuple[int, int], running: sqlq.JobContext
) -> None:
    save(shop, running, 1)
    kit.execute(shop, "UPDATE jobs SET releases = 5, losses = 3")
    attempt_of(running).claimed = attempt_of(running).claimed._replace(losses=3)
    save(shop, running, cursor)
    with app.database.read() as conn:
        assert tuple(conn.execute(sa.text("SELECT releases, losses FROM jobs")).one()) == expected


def test_a_handler_in_a_thread_sees_at_a_checkpoint_that_it_is_cancelled(
    app: sqlq.App, shop: sa.Engine
) -> None:
    """At the end of a slice, long before the next heartbeat."""

    def give() -> None:
        job = sqlq.current_job()
        for n in range(SLICES):
            if job.should_stop():
                return
            with Session(shop) as session, session.begin():
                session.execute(sa.insert(payments).values(n=n))
                if n == 1:
                    moment = kit.NOW[shop.dialect.name]
                    session.execute(sa.text(f"UPDATE jobs SET cancel_requested_at = {moment}"))
                job.checkpoint(session, n + 1)

    done = kit.run_one(app, give)
    assert (done.state, done.reason, done.cursor) == ("cancelled", "cancelled on request", 2)
    assert paid(shop) == [0, 1]


def test_each_step_is_done_once_and_remembers_its_value(app: sqlq.App, shop: sa.Engine) -> None:
    calls: list[str] = []

    def handler() -> Any:
        job = sqlq.current_job()
        pay, tidy, ask = map(job.step, ("pay", "tidy", "ask"))

        def write(session: Any) -> str:
            calls.append("pay")
            session.execute(sa.insert(payments).values(n=job.attempt))
            if job.attempt == 1:
                raise RuntimeError("it rolls the step back")
            return "paid"

        def work() -> None:
            while (n := tidy.cursor or 10) < 12:
                with Session(shop) as session, session.begin():
                    session.execute(sa.insert(payments).values(n=n))
                    tidy.checkpoint(session, n + 1)
                if job.attempt == 2:
                    raise RuntimeError("the next attempt goes on behind this slice")

        def answer() -> Any:
            calls.append("ask")
            if job.attempt == 3:
                raise RuntimeError("it saves nothing")
            return [("a", None)]

        values = [pay.once(write, sessionmaker(shop)), tidy.once(work), ask.once(answer), ask.once(answer)]
        if calls[-1] != "snooze":
            calls.append("snooze")
            raise sqlq.Snooze("0s")
        return values

    done = kit.run_one(app, handler)
    assert (done.state, done.result) == ("finished", ["paid", None, [["a", None]], [["a", None]]])
    assert (paid(shop), calls) == ([2, 10, 11], ["pay", "pay", "ask", "ask", "snooze"])
    values = {"pay": "paid", "tidy": None, "ask": [["a", None]]}
    assert done.cursor == {"sqlq.steps": {name: {"value": value} for name, value in values.items()}}


def test_async_steps_run_once_and_side_by_side(app: sqlq.App, shop: sa.Engine, database_url: str) -> None:
    calls: list[int] = []

    async def handler() -> Any:
        job = sqlq.current_job()
        engine = create_async_engine(async_database_url(database_url), poolclass=sa.NullPool)
        together = asyncio.Barrier(8)

        async def ask(n: int) -> int:
            calls.append(n)
            if job.attempt == 1:
                await together.wait()
            return n

        async def pay(session: AsyncSession) -> None:
            await session.execute(sa.insert(payments).values(n=job.attempt))

        asked = [job.step(f"ask {n}").once_async(partial(ask, n)) for n in range(8)]
        values = await asyncio.gather(*asked)
        await job.step("pay").once_async(pay, engine)
        if job.attempt == 1:
            raise RuntimeError("no")
        return values

    done = kit.run_one(app, handler)
    assert (done.state, done.result) == ("finished", list(range(8))), done.traceback
    assert (sorted(calls), paid(shop)) == (list(range(8)), [1])


def test_a_job_has_steps_or_checkpoints(app: sqlq.App, shop: sa.Engine, running: sqlq.JobContext) -> None:
    with Session(shop) as session, session.begin():
        running.step("one").checkpoint(session, 1)
        with pytest.raises(ConfigurationError, match=r"has steps: write step.checkpoint\(session"):
            running.checkpoint(session, 2)
    with pytest.raises(ConfigurationError, match=r"two steps named 'one' in this attempt"):
        running.step("one")
    attempt = attempt_of(running)
    with app.database.begin() as conn:
        assert lease.save(conn, attempt.right, attempt.claimed.cursor, "7") is False
    attempt.claimed = attempt.claimed._replace(cursor="7")
    with pytest.raises(ConfigurationError, match="a job has checkpoints or steps, not both"):
        running.step("two")
    attempt.claimed = attempt.claimed._replace(cursor=None)
    for name in ("", "x" * 256, None):
        with pytest.raises(ConfigurationError, match="the name of a step"):
            running.step(name)  # type: ignore[arg-type]
    engine: Any = create_async_engine("sqlite+aiosqlite://")
    given = "given an AsyncEngine: write async with"
    with pytest.raises(ConfigurationError, match=given), running.completing(engine):
        pass
    with pytest.raises(ConfigurationError, match=r"or await step.once_async\("):
        running.step("bill").once(lambda _: None, engine)
    with pytest.raises(EnqueueError, match="await the call of the same name with an a before it"):
        running.complete(AsyncSession(engine))  # type: ignore[arg-type]


@kit.for_each(
    ("value", "says"),
    [
        (object, "the value of the step 's' is <class 'object'>"),
        (float("nan"), "the value of the step 's' is nan"),
        ("\0", "holds a NUL"),
        ("x" * RESULT_BYTES, "the step 's' takes 1,048,578 bytes as JSON, more than the 1,048,576 allowed"),
    ],
)
def test_a_value_that_no_step_can_keep_is_refused(running: sqlq.JobContext, value: Any, says: str) -> None:
    with pytest.raises(sqlq.errors.ArgumentsError, match=says):
        JobContext(attempt_of(running)).step("s").once(lambda: value)
    assert running.cursor is None


def test_steps_keep_eight_large_values(app: sqlq.App, running: sqlq.JobContext) -> None:
    for n in range(7):
        running.step(f"{n}").once(lambda: "x" * (RESULT_BYTES - 2))
    with pytest.raises(sqlq.errors.ArgumentsError, match=r"the steps of job \d+ take .* than the 8,388,608"):
        running.step("more").once(lambda: "x" * (RESULT_BYTES - 2))
    assert app.jobs.get(running.id).cursor == running.cursor


def test_a_value_is_encrypted_as_results_are(app: sqlq.App, database_url: str) -> None:
    key, calls = new_key(), list[int]()
    with closing(sqlq.App(database_url, keys=[key], encryption="encrypt")) as sealed:

        def answer() -> str:
            calls.append(1)
            return "a secret"

        def handler() -> str:
            job = sqlq.current_job()
            value = job.step("ask").once(answer)
            if job.attempt == 1:
                raise RuntimeError("no")
            return value

        done = kit.run_one(sealed, handler)
    assert (done.state, done.result, calls) == ("finished", "a secret", [1])
    assert "secret" not in json.dumps(done.cursor)
    assert done.cursor["sqlq.steps"]["ask"]["value"]["signature"].startswith("e1.")


def test_a_step_remembers_its_value_inline() -> None:
    calls: list[int] = []
    app = sqlq.App("postgresql://nobody@127.0.0.1:1/nothing")

    @app.task(name="t", max_attempts=2)
    async def handler() -> int:
        job = sqlq.current_job()
        value = await job.step("ask").once_async(lambda: ask(job.attempt))
        if job.attempt == 1:
            raise sqlq.Retry
        return value + job.step("and").once(lambda: 10)

    async def ask(n: int) -> int:
        calls.append(n)
        return n

    with closing(app), inline(app):
        assert app.result(app.enqueue(handler.new())) == 11
    assert calls == [1]


def test_a_rolled_back_savepoint_undoes_its_checkpoint_inline(app: sqlq.App, shop: sa.Engine) -> None:
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


def test_an_eager_job_continues_at_its_committed_checkpoint(shop: sa.Engine) -> None:
    began: list[Any] = []

    def give() -> None:
        job = sqlq.current_job()
        began.append(job.cursor)
        with Session(shop) as session:
            for n in range(job.cursor or 0, SLICES):
                session.execute(sa.insert(payments).values(n=n))
                job.checkpoint(session, n + 1)
                if n == 2 and job.attempt == 1:
                    session.rollback()
                    session.execute(sa.insert(payments).values(n=100))
                    session.commit()
                    raise RuntimeError("no")
                session.commit()

    with closing(sqlq.App("postgresql://nobody@127.0.0.1:1/nothing", eager=True)) as eager:
        eager.enqueue(eager.task(name="t")(give).new())
    assert (began, paid(shop)) == ([None, 2], [*range(SLICES), 100])
