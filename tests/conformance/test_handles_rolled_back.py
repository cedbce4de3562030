"""A handle from a transaction that was rolled back names no other job, though SQLite gives its id to the next
one."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, Pool, event
from sqlalchemy.exc import IntegrityError, SAWarning
from sqlalchemy.orm import Session

import sqlq
from sqlq.errors import JobNotFoundError
from tests.kit import drain, wait_until
from tests.kit.callers import Caller, Way, common_sessions, common_ways, sessions

pytestmark = pytest.mark.each_database


@pytest.fixture
def task(app: sqlq.App) -> sqlq.Task[..., Any]:
    @app.task(name="shop.double", max_attempts=1)
    def double(n: int) -> int:
        if n < 0:
            raise ValueError(n)
        return 2 * n

    return double


def refuses(app: sqlq.App, job: sqlq.Job[Any], *, all_uses: bool = False) -> None:
    """Expect that every call with a handle reports that its job is not there."""
    uses: list[Callable[[], Any]] = [
        lambda: app.result(job),
        lambda: app.wait_all([job], "1s"),
        lambda: app.jobs.get(job),
        lambda: app.jobs.cancel([job]),
    ]
    more: list[Callable[[], Any]] = [
        lambda: app.result(job, timeout="1s"),
        lambda: asyncio.run(app.aresult(job, timeout="1s")),
        lambda: asyncio.run(app.await_all([job], "1s")),
        lambda: list(app.as_completed([job], "1s")),
        lambda: app.wait_all([job.id, job], "1s"),
        lambda: asyncio.run(app.jobs.aget(job)),
        lambda: app.jobs.cancel([job], force=True),
        lambda: app.jobs.cancel({job.id, job}),
        lambda: asyncio.run(app.jobs.acancel([job])),
        lambda: app.jobs.retry([job]),
        lambda: app.jobs.replay(job),
        lambda: app.jobs.replay([job]),
        lambda: app.jobs.delete([job]),
    ]
    for use in (*uses, *more) if all_uses else uses:
        with pytest.raises(JobNotFoundError, match=rf"job {job.id}\b"):
            use()


def serves(app: sqlq.App, job: sqlq.Job[Any], result: Any) -> None:
    assert app.jobs.get(job).id == job.id
    assert app.result(job) == result
    assert app.wait_all([job]).ended[0].id == job.id
    assert app.jobs.cancel([job]) == {job.id: "ended"}
    assert app.jobs.replay(job)


def is_taken_again(app: sqlq.App, stale: sqlq.Job[Any], task: Any) -> Any:
    """Enqueue another job, which on SQLite gets the id of the one rolled back."""
    stranger = app.enqueue(task.new(100))
    assert (stranger.id == stale.id) is (app.database.engine.dialect.name == "sqlite")
    return stranger


@common_ways
def test_a_handle_of_a_rollback_names_no_other_job(app: sqlq.App, task: Any, caller: Caller) -> None:
    caller.begin()
    stale = caller.enqueue(app, task.new(1))
    caller.rollback()
    refuses(app, stale)
    until = time.time() + 0.003
    wait_until(lambda: time.time() > until, what="another millisecond, which the handles of drivers have")
    caller.begin()
    mine = caller.enqueue(app, task.new(7))
    caller.commit()
    assert (mine.id == stale.id) is (app.database.engine.dialect.name == "sqlite")
    refuses(app, stale)
    drain(app)
    refuses(app, stale)
    serves(app, mine, 14)


def test_a_handle_of_another_databases_rollback_names_no_job(
    app: sqlq.App, task: Any, tmp_path: Path
) -> None:
    """The session's database decides whether ids are used again, not the App's."""
    app.enqueue(task.new(1))
    with closing(sqlq.App(f"sqlite:///{tmp_path}/other.db")) as other:
        other.migrate()
        with Session(other.database.engine) as session:
            with pytest.warns(RuntimeWarning, match="they will not see them"):
                stale = app.enqueue(task.new(2), session=session)
            session.rollback()
    with pytest.raises(JobNotFoundError):
        app.jobs.get(stale)


@common_sessions
def test_a_rolled_back_savepoint_invalidates_its_handles_alone(
    app: sqlq.App, task: Any, caller: Caller
) -> None:
    kept = caller.enqueue(app, task.new(1))
    with caller.savepoint() as undo:
        stale = caller.enqueue_many(app, [task.new(2), task.new(3)])
        undo()
    with caller.savepoint():
        late = caller.enqueue(app, task.new(4))
    caller.commit()
    assert (late.id == stale[0].id) is (app.database.engine.dialect.name == "sqlite")
    drain(app)
    for job in stale:
        refuses(app, job)
    serves(app, kept, 2)
    serves(app, late, 8)


@sessions("sqlite", "postgresql")
def test_a_handle_of_a_commit_that_fails_names_no_other_job(
    app: sqlq.App, task: Any, database_url: str, way: Way
) -> None:
    """SQLAlchemy reports no rollback after it. Nor does it publish an event."""
    told: list[sqlq.JobEvent] = []
    app.on("enqueued")(told.extend)
    with references_enforced(database_url), way(database_url) as caller:
        caller.execute("CREATE TABLE shops (id integer PRIMARY KEY)")
        caller.execute("CREATE TABLE orders (shop integer REFERENCES shops DEFERRABLE INITIALLY DEFERRED)")
        kept = caller.enqueue(app, task.new(1))
        caller.commit()
        caller.execute("INSERT INTO orders VALUES (7)")
        stale = caller.enqueue(app, task.new(2))
        with pytest.raises(IntegrityError):
            caller.commit()
        caller.rollback()
    assert app._events.flush(10)
    assert [event.id for event in told] == [kept.id]
    is_taken_again(app, stale, task)
    drain(app)
    refuses(app, stale)
    serves(app, kept, 2)


@contextmanager
def references_enforced(url: str) -> Iterator[None]:
    """SQLite checks foreign keys only on connections with this setting."""

    def connected(connection: Any, record: Any) -> None:
        connection.cursor().execute("PRAGMA foreign_keys = ON")

    if not url.startswith("sqlite"):
        yield
        return
    event.listen(Pool, "connect", connected)
    yield
    event.remove(Pool, "connect", connected)


def test_an_outer_savepoint_takes_the_handles_of_an_inner_one(
    app: sqlq.App, task: Any, engine: Engine
) -> None:
    if engine.dialect.name == "sqlite":
        sqlq.configure_sqlite(engine)
    with engine.connect() as conn:
        conn.begin_nested().rollback()
        kept = app.enqueue(task.new(1), session=conn)
        outer = conn.begin_nested()
        stale = [app.enqueue(task.new(2), session=conn)]
        with conn.begin_nested():
            stale.append(app.enqueue(task.new(3), session=conn))
        conn.begin_nested()
        stale.append(app.enqueue(task.new(4), session=conn))
        with pytest.warns(SAWarning, match="already deassociated"):
            outer.rollback()
        late = app.enqueue(task.new(5), session=conn)
        conn.commit()
    assert (late.id == stale[0].id) is (engine.dialect.name == "sqlite")
    drain(app)
    for job in stale:
        refuses(app, job)
    serves(app, kept, 2)
    serves(app, late, 10)


def test_a_handle_of_a_connection_that_was_dropped_names_no_other_job(
    app: sqlq.App, task: Any, engine: Engine
) -> None:
    """Its pool rolls it back, and fires no event."""
    conn = engine.connect()
    stale = app.enqueue(task.new(1), session=conn)
    del conn
    gc.collect()
    is_taken_again(app, stale, task)
    refuses(app, stale, all_uses=True)


def test_a_job_found_by_its_key_survives_the_callers_rollback(
    app: sqlq.App, task: Any, engine: Engine
) -> None:
    there = app.enqueue(task.new(1).set(unique_key="there"))
    with Session(engine) as session:
        first = app.enqueue(task.new(2).set(unique_key="mine"), session=session)
        old = app.enqueue(task.new(4).set(unique_key="there"), session=session)
        assert (old.id, old.created) == (there.id, False)
        session.rollback()
    is_taken_again(app, first, task)
    drain(app)
    refuses(app, first)
    serves(app, old, 2)


def test_a_flow_or_run_of_a_schedule_that_was_rolled_back_has_no_result(
    app: sqlq.App, task: Any, engine: Engine
) -> None:
    app.schedules.add("yearly", task.new(5), cron="0 0 1 1 *")
    with Session(engine) as session:
        run = app.schedules.run("yearly", session=session)
        flow = app.enqueue(sqlq.chain(task.new(1), task), session=session)
        session.rollback()
    is_taken_again(app, run, task)
    app.enqueue_many([task.new(1), task.new(2)])
    drain(app)
    refuses(app, run)
    for timeout in ("0s", "10s"):
        with pytest.raises(JobNotFoundError):
            app.result(flow, timeout=timeout)
