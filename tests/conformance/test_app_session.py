"""An App with a session of its own, for jobs that are enqueued without one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import flask
import flask_sqlalchemy
import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import sqlq
from sqlq.testing import inline
from tests.kit import count, needs
from tests.kit.postgresql import async_database_url

pytestmark = pytest.mark.each_database

current: ContextVar[Any] = ContextVar("current", default=None)


@pytest.fixture
def shop(database_url: str) -> Iterator[Engine]:
    engine = create_engine(database_url)
    yield engine
    engine.dispose()


@pytest.fixture
def send(app: sqlq.App) -> sqlq.Task[..., None]:
    @app.task(name="shop.send", max_attempts=1)
    def send(order_id: int = 0) -> None: ...

    return send


def test_a_scoped_session_is_joined(
    app: sqlq.App, send: sqlq.Task[..., None], database_url: str, shop: Engine
) -> None:
    sessions = scoped_session(sessionmaker(shop))
    app.use(database_url, session=sessions)
    app.enqueue(send.new(1))
    app.enqueue_many([send.new(2), send.new(3)])
    assert count(shop) == 0
    sessions.rollback()
    app.enqueue(send.new(1))
    sessions.commit()
    assert count(shop) == 1
    app.enqueue(send.new(4), commit=True)
    with pytest.raises(sqlq.EnqueueError, match="commit=True is for a transaction of the job's own"):
        app.enqueue(send.new(4), session=sessions, commit=True)
    assert count(shop) == 2
    with Session(shop) as other:
        app.enqueue(send.new(5), session=other)
        sessions.commit()
        assert count(shop) == 2
        other.commit()
    assert count(shop) == 3
    sessions.remove()


def test_flask_sqlalchemys_session_is_joined(
    app: sqlq.App, send: sqlq.Task[..., None], database_url: str, shop: Engine
) -> None:
    web, db = flask.Flask("shop"), flask_sqlalchemy.SQLAlchemy()
    web.config["SQLALCHEMY_DATABASE_URI"] = shop.url
    db.init_app(web)
    app.use(database_url, session=db.session)
    with web.app_context():
        app.enqueue(send.new())
        db.session.commit()
        app.enqueue(send.new())  # the end of the request rolls back
    with web.app_context():
        db.engine.dispose()
    assert count(shop) == 1
    with pytest.raises(RuntimeError, match="outside of application context"):
        app.enqueue(send.new())


def test_the_session_function_selects_the_session_to_join(
    app: sqlq.App, send: sqlq.Task[..., None], database_url: str, shop: Engine
) -> None:
    app.use(database_url, session=current.get)
    app.enqueue(send.new(1))
    assert count(shop) == 1
    for session in (Session(shop), shop.connect()):
        current.set(session)
        app.enqueue(send.new(1))
        session.rollback()
        session.close()
        current.set(None)
    assert count(shop) == 1


def test_an_asynchronous_session_is_joined(
    app: sqlq.App, send: sqlq.Task[..., None], database_url: str, shop: Engine
) -> None:
    app.use(database_url, session=current.get)

    async def main() -> None:
        engine = create_async_engine(async_database_url(database_url))
        async with AsyncSession(engine) as session:
            current.set(session)
            await app.aenqueue(send.new(1))
            await session.rollback()
            await app.aenqueue_many([send.new(2)])
            await session.commit()
            await app.aenqueue(send.new(3), commit=True)
            await session.rollback()
        current.set(None)
        await app.aenqueue(send.new(4))
        await engine.dispose()

    asyncio.run(main())
    assert count(shop) == 3


def test_handlers_of_a_worker_join_the_app_session(
    app: sqlq.App, send: sqlq.Task[..., None], database_url: str, shop: Engine
) -> None:
    sessions = scoped_session(sessionmaker(shop))
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
    app: sqlq.App, send: sqlq.Task[..., None], database_url: str, shop: Engine
) -> None:
    sessions = scoped_session(sessionmaker(shop))
    app.use(database_url, session=sessions)
    app.use(database_url)
    app.enqueue(send.new())
    sessions.remove()
    assert count(shop) == 0


def test_inline_waits_for_the_sessions_commit(
    app: sqlq.App, send: sqlq.Task[..., None], database_url: str, shop: Engine
) -> None:
    sessions = scoped_session(sessionmaker(shop))
    app.use(database_url, session=sessions)
    with inline(app, at="commit") as ran:
        app.enqueue(send.new())
        assert [job.state for job in ran.jobs] == ["available"]
        sessions.commit()
        assert [job.state for job in ran.jobs] == ["finished"]
    sessions.remove()


@needs("cheap")
def test_a_session_that_all_threads_would_share_is_refused(database_url: str, shop: Engine) -> None:
    connection = shop.raw_connection()
    driver = connection.driver_connection
    for wrong in (Session(shop), shop, shop.connect(), driver, Session, 7):
        with pytest.raises(
            sqlq.errors.ConfigurationError, match=r"App\(session=…\) is .*: give a scoped_session, or"
        ):
            sqlq.App(database_url, session=wrong)  # type: ignore[arg-type]  # what is refused here
    connection.close()
