"""Enqueueing and completing on a connection of a driver, without SQLAlchemy, which stays as it was."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import asyncpg
import psycopg
import psycopg2
import pytest
from psycopg import rows
from sqlalchemy import Engine

import sqlq
from sqlq import EnqueueError
from tests.kit import committed, execute, for_each, needs, refuse_threads, run_one
from tests.kit.callers import Caller, Way, automatic, common_modes, dsn, file_of, modes, orders_and_jobs

pytestmark = pytest.mark.variants
"""Each test tries one of twenty ways to hold a connection; `poe test-all` has each try all of them."""


@common_modes
def test_enqueue_keeps_the_settings_of_a_callers_connection(app: sqlq.App, send: Any, caller: Caller) -> None:
    names = ("isolation_level", "row_factory", "text_factory", "cursor_factory", "in_transaction")

    def settings(connection: Any) -> list[Any]:
        status = getattr(getattr(connection, "info", None), "transaction_status", None)
        return [status, *(getattr(connection, name, None) for name in ("autocommit", *names))]

    before = settings(caller.session)
    caller.begin()
    caller.enqueue_many(app, [send.new(1), send.new(2).set(unique_key="k")])
    caller.rollback()
    assert settings(caller.session) == before
    caller.enqueue(app, send.new(1))
    if not caller.begins:
        caller.commit()
    assert settings(caller.session) == before


@modes(lambda name, mode: mode.is_async)
def test_an_asynchronous_connection_is_awaited_on_its_loop(
    app: sqlq.App, send: Any, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller.begin()
    refuse_threads(monkeypatch, "")
    caller.enqueue_many(app, [send.new(1), send.new(2).set(unique_key="k")])
    caller.commit()


@automatic
def test_a_batch_in_autocommit_is_written_whole_or_not(app: sqlq.App, send: Any, buyer: Caller) -> None:
    several = [send.new(1), send.new(2).set(unique_key="a"), send.new(3).set(unique_key="b")]
    with pytest.raises(Exception, match="priority"):
        buyer.enqueue_many(app, [*several, replace(send.new(4), unique_key="c", priority=1_000)])
    assert buyer.committed()[1] == []
    assert len(buyer.enqueue_many(app, several)) == len(buyer.committed()[1]) == 3
    buyer.enqueue(app, send.new(4))
    assert len(buyer.committed()[1]) == 4


@needs("postgresql")
@for_each("autocommit", [True, False])
def test_psycopgs_transaction_blocks(
    app: sqlq.App, send: Any, watch: Engine, database_url: str, autocommit: bool
) -> None:
    before = committed(watch)
    with psycopg.connect(dsn(database_url), autocommit=autocommit, row_factory=rows.dict_row) as conn:
        with conn.transaction():
            first = app.enqueue(send.new(1), session=conn)
            with suppress(ZeroDivisionError), conn.transaction():
                app.enqueue_many([send.new(2).set(unique_key=f"{autocommit}{n}") for n in "ab"], session=conn)
                raise ZeroDivisionError
            with conn.transaction():
                second = app.enqueue(send.new(3).set(unique_key=f"{autocommit}a"), session=conn)
            with conn.transaction():
                app.enqueue(send.new(4), session=conn)
                raise psycopg.Rollback
        with suppress(ZeroDivisionError), conn.transaction():
            app.enqueue(send.new(5), session=conn)
            raise ZeroDivisionError
        with conn.transaction(force_rollback=True):
            app.enqueue(send.new(5), session=conn)
        assert conn.execute("SELECT 1 AS one").fetchone() == {"one": 1}
    assert committed(watch) == [*before, first.id, second.id]


@needs("postgresql")
def test_psycopg_in_pipelines_and_two_phases(
    app: sqlq.App, send: Any, watched_orders: Engine, database_url: str
) -> None:
    jobs: list[sqlq.Job] = []
    with psycopg.connect(dsn(database_url)) as conn:
        for number, end in enumerate((conn.rollback, conn.commit)):
            with conn.pipeline():
                conn.execute(f"INSERT INTO orders VALUES ({number})".encode())
                jobs.append(app.enqueue(send.new(1), session=conn))
            end()
        for end in (conn.tpc_rollback, conn.tpc_commit):
            conn.tpc_begin(conn.xid(1, f"{database_url[-8:]}{end.__name__}", ""))
            jobs.append(app.enqueue(send.new(1), session=conn))
            conn.tpc_prepare()
            end()
    assert orders_and_jobs(watched_orders) == ([1], [job.id for job in jobs[1::2]])


@pytest.mark.parametrize("database_url", ["postgresql", "sqlite"], indirect=True)
def test_blocks_of_psycopg2_and_sqlite3(app: sqlq.App, send: Any, watch: Engine, database_url: str) -> None:
    is_postgresql = database_url.startswith("postgresql")
    connection: Any = (
        psycopg2.connect(dsn(database_url)) if is_postgresql else sqlite3.connect(file_of(database_url))
    )
    with closing(connection) as conn:
        with conn:
            job = app.enqueue(send.new(1), session=conn)
        for autocommit in (False, True) if is_postgresql else (False,):
            if autocommit:
                conn.autocommit = True
            with suppress(ZeroDivisionError), conn:
                app.enqueue(send.new(2), session=conn)
                raise ZeroDivisionError
    assert committed(watch) == [job.id]


@needs("postgresql")
def test_asyncpgs_blocks_and_pools(app: sqlq.App, send: Any, watch: Engine, database_url: str) -> None:
    async def main() -> list[int]:
        kept = []
        async with asyncpg.create_pool(dsn(database_url), min_size=1, max_size=1) as pool:
            async with pool.acquire() as conn, conn.transaction():
                kept.append(await app.aenqueue(send.new(1), session=conn))
                with suppress(ZeroDivisionError):
                    async with conn.transaction():
                        keyed = [send.new(2).set(unique_key=key) for key in "ab"]
                        await app.aenqueue_many(keyed, session=conn)
                        raise ZeroDivisionError
                kept.append(await app.aenqueue(send.new(3).set(unique_key="a"), session=conn))
            with suppress(ZeroDivisionError):
                async with pool.acquire() as conn, conn.transaction(isolation="serializable"):
                    await app.aenqueue(send.new(4), session=conn)
                    raise ZeroDivisionError
        return [job.id for job in kept]

    assert asyncio.run(main()) == committed(watch)


@needs("file")
def test_an_outermost_savepoint_keeps_or_undoes_write_and_job(
    app: sqlq.App, send: Any, watched_orders: Engine, database_url: str
) -> None:
    with closing(sqlite3.connect(file_of(database_url))) as conn:
        for end in ("ROLLBACK TO mine", "SELECT 1"):
            conn.execute("SAVEPOINT mine")
            conn.execute("INSERT INTO orders VALUES (1)")
            app.enqueue(send.new(1), session=conn)
            conn.execute(end)
            conn.execute("RELEASE mine")
            conn.rollback()
            orders, jobs = orders_and_jobs(watched_orders)
            assert len(orders) == len(jobs) == (end == "SELECT 1")


@needs("one_writer")
def test_a_stale_snapshot_is_refused(app: sqlq.App, send: Any, watch: Engine, database_url: str) -> None:
    says = r"another program wrote after this transaction .* by BEGIN IMMEDIATE or"
    with closing(sqlite3.connect(file_of(database_url), isolation_level=None)) as conn:
        conn.execute("BEGIN")
        conn.execute("SELECT count(*) FROM jobs").fetchall()
        first = app.enqueue(send.new(1))
        with pytest.raises(EnqueueError, match=says):
            app.enqueue(send.new(2), session=conn)
    assert committed(watch) == [first.id]


@needs("file")
def test_jobs_in_a_database_in_memory(app: sqlq.App, send: Any, database_url: str) -> None:
    in_memory = sqlq.App("sqlite://")
    new = in_memory.named("t").new()
    for migrated in (False, True, False):
        with closing(sqlite3.connect(":memory:")) as conn:
            if migrated:
                with closing(sqlite3.connect(file_of(database_url))) as source:
                    source.backup(conn)
                assert in_memory.enqueue(new, session=conn).created
            else:
                with pytest.raises(sqlq.errors.SchemaVersionError, match="does not hold sqlq's tables yet"):
                    in_memory.enqueue(new, session=conn)


@needs("roles")
def test_a_connection_of_the_other_kind_is_refused_with_the_right_call(
    app: sqlq.App, send: Any, tmp_path: Path, database_url: str
) -> None:
    async def main() -> None:
        says = r"this is a psycopg.AsyncConnection, which .*: await the call .* await app.aenqueue"
        async with await psycopg.AsyncConnection.connect(dsn(database_url)) as conn:
            with pytest.raises(EnqueueError, match=says):
                app.enqueue(send.new(1), session=cast(Any, conn))
        with closing(sqlite3.connect(tmp_path / "a.db")) as conn:
            says = r"not a sqlite3.Connection: use the call of the same name"
            with pytest.raises(EnqueueError, match=says):
                await app.aenqueue(send.new(1), session=cast(Any, conn))

    asyncio.run(main())
    for driver in cast(Any, (psycopg, psycopg2)):
        says = rf"session is a {driver.__name__}.[Cc]ursor: pass a Session or Connection"
        with closing(driver.connect(dsn(database_url))) as theirs, pytest.raises(EnqueueError, match=says):
            app.enqueue(send.new(1), session=theirs.cursor())


class Traced:
    """A connection in a wrapper that traces it, as those of monitoring services are."""

    def __init__(self, connection: Any) -> None:
        self.__wrapped__ = connection

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.__wrapped__)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)


@modes(lambda name, mode: name in ("sqlite3", "psycopg"))
def test_enqueue_takes_wrapped_connections(app: sqlq.App, send: Any, buyer: Caller) -> None:
    """Wrapped to be traced, or taken raw from a pool of SQLAlchemy's."""
    traced: Any = Traced(buyer.session)
    app.enqueue(send.new(1), session=traced)
    buyer.commit()
    with closing(buyer.watch.raw_connection()) as raw:
        app.enqueue(send.new(2), session=raw)
        raw.commit()
    assert len(buyer.committed()[1]) == 2


def complete(caller: Caller, running: sqlq.JobContext, result: Any = None) -> None:
    caller.do((running.acomplete if caller.is_async else running.complete)(caller.session, result))


def complete_in_a_block(caller: Caller, running: sqlq.JobContext) -> None:
    """Write an order in a block that completes the job with the result 1; the first attempt fails in it."""
    insert = f"INSERT INTO orders VALUES ({running.attempt})"

    async def acomplete() -> None:
        async with running.acompleting(caller.session, 1) as conn:
            assert conn is caller.session
            await caller.executing(insert)
            assert 1 / (running.attempt - 1)

    if caller.is_async:
        caller.do(acomplete())
    else:
        with running.completing(caller.session, 1) as conn:
            assert conn is caller.session
            caller.execute(insert)
            assert 1 / (running.attempt - 1)


@common_modes
def test_a_handlers_writes_and_its_completion_commit_together(
    app: sqlq.App, watched_orders: Engine, database_url: str, way: Way
) -> None:
    def pay() -> None:
        running = sqlq.current_job()
        with way(database_url) as caller:
            caller.begin()
            if running.attempt == 2:
                caller.order(2)
            complete(caller, running, {"paid": 1})
            if running.attempt == 1:  # what comes first in a transaction has begun it
                caller.order(1)
            caller.rollback() if running.attempt == 1 else caller.commit()

    followed: list[int] = []

    @app.task(name="follows")
    def follows(ended: sqlq.JobOutcome) -> None:
        followed.append(ended.id)

    done = run_one(app, pay, on_success=follows)
    assert followed == [done.id]
    assert (done.state, done.attempts, done.result) == ("finished", 2, {"paid": 1})
    assert orders_and_jobs(watched_orders) == ([2], [])
    assert "complete() was called, but its transaction did not commit" in done.errors[0]["message"]


@common_modes
def test_a_completing_block_begins_a_transaction_of_its_own_unless_one_is_open(
    app: sqlq.App, watched_orders: Engine, database_url: str, way: Way, request: pytest.FixtureRequest
) -> None:
    says = "a transaction is open on this connection, and this block makes one of its own"

    def pay() -> None:
        with way(database_url) as caller:
            # always in one with autocommit=False of Python 3.12, and nothing shows who began it
            if "pep249" not in request.node.name:
                caller.begin()
                caller.order(1)
                with pytest.raises(sqlq.errors.SqlqError, match=says):
                    complete_in_a_block(caller, sqlq.current_job())
                caller.rollback()
            complete_in_a_block(caller, sqlq.current_job())

    done = run_one(app, pay)
    assert (done.state, done.attempts, done.result) == ("finished", 2, 1)
    assert done.errors[0]["exception"] == "ZeroDivisionError"
    assert orders_and_jobs(watched_orders) == ([2], [])


@automatic
def test_complete_refuses_a_connection_without_a_transaction(
    app: sqlq.App, watched_orders: Engine, database_url: str, way: Way
) -> None:
    def pay() -> None:
        with way(database_url) as caller:
            complete(caller, sqlq.current_job())

    done = run_one(app, pay, max_attempts=1)
    assert done.state == "failed"
    assert "no transaction is open on this connection, and its driver begins none" in done.message


@common_modes
def test_a_zombie_cannot_complete(app: sqlq.App, watched_orders: Engine, database_url: str, way: Way) -> None:
    def pay() -> None:
        running = sqlq.current_job()
        if running.attempt == 1:
            execute(watched_orders, "UPDATE jobs SET lease_token = lease_token + 1")
        with way(database_url) as caller:
            caller.begin()
            caller.order(running.attempt)
            with pytest.raises(sqlq.LeaseLostError):
                complete(caller, running)
            caller.rollback()

    run_one(app, pay, max_attempts=1)
    assert orders_and_jobs(watched_orders)[0] == []
