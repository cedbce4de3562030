"""A job is kept exactly if the session's transaction commits, even where a framework ends it (G1).

A session that cannot keep this promise is refused.
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import flask
import flask_sqlalchemy
import pytest
import sqlmodel
import transaction
import zope.sqlalchemy
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker

import sqlq
from sqlq.testing import inline
from tests.kit import count, needs
from tests.kit.callers import OfSqlalchemy, Way
from tests.kit.postgresql import async_database_url

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
    session.add(Order(id=1))
    app.enqueue(new, session=session)


def in_a_savepoint(session: Any, app: sqlq.App, new: sqlq.NewJob) -> None:
    with session.begin_nested():
        app.enqueue(new, session=session)


in_every_case = pytest.mark.parametrize(
    "write",
    [
        pytest.param(only_enqueue, id="enqueue"),
        pytest.param(read_first, id="read"),
        pytest.param(write_by_orm, id="orm"),
        pytest.param(in_a_savepoint, id="savepoint"),
    ],
)


@in_every_case
def test_a_job_is_committed_by_zopes_transaction(
    app: sqlq.App, send: Any, shop: Engine, write: Callable[..., None]
) -> None:
    maker = scoped_session(sessionmaker(shop))
    zope.sqlalchemy.register(maker)
    with transaction.manager:
        write(maker, app, send.new(1))
    assert count(shop) == 1
    transaction.begin()
    write(maker, app, send.new(1))
    transaction.abort()
    assert count(shop) == 1


@in_every_case
def test_a_job_is_committed_by_pyramids_request(
    app: sqlq.App, send: Any, shop: Engine, write: Callable[..., None]
) -> None:
    """As Pyramid's cookiecutter does: a session for each request, joined to the request's own manager."""
    maker = sessionmaker(shop)

    def session_of(request: Any) -> Session:
        session = maker(info={"request": request})
        zope.sqlalchemy.register(session, transaction_manager=request.tm)
        return session

    def view(request: Any) -> Response:
        write(request.dbsession, app, send.new(1))
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
    session = Session(shop)
    zope.sqlalchemy.register(session, keep_session=True)
    with transaction.manager:
        session.get(Order, 1)  # not joined again by what is read after this
    for number in (1, 2):
        with transaction.manager:
            app.enqueue(send.new(), session=session)
        assert count(shop) == number
    session.close()


@needs("postgresql")
def test_a_job_is_committed_by_zope_in_two_phases(app: sqlq.App, send: Any, shop: Engine) -> None:
    maker = scoped_session(sessionmaker(shop, twophase=True))
    zope.sqlalchemy.register(maker)
    with transaction.manager:
        app.enqueue(send.new(), session=maker)
    transaction.begin()
    app.enqueue(send.new(), session=maker)
    transaction.abort()
    assert count(shop) == 1


def test_a_session_joined_by_hand_commits_its_job(app: sqlq.App, send: Any, shop: Engine) -> None:
    with transaction.manager:
        session = Session(shop)
        zope.sqlalchemy.datamanager.join_transaction(session)
        app.enqueue(send.new(), session=session)
    assert count(shop) == 1


def test_a_session_that_zope_takes_for_read_only_is_refused(app: sqlq.App, send: Any, shop: Engine) -> None:
    maker = scoped_session(sessionmaker(shop))
    zope.sqlalchemy.register(maker, initial_state=zope.sqlalchemy.datamanager.STATUS_READONLY)
    with (
        transaction.manager,
        pytest.raises(sqlq.EnqueueError, match="this session registered as read only, and rolls back"),
    ):
        app.enqueue(send.new(), session=maker)
    assert count(shop) == 0


def test_a_refused_job_leaves_zopes_session_unchanged(app: sqlq.App, send: Any, shop: Engine) -> None:
    maker = scoped_session(sessionmaker(shop))
    zope.sqlalchemy.register(maker)
    with shop.begin() as conn:
        conn.execute(text("ALTER TABLE jobs RENAME TO elsewhere"))
    with transaction.manager:
        with pytest.raises(Exception, match="jobs"):
            app.enqueue(send.new(), session=maker)
        assert zope.sqlalchemy.datamanager._SESSION_STATE[maker()] == "active"


def test_a_handler_that_only_reads_completes_in_zopes_transaction(app: sqlq.App, shop: Engine) -> None:
    def pay() -> None:
        maker = scoped_session(sessionmaker(shop))
        zope.sqlalchemy.register(maker)
        with transaction.manager:
            maker.get(Order, 1)
            sqlq.current_job().complete(maker)

    # an attempt that reads, sees the worker's own write, and then writes, SQLite refuses
    job = app.enqueue(app.task(name="t", backoff="0s")(pay).new())
    app.worker(drain=True).run()
    assert app.jobs.get(job.id).state == "finished"


def test_a_job_runs_inline_when_zopes_transaction_commits(app: sqlq.App, send: Any, shop: Engine) -> None:
    maker = scoped_session(sessionmaker(shop))
    zope.sqlalchemy.register(maker)
    with inline(app, at="commit") as ran:
        with transaction.manager:
            app.enqueue(send.new(), session=maker)
        transaction.begin()
        app.enqueue(send.new(), session=maker)
        transaction.abort()
    assert [job.state for job in ran.jobs] == ["finished"]


# -- other frameworks and hooks ------------------------------------------------------------------------------


def test_sqlmodels_session(app: sqlq.App, send: Any, shop: Engine) -> None:
    def get_session() -> Iterator[Session]:
        """As a dependency of FastAPI."""
        with sqlmodel.Session(shop) as session:
            yield session

    for commits in (True, False):
        for session in get_session():
            app.enqueue(send.new(), session=session)
            if commits:
                session.commit()
    assert count(shop) == 1


@pytest.mark.parametrize("name", ["before_flush", "after_flush", "after_flush_postexec", "before_commit"])
def test_a_job_enqueued_by_a_session_event(app: sqlq.App, send: Any, shop: Engine, name: str) -> None:
    session = Session(shop)
    event.listen(session, name, lambda session, *_: app.enqueue(send.new(), session=session))
    for number in (1, 2):
        session.add(Order(id=number))
        session.flush()
        if number == 1:
            session.rollback()
        else:
            session.commit()
    assert count(shop) == 1
    session.close()


# -- AUTOCOMMIT ----------------------------------------------------------------------------------------------

every_driver = pytest.mark.parametrize(
    ("database_url", "way"),
    [
        ("postgresql", OfSqlalchemy("psycopg", Session)),
        ("postgresql", OfSqlalchemy("psycopg2", Connection)),
        ("postgresql", OfSqlalchemy("asyncpg", AsyncSession)),
        ("postgresql", OfSqlalchemy("psycopg_async", AsyncSession)),
        ("sqlite", OfSqlalchemy("pysqlite", Session)),
        ("sqlite", OfSqlalchemy("pysqlite", Connection)),
        ("sqlite", OfSqlalchemy("aiosqlite", AsyncSession)),
    ],
    indirect=["database_url"],
)


@every_driver
def test_autocommit_is_refused(app: sqlq.App, send: Any, engine: Engine, database_url: str, way: Way) -> None:
    with way(database_url, configured=False, isolation_level="AUTOCOMMIT") as caller:
        for _ in range(2):
            with pytest.raises(
                sqlq.EnqueueError, match="this connection is in AUTOCOMMIT, where no rollback"
            ):
                caller.enqueue(app, send.new(1))
            caller.rollback()
    assert count(engine) == 0


@pytest.mark.parametrize(
    ("database_url", "arguments"),
    [("postgresql", {"autocommit": True}), ("sqlite", {"isolation_level": None})],
    indirect=["database_url"],
)
def test_a_driver_that_commits_by_itself_is_refused(
    app: sqlq.App, send: Any, database_url: str, arguments: dict[str, Any]
) -> None:
    engine = create_engine(database_url, connect_args=arguments)
    with Session(engine) as session, pytest.raises(sqlq.EnqueueError, match="is in AUTOCOMMIT"):
        app.enqueue(send.new(1), session=session)
    engine.dispose()


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sqlite3 has had autocommit since Python 3.12")
@needs("file")
@pytest.mark.parametrize("isolation_level", [None, ""])
@pytest.mark.parametrize("autocommit", [True, False])
@pytest.mark.parametrize(
    "way",
    [OfSqlalchemy("pysqlite", Session), OfSqlalchemy("aiosqlite", AsyncSession)],
    ids=lambda way: way.driver,
)
def test_autocommit_of_sqlite3_is_refused_whatever_its_isolation_level(
    app: sqlq.App,
    send: Any,
    engine: Engine,
    database_url: str,
    way: Way,
    autocommit: bool,
    isolation_level: str | None,
) -> None:
    arguments = {"autocommit": autocommit, "isolation_level": isolation_level}
    with way(database_url, configured=False, connect_args=arguments) as caller:
        if autocommit:
            with pytest.raises(sqlq.EnqueueError, match="is in AUTOCOMMIT"):
                caller.enqueue(app, send.new(1))
        else:
            caller.enqueue(app, send.new(1))
            caller.rollback()
            with caller.savepoint():  # which is not the outermost, as one always is open around it
                caller.enqueue(app, send.new(1))
        caller.rollback()
    assert count(engine) == 0


class Automatic(sqlite3.Connection):
    autocommit = True  # as Python 3.12 has it


@needs("file")
def test_autocommit_of_a_connection_behind_aiosqlite_is_refused(
    app: sqlq.App, send: Any, engine: Engine, database_url: str
) -> None:
    way = OfSqlalchemy("aiosqlite", AsyncSession)
    with (
        way(database_url, configured=False, connect_args={"factory": Automatic}) as caller,
        pytest.raises(sqlq.EnqueueError, match="is in AUTOCOMMIT"),
    ):
        caller.enqueue(app, send.new(1))
    assert count(engine) == 0


def test_only_the_transaction_in_autocommit_is_refused(app: sqlq.App, send: Any, engine: Engine) -> None:
    with Session(engine) as session:
        session.connection(execution_options={"isolation_level": "AUTOCOMMIT"})
        with pytest.raises(sqlq.EnqueueError, match="is in AUTOCOMMIT"):
            app.enqueue(send.new(1), session=session)
        session.rollback()
        app.enqueue(send.new(1), session=session)
        session.commit()
    assert count(engine) == 1


@needs("cheap")
def test_a_transaction_begun_by_a_hook_rolls_back_its_job(app: sqlq.App, send: Any, shop: Engine) -> None:
    with shop.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
        app.enqueue(send.new(1), session=conn)
        conn.rollback()
    assert count(shop) == 0


def test_completing_in_autocommit_is_refused(app: sqlq.App, engine: Engine) -> None:
    def pay() -> None:
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
            sqlq.current_job().complete(conn)

    job = app.enqueue(app.task(name="t", max_attempts=1)(pay).new())
    app.worker(drain=True).run()
    assert "is in AUTOCOMMIT" in str(app.jobs.get(job.id).message)


def test_inline_refuses_autocommit(app: sqlq.App, send: Any, engine: Engine) -> None:
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
    sessions.remove()


def test_flask_sqlalchemys_session_is_joined(
    app: sqlq.App, send: Any, database_url: str, engine: Engine
) -> None:
    web, db = flask.Flask("shop"), flask_sqlalchemy.SQLAlchemy()
    web.config["SQLALCHEMY_DATABASE_URI"] = engine.url
    db.init_app(web)
    app.use(database_url, session=db.session)
    with web.app_context():
        app.enqueue(send.new())
        db.session.commit()
        app.enqueue(send.new())  # the end of the request rolls back
    with web.app_context():
        db.engine.dispose()
    assert count(engine) == 1
    with pytest.raises(RuntimeError, match="outside of application context"):
        app.enqueue(send.new())


def test_the_session_function_selects_the_session_to_join(
    app: sqlq.App, send: Any, database_url: str, engine: Engine
) -> None:
    app.use(database_url, session=current.get)
    app.enqueue(send.new(1))
    assert count(engine) == 1
    for session in (Session(engine), engine.connect()):
        current.set(session)
        app.enqueue(send.new(1))
        session.rollback()
        session.close()
        current.set(None)
    assert count(engine) == 1


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


def test_handlers_of_a_worker_join_the_app_session(
    app: sqlq.App, send: Any, database_url: str, engine: Engine
) -> None:
    sessions = scoped_session(sessionmaker(engine))
    app.use(database_url, session=sessions)

    @app.task(name="shop.order", max_attempts=1)
    def order() -> None:
        app.enqueue(send.new(1))
        sessions.rollback()
        app.enqueue(send.new(2))
        sessions.commit()
        sessions.remove()

    app.enqueue(order.new(), commit=True)
    app.worker(drain=True, concurrency=1).run()
    assert sorted(job.payload["args"][0] for job in app.jobs.list(task="shop.send")) == [2]


def test_use_without_a_session_keeps_the_last_one(
    app: sqlq.App, send: Any, database_url: str, engine: Engine
) -> None:
    sessions = scoped_session(sessionmaker(engine))
    app.use(database_url, session=sessions)
    app.use(database_url)
    app.enqueue(send.new())
    sessions.remove()
    assert count(engine) == 0


def test_inline_waits_for_the_sessions_commit(
    app: sqlq.App, send: Any, database_url: str, engine: Engine
) -> None:
    sessions = scoped_session(sessionmaker(engine))
    app.use(database_url, session=sessions)
    with inline(app, at="commit") as ran:
        app.enqueue(send.new())
        assert [job.state for job in ran.jobs] == ["available"]
        sessions.commit()
        assert [job.state for job in ran.jobs] == ["finished"]
    sessions.remove()


@needs("cheap")
def test_a_session_that_all_threads_would_share_is_refused(database_url: str, engine: Engine) -> None:
    connection = engine.raw_connection()
    driver = connection.driver_connection
    for wrong in (Session(engine), engine, engine.connect(), driver, Session, 7):
        with pytest.raises(
            sqlq.errors.ConfigurationError, match=r"App\(session=…\) is .*: give a scoped_session, or"
        ):
            sqlq.App(database_url, session=wrong)  # type: ignore[arg-type]  # what is refused here
    connection.close()
