"""sqlq's tables in a database in memory, or in a transaction that is rolled back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, inspect, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.pool import StaticPool

import sqlq
from sqlq.schema.version import HEAD
from sqlq.testing import assert_enqueued, assert_not_enqueued, create_tables, drain, inline, on_database
from tests.kit import needs
from tests.kit.flows import RealShop
from tests.kit.postgresql import async_database_url

IN_MEMORY = "in memory is seen by one connection only"


@pytest.fixture
def memory() -> Iterator[Engine]:
    """A database in memory, as Flask's and FastAPI's own notes on testing have it."""
    engine = create_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})
    yield engine
    engine.dispose()


def tables(conn: Connection, schema: str | None = None) -> list[str]:
    found = inspect(conn)
    return sorted([*found.get_table_names(schema), *found.get_view_names(schema)])


OURS = [
    *("failed_jobs", "finished_jobs", "job_states", "jobs", "queue_stats", "sqlq_audit", "sqlq_edges"),
    *("sqlq_flows", "sqlq_limits", "sqlq_queues", "sqlq_schedules", "sqlq_signals", "sqlq_version"),
    *("sqlq_waits", "sqlq_wakes", "sqlq_workers"),
]
PLACES: dict[str, Callable[[sqlq.App, Engine], Any]] = {
    "url": lambda app, engine: app.use("sqlite://"),
    "engine": lambda app, engine: app.use(engine=engine),
    "on_database": lambda app, engine: on_database(app, "sqlite://"),
}


@pytest.mark.parametrize("place", PLACES)
def test_jobs_are_enqueued_through_a_session_on_memory(memory: Engine, place: str) -> None:
    app = sqlq.App()
    shop = RealShop(app)
    placed = PLACES[place](app, memory)
    with placed if place == "on_database" else nullcontext():
        with memory.begin() as conn:
            create_tables(conn)
        with Session(memory) as session:
            app.enqueue(shop.note.new("rolled back"), session=session)
            assert_enqueued(shop.note, args=["rolled back"], session=session, app=app)
            session.rollback()
            assert_not_enqueued(shop.note, session=session, app=app)
            app.enqueue_many([shop.note.new("a"), shop.note.new("b").set(unique_key="b")], session=session)
            session.commit()
            assert not app.enqueue(shop.note.new("b").set(unique_key="b"), session=session).created
            assert assert_enqueued(shop.note, args=["b"], session=session, app=app).unique_key == "b"
    app.close()


def test_calls_that_need_their_own_connection_explain_the_alternative(memory: Engine) -> None:
    shop = RealShop(sqlq.App(engine=memory))
    with memory.begin() as conn:
        create_tables(conn)
    for use in (
        lambda: shop.app.enqueue(shop.note.new("x")),
        lambda: asyncio.run(shop.app.aenqueue(shop.note.new("x"))),
        shop.app.migrate,
        shop.app.worker().run,
        lambda: assert_enqueued(shop.note, app=shop.app),
    ):
        with pytest.raises(sqlq.errors.ConfigurationError, match=IN_MEMORY):
            use()
    with pytest.raises(sqlq.errors.ConfigurationError, match=r'sqlq\.testing\.inline\(app, at="commit"\)'):
        drain(shop.app)
    with inline(shop.app, at="commit"), Session(memory) as session:
        shop.app.enqueue(shop.note.new("as said"), session=session)
        session.commit()
    assert shop.done == ["as said"]


def test_missing_tables_in_memory_name_create_tables(memory: Engine) -> None:
    shop = RealShop(sqlq.App("sqlite://"))
    with Session(memory) as session:
        for _ in range(2):
            said = r"make them with sqlq\.testing\.create_tables\(connection\)"
            with pytest.raises(sqlq.errors.SchemaVersionError, match=said) as raised:
                shop.app.enqueue(shop.note.new("x"), session=session)
            assert "sqlq migrate" not in str(raised.value)
        create_tables(session)
        shop.app.enqueue(shop.note.new("x"), session=session)


class TestCreateTables:
    def test_create_tables_makes_all_tables_once(self, empty: Engine) -> None:
        with empty.begin() as conn:
            create_tables(conn)
            create_tables(conn)
        scope = scoped_session(sessionmaker(empty))
        with Session(empty) as session:
            create_tables(session)
            create_tables(scope)
        scope.remove()
        with empty.connect() as conn:
            assert tables(conn) == OURS
        app = sqlq.App(empty.url)
        assert app.migrate() == HEAD, "as after `sqlq migrate`"
        app.close()

    def test_create_tables_joins_a_test_that_is_rolled_back(self, empty: Engine) -> None:
        if empty.dialect.name == "sqlite":
            sqlq.configure_sqlite(empty)
        shop = RealShop(sqlq.App(empty.url))
        with empty.connect() as conn, conn.begin() as whole:
            create_tables(conn)
            with Session(conn, join_transaction_mode="create_savepoint") as session:
                shop.app.enqueue(shop.note.new("committed"), session=session)
                session.commit()
                shop.app.enqueue(shop.note.new("rolled back"), session=session)
                session.rollback()
            assert_enqueued(shop.note, args=["committed"], session=conn, app=shop.app)
            assert_not_enqueued(shop.note, args=["rolled back"], session=conn, app=shop.app)
            whole.rollback()
        with empty.connect() as conn:
            # MariaDB commits with each new table
            assert tables(conn) == (OURS if empty.dialect.name == "mariadb" else [])
            if tables(conn):
                assert conn.scalar(text("SELECT count(*) FROM jobs")) == 0
        shop.app.close()

    @needs("schemas", empty=True)
    def test_create_tables_takes_a_schema(self, empty: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        with empty.begin() as conn:
            create_tables(conn, schema="queue")
            assert tables(conn, "queue") == OURS
            monkeypatch.setenv("SQLQ_SCHEMA", "other")
            create_tables(conn)
            assert tables(conn, "other") == OURS
            assert tables(conn) == []

    def test_create_tables_works_with_run_sync(self, empty_database_url: str) -> None:
        async def main() -> None:
            engine = create_async_engine(async_database_url(empty_database_url))
            async with engine.begin() as conn:
                said = r"await connection\.run_sync\(create_tables\)"
                wrong: list[Any] = [conn, AsyncSession(engine)]
                for each in wrong:
                    with pytest.raises(sqlq.errors.ConfigurationError, match=said):
                        create_tables(each)
                await conn.run_sync(create_tables)
                assert await conn.run_sync(tables) == OURS
            async with AsyncSession(engine) as session:
                await session.run_sync(create_tables)
            await engine.dispose()

        asyncio.run(main())
