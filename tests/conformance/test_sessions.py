"""A job is kept exactly if the session's transaction commits, even where a framework ends it (G1).

A session that cannot keep this promise is refused.
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import warnings
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import django
import django.conf
import django.db
import pytest
import sqlmodel
import transaction
import zope.sqlalchemy
from django.db import transaction as blocks
from sqlalchemy import Connection, Engine, event
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker

import sqlq
from sqlq.database.caller import drivers
from sqlq.testing import inline
from tests.kit import count, needs, run_one
from tests.kit.callers import OfSqlalchemy, orders_and_jobs
from tests.kit.notifications import Listener
from tests.kit.postgresql import async_database_url
from tests.kit.workers import listening

pytestmark = pytest.mark.each_database


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what Pyramid imports is deprecated
    from pyramid.config import Configurator
    from pyramid.request import Request
    from pyramid.response import Response


class Base(DeclarativeBase): ...


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)


@pytest.fixture
def send(app: sqlq.App) -> sqlq.Task[..., None]:
    @app.task(name="shop.send", max_attempts=1)
    def send(order_id: int = 0) -> None: ...

    return send


@pytest.fixture
def shop(engine: Engine) -> Engine:
    """A user's engine, with a table of orders."""
    if engine.dialect.name == "sqlite":
        sqlq.configure_sqlite(engine)
    Base.metadata.create_all(engine)
    return engine


# -- zope.sqlalchemy -----------------------------------------------------------------------------------------


def only_enqueue(session: Any, app: sqlq.App, new: sqlq.NewJob) -> None:
    app.enqueue(new, session=session)


def read_first(session: Any, app: sqlq.App, new: sqlq.NewJob) -> None:
    session.get(Order, 1)
    app.enqueue_many([new], session=session)


def write_by_orm(session: Any, app: sqlq.App, new: sqlq.NewJob) -> None:
    session.add(Order())
    app.enqueue(new, session=session)


def in_a_savepoint(session: Any, app: sqlq.App, new: sqlq.NewJob) -> None:
    with session.begin_nested():
        app.enqueue(new, session=session)


WRITES = {"enqueue": only_enqueue, "read": read_first, "orm": write_by_orm, "savepoint": in_a_savepoint}


def registered(engine: Engine, **options: Any) -> Any:
    """A scoped session whose transactions are those of zope's manager."""
    maker = scoped_session(sessionmaker(engine))
    zope.sqlalchemy.register(maker, **options)
    return maker


@pytest.mark.parametrize("name", WRITES)
def test_a_job_is_committed_by_zopes_transaction(app: sqlq.App, send: Any, shop: Engine, name: str) -> None:
    maker, write = registered(shop), WRITES[name]
    with inline(app, at="commit") as ran:
        with transaction.manager:
            write(maker, app, send.new(1))
        transaction.begin()
        write(maker, app, send.new(1))
        transaction.abort()
    assert [job.state for job in ran.jobs] == ["finished"]
    with transaction.manager:
        write(maker, app, send.new(1))
    assert count(shop) == 1
    transaction.begin()
    write(maker, app, send.new(1))
    transaction.abort()
    assert count(shop) == 1


@pytest.mark.parametrize("name", WRITES)
def test_a_job_is_committed_by_pyramids_request(app: sqlq.App, send: Any, shop: Engine, name: str) -> None:
    """As Pyramid's cookiecutter does: a session for each request, joined to the request's own manager."""
    maker = sessionmaker(shop)

    def session_of(request: Any) -> Session:
        session = maker(info={"request": request})
        zope.sqlalchemy.register(session, transaction_manager=request.tm)
        return session

    def view(request: Any) -> Response:
        WRITES[name](request.dbsession, app, send.new(1))
        return Response("done", status=request.params["status"])

    config = Configurator(
        settings={
            "tm.manager_hook": "pyramid_tm.explicit_manager",
            "tm.commit_veto": "pyramid_tm.default_commit_veto",
        }
    )
    config.include("pyramid_tm")
    config.add_request_method(session_of, "dbsession", reify=True)
    config.add_route("order", "/")
    config.add_view(view, route_name="order")
    web = config.make_wsgi_app()
    for status, expected in (("500", 0), ("200", 1)):
        assert Request.blank(f"/?status={status}").get_response(web).status_code == int(status)
        assert count(shop) == expected


def test_a_kept_session_joins_each_transaction_of_zope(app: sqlq.App, send: Any, shop: Engine) -> None:
    with Session(shop) as session:
        zope.sqlalchemy.register(session, keep_session=True)
        with transaction.manager:
            session.get(Order, 1)  # not joined again by what is read after this
        for number in (1, 2):
            with transaction.manager:
                app.enqueue(send.new(), session=session)
            assert count(shop) == number
    with transaction.manager:
        by_hand = Session(shop)
        zope.sqlalchemy.datamanager.join_transaction(by_hand)
        app.enqueue(send.new(), session=by_hand)
    assert count(shop) == 3


def test_a_session_that_zope_takes_for_read_only_is_refused(app: sqlq.App, send: Any, shop: Engine) -> None:
    maker = registered(shop, initial_state=zope.sqlalchemy.datamanager.STATUS_READONLY)
    with (
        transaction.manager,
        pytest.raises(sqlq.EnqueueError, match="this session registered as read only, and rolls back"),
    ):
        app.enqueue(send.new(), session=maker)
    assert count(shop) == 0


def test_a_handler_that_only_reads_completes_in_zopes_transaction(app: sqlq.App, shop: Engine) -> None:
    def pay() -> None:
        maker = registered(shop)
        with transaction.manager:
            maker.get(Order, 1)
            sqlq.current_job().complete(maker)

    # an attempt that reads, sees the worker's own write, and then writes, SQLite refuses
    assert run_one(app, pay).state == "finished"


@pytest.mark.parametrize("name", ["before_flush", "after_flush", "after_flush_postexec", "before_commit"])
def test_a_job_enqueued_by_a_session_event(app: sqlq.App, send: Any, shop: Engine, name: str) -> None:
    with sqlmodel.Session(shop) as session:
        event.listen(session, name, lambda session, *_: app.enqueue(send.new(), session=session))
        for number, end in enumerate((session.rollback, session.commit)):
            session.add(Order(id=number))
            session.flush()
            end()
    assert count(shop) == 1


# -- AUTOCOMMIT ----------------------------------------------------------------------------------------------


class Automatic(sqlite3.Connection):
    autocommit = True  # as Python 3.12 has it


BY_ENGINE = {"isolation_level": "AUTOCOMMIT"}
AUTOMATIC: dict[str, tuple[str, str, type[Any], dict[str, Any]]] = {
    "psycopg": ("postgresql", "psycopg", Session, BY_ENGINE),
    "psycopg2": ("postgresql", "psycopg2", Connection, BY_ENGINE),
    "asyncpg": ("postgresql", "asyncpg", AsyncSession, BY_ENGINE),
    "psycopg_async": ("postgresql", "psycopg_async", AsyncSession, BY_ENGINE),
    "pysqlite": ("sqlite", "pysqlite", Session, BY_ENGINE),
    "pysqlite_connection": ("sqlite", "pysqlite", Connection, BY_ENGINE),
    "aiosqlite": ("sqlite", "aiosqlite", AsyncSession, BY_ENGINE),
    "of_psycopg": ("postgresql", "psycopg", Session, {"connect_args": {"autocommit": True}}),
    "of_sqlite3": ("sqlite", "pysqlite", Session, {"connect_args": {"isolation_level": None}}),
    "behind_aiosqlite": ("sqlite", "aiosqlite", AsyncSession, {"connect_args": {"factory": Automatic}}),
}
if sys.version_info >= (3, 12):
    for level in (None, ""):
        by_sqlite3 = {"connect_args": {"autocommit": True, "isolation_level": level}}
        AUTOMATIC[f"pysqlite_{level}"] = ("sqlite", "pysqlite", Session, by_sqlite3)
        AUTOMATIC[f"aiosqlite_{level}"] = ("sqlite", "aiosqlite", AsyncSession, by_sqlite3)


@pytest.mark.parametrize(
    ("database_url", "driver", "kind", "options"),
    [pytest.param(*row, id=name) for name, row in AUTOMATIC.items()],
    indirect=["database_url"],
)
def test_autocommit_is_refused(
    app: sqlq.App,
    send: Any,
    engine: Engine,
    database_url: str,
    driver: str,
    kind: type[Any],
    options: dict[str, Any],
) -> None:
    with OfSqlalchemy(driver, kind)(database_url, configured=False, **options) as caller:
        for _ in range(2):
            with pytest.raises(
                sqlq.EnqueueError, match="this connection is in AUTOCOMMIT, where no rollback"
            ):
                caller.enqueue(app, send.new(1))
            caller.rollback()
    assert count(engine) == 0


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sqlite3 has had autocommit since Python 3.12")
@needs("file")
@pytest.mark.parametrize("isolation_level", [None, ""])
@pytest.mark.parametrize("driver", ["pysqlite", "aiosqlite"])
def test_a_connection_of_sqlite3_without_autocommit_is_taken(
    app: sqlq.App, send: Any, engine: Engine, database_url: str, driver: str, isolation_level: str | None
) -> None:
    way = OfSqlalchemy(driver, AsyncSession if driver == "aiosqlite" else Session)
    arguments = {"autocommit": False, "isolation_level": isolation_level}
    with way(database_url, configured=False, connect_args=arguments) as caller:
        caller.enqueue(app, send.new(1))
        caller.rollback()
        with caller.savepoint():  # which is not the outermost, as one always is open around it
            caller.enqueue(app, send.new(1))
        caller.rollback()
    assert count(engine) == 0


@needs("cheap")
def test_a_transaction_begun_by_a_hook_rolls_back_its_job(app: sqlq.App, send: Any, shop: Engine) -> None:
    with shop.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
        app.enqueue(send.new(1), session=conn)
        conn.rollback()
    assert count(shop) == 0


def test_completing_and_inline_in_autocommit_are_refused(app: sqlq.App, send: Any, engine: Engine) -> None:
    def pay() -> None:
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
            sqlq.current_job().complete(conn)

    assert "is in AUTOCOMMIT" in run_one(app, pay, max_attempts=1).message
    with (
        inline(app, at="commit"),
        engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn,
        pytest.raises(sqlq.EnqueueError, match="is in AUTOCOMMIT"),
    ):
        app.enqueue(send.new(1), session=conn)


# -- the App's own session -----------------------------------------------------------------------------------


current: ContextVar[Any] = ContextVar("current", default=None)


def test_a_scoped_session_is_joined(app: sqlq.App, send: Any, database_url: str, engine: Engine) -> None:
    sessions = scoped_session(sessionmaker(engine))
    app.use(database_url, session=sessions)
    app.use(database_url)  # which keeps the session
    app.enqueue(send.new(1))
    app.enqueue_many([send.new(2), send.new(3)])
    assert count(engine) == 0
    sessions.rollback()
    app.enqueue(send.new(1))
    sessions.commit()
    assert count(engine) == 1
    app.enqueue(send.new(4), commit=True)
    with pytest.raises(sqlq.EnqueueError, match="commit=True is for a transaction of the job's own"):
        app.enqueue(send.new(4), session=sessions, commit=True)
    assert count(engine) == 2
    with Session(engine) as other:
        app.enqueue(send.new(5), session=other)
        sessions.commit()
        assert count(engine) == 2
        other.commit()
    assert count(engine) == 3
    with inline(app, at="commit") as ran:
        app.enqueue(send.new())
        assert [job.state for job in ran.jobs] == ["available"]
        sessions.commit()
        assert [job.state for job in ran.jobs] == ["finished"]
    sessions.remove()


def test_an_asynchronous_session_is_joined(
    app: sqlq.App, send: Any, database_url: str, engine: Engine
) -> None:
    app.use(database_url, session=current.get)

    async def main() -> None:
        own = create_async_engine(async_database_url(database_url))
        async with AsyncSession(own) as session:
            current.set(session)
            await app.aenqueue(send.new(1))
            await session.rollback()
            await app.aenqueue_many([send.new(2)])
            await session.commit()
            await app.aenqueue(send.new(3), commit=True)
            await session.rollback()
        current.set(None)
        await app.aenqueue(send.new(4))
        await own.dispose()

    asyncio.run(main())
    assert count(engine) == 3


# -- Django --------------------------------------------------------------------------------------------------


def order(connection: Any, id: int) -> None:
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO orders (id) VALUES (%s)", [id])


def order_and_fail(app: sqlq.App, job: sqlq.NewJob, connection: Any, id: int) -> None:
    order(connection, id)
    app.enqueue(job, session=connection)
    raise ZeroDivisionError


def test_an_atomic_block_commits_or_rolls_back_write_and_job(
    app: sqlq.App, send: Any, watched_orders: Engine, connection: Any
) -> None:
    with blocks.atomic(using=connection.alias):
        order(connection, 1)
        first = app.enqueue(send.new(1), session=connection)
        with suppress(ZeroDivisionError), blocks.atomic(using=connection.alias):
            order_and_fail(app, send.new(2).set(unique_key="k"), connection, 2)
        second, third = app.enqueue_many(
            [send.new(3).set(unique_key="k"), send.new(4).set(unique_key="l")], session=connection
        )
        assert orders_and_jobs(watched_orders) == ([], [])
    with suppress(ZeroDivisionError), blocks.atomic(using=connection.alias):
        order_and_fail(app, send.new(5), connection, 5)
    jobs = sorted([first.id, second.id, third.id])
    assert orders_and_jobs(watched_orders) == ([1], jobs)
    assert connection.get_autocommit()
    outside = app.enqueue(send.new(1), session=connection)
    assert orders_and_jobs(watched_orders)[1] == [*jobs, outside.id], "it is committed at once"


def test_an_error_is_djangos_and_marks_its_block(
    app: sqlq.App, send: Any, watched_orders: Engine, connection: Any
) -> None:
    with blocks.atomic(using=connection.alias):
        order(connection, 1)
        with pytest.raises(sqlq.EnqueueError):
            app.enqueue(send, session=connection)
        assert not connection.needs_rollback
        # mysqlclient takes a CHECK for an error of operation
        with pytest.raises((django.db.IntegrityError, django.db.OperationalError), match="priority"):
            app.enqueue(replace(send.new(1), priority=1_000), session=connection)
        with pytest.raises(blocks.TransactionManagementError, match="An error occurred in the current"):
            app.enqueue(send.new(2), session=connection)
    assert orders_and_jobs(watched_orders) == ([], [])


def test_enqueue_takes_djangos_connection_proxy(
    app: sqlq.App, send: Any, watched_orders: Engine, connection: Any
) -> None:
    from django.utils.connection import ConnectionProxy

    proxy: Any = ConnectionProxy(django.db.connections, connection.alias)
    app.use(watched_orders.url, session=proxy)
    with suppress(ZeroDivisionError), blocks.atomic(using=connection.alias):
        app.enqueue(send.new(1))
        raise ZeroDivisionError
    with blocks.atomic(using=connection.alias):
        job = app.enqueue(send.new(1))
    assert orders_and_jobs(watched_orders)[1] == [job.id]


@needs("listen")
def test_a_commit_of_djangos_notifies_workers_and_a_rollback_does_not(
    app: sqlq.App, send: Any, connection: Any
) -> None:
    heard = listening(app, "enqueued")
    listener = Listener(app)
    with suppress(ZeroDivisionError), blocks.atomic(using=connection.alias):
        app.enqueue(send.new(1), session=connection)
        raise ZeroDivisionError
    assert listener.hears_no_more()
    with blocks.atomic(using=connection.alias):
        job = app.enqueue(send.new(2), session=connection)
    assert listener.hears_one()
    assert app._events.flush(60)
    assert [event.id for event in heard] == [job.id]
    listener.close()


def test_a_handler_completes_in_a_transaction_of_djangos(
    app: sqlq.App, watched_orders: Engine, connection: Any
) -> None:
    def pay() -> None:
        own = django.db.connections[connection.alias]
        attempt = sqlq.current_job().attempt
        with sqlq.current_job().completing(own) as same:
            assert same is own
            order(own, attempt)
            if attempt == 1:
                raise ZeroDivisionError
        own.close()

    done = run_one(app, pay)
    assert (done.state, done.attempts) == ("finished", 2)
    assert orders_and_jobs(watched_orders) == ([2], [])


@needs("mariadb")
def test_mysql_is_refused_by_name(
    app: sqlq.App, send: Any, connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = drivers.PyMySQL.run

    def of_mysql(self: drivers.PyMySQL, statement: str, parameters: Any) -> Any:
        return run(self, statement.replace("VERSION()", "'8.0.36'"), parameters)

    monkeypatch.setattr(drivers.PyMySQL, "run", of_mysql)
    with pytest.raises(sqlq.errors.UnsupportedDatabaseError, match=r"not on MySQL, .* to MySQL 8\.0\.36"):
        app.enqueue(send.new(1), session=connection)
