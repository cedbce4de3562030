"""Three applications of other people in small, each on both databases.

Each has its real hooks, sessions and arguments, which once were in its way here.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import flask
import flask_sqlalchemy
import pytest
import zope.sqlalchemy
from sqlalchemy import Engine, NullPool, String, create_engine, event, select, text
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, SessionTransaction, mapped_column, sessionmaker

import sqlq
from sqlq.testing import Counts, create_tables, drain, inline, on_database
from tests.kit import needs
from tests.kit.postgresql import async_database_url

pytestmark = pytest.mark.each_database

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what Pyramid imports is deprecated
    from pyramid.config import Configurator
    from pyramid.request import Request
    from pyramid.response import Response
    from pyramid.scripting import prepare
    from pyramid.threadlocal import get_current_request


class Model(DeclarativeBase): ...


class File(Model):
    __tablename__ = "files"
    id: Mapped[UUID] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(255), unique=True)
    seen_at: Mapped[str | None] = mapped_column(String(255))


@pytest.fixture
def shop(database_url: str) -> Iterator[Engine]:
    """The application's engine, with its tables."""
    engine = create_engine(database_url)
    Model.metadata.create_all(engine)
    yield engine
    engine.dispose()


def states(app: sqlq.App) -> list[tuple[str, str]]:
    return [(job.task, job.state.value) for job in reversed(app.jobs.list())]


# -- a package index: Pyramid, pyramid_tm, zope.sqlalchemy, and errors of the driver -------------------------


@pytest.fixture
def drivers_errors(shop: Engine) -> Iterator[None]:
    """A hook on the class Engine, by which the application gets the driver's errors as they are."""

    def unwrap(context: ExceptionContext) -> None:
        raise context.original_exception

    event.listen(Engine, "handle_error", unwrap)
    yield
    event.remove(Engine, "handle_error", unwrap)


@pytest.mark.usefixtures("drivers_errors")
def test_a_package_index(app: sqlq.App, shop: Engine) -> None:
    """A request is a transaction, and so is each job, in a request of its own."""
    maker = sessionmaker(shop)

    def session_of(request: Any) -> Session:
        session = maker(info={"request": request})
        zope.sqlalchemy.register(session, transaction_manager=request.tm)
        return session

    @app.task(name="index.look_at", max_attempts=1)
    def look_at(file_id: UUID, uploaded_at: datetime) -> None:
        session = get_current_request().dbsession
        file = session.get_one(File, file_id)
        file.seen_at = uploaded_at.isoformat()
        sqlq.current_job().complete(session)

    @app.task(name="index.only_reads", max_attempts=1)
    def only_reads(file_id: UUID) -> None:
        session = get_current_request().dbsession
        session.get_one(File, file_id)
        sqlq.current_job().complete(session)

    def upload(request: Any) -> Response:
        file = File(id=UUID(request.params["id"]), name=request.params["name"])
        app.enqueue(look_at.new(file.id, datetime(2030, 1, 31, tzinfo=UTC)), session=request.dbsession)
        request.dbsession.add(file)
        request.dbsession.flush()
        return Response("stored")

    def touch(request: Any) -> Response:
        app.enqueue(only_reads.new(UUID(request.params["id"])), session=request.dbsession)
        return Response("enqueued, and nothing else")

    config = Configurator(settings={"tm.manager_hook": "pyramid_tm.explicit_manager"})
    config.include("pyramid_tm")
    config.add_request_method(session_of, "dbsession", reify=True)
    for name, view in (("upload", upload), ("touch", touch)):
        config.add_route(name, f"/{name}")
        config.add_view(view, route_name=name)
    web = config.make_wsgi_app()

    @app.middleware
    def in_request(running: sqlq.JobContext) -> Iterator[None]:
        with prepare(registry=web.registry) as made, made["request"].tm:
            yield

    id, twin = uuid4(), uuid4()
    Request.blank(f"/upload?id={id}&name=teapot-1.0").get_response(web)
    kind = shop.dialect.loaded_dbapi.IntegrityError
    with pytest.raises(kind):  # the driver's, as the hook makes it: the name is taken
        Request.blank(f"/upload?id={twin}&name=teapot-1.0").get_response(web)
    Request.blank(f"/touch?id={id}").get_response(web)
    waiting = [("index.look_at", "available"), ("index.only_reads", "available")]
    assert states(app) == waiting, "none of the upload that failed"
    assert drain(app) == Counts(finished=2)
    with Session(shop) as session:
        assert session.scalars(select(File.seen_at)).all() == ["2030-01-31T00:00:00+00:00"]


# -- a payment service: asynchronous sessions, and services that enqueue without one at hand -----------------

session_of_request: ContextVar[AsyncSession] = ContextVar("session_of_request")
WAITING = "jobs that wait for the commit"


def enqueue_job(app: sqlq.App, name: str, *args: object) -> None:
    """Enqueue by name, from a plain function somewhere below a request: the job is written when its session
    commits."""
    session_of_request.get().info.setdefault(WAITING, []).append(app.named(name).new(*args))


@pytest.fixture
def jobs_at_commit(app: sqlq.App) -> Iterator[None]:
    def write(session: Session) -> None:
        if waiting := session.info.pop(WAITING, None):
            app.enqueue_many(waiting, session=session)

    def forget(session: Session, transaction: SessionTransaction) -> None:
        if transaction.parent is None:
            session.info.pop(WAITING, None)

    listeners: list[tuple[str, Callable[..., None]]] = [
        ("before_commit", write),
        ("after_transaction_end", forget),
    ]
    for name, listener in listeners:
        event.listen(Session, name, listener)
    yield
    for name, listener in listeners:
        event.remove(Session, name, listener)


@pytest.mark.usefixtures("jobs_at_commit")
def test_a_payment_service(app: sqlq.App, shop: Engine, database_url: str) -> None:
    """Its services are far from any session, and its web process imports no handler."""
    engine = create_async_engine(async_database_url(database_url), poolclass=NullPool)

    def confirm(file: File) -> None:
        enqueue_job(app, "order.confirmed", file.id, datetime(2030, 1, 31, tzinfo=UTC))

    async def request(name: str) -> None:
        async with AsyncSession(engine, expire_on_commit=False) as session, session.begin():
            session_of_request.set(session)
            file = File(id=uuid4(), name=name)
            session.add(file)
            confirm(file)
            await session.flush()

    async def requests() -> list[BaseException | None]:
        return [
            *(await asyncio.gather(request("a"), return_exceptions=True)),
            *(await asyncio.gather(request("a"), return_exceptions=True)),
            *(await asyncio.gather(request("b"), return_exceptions=True)),
        ]

    failed = [error is not None for error in asyncio.run(requests())]
    assert failed == [False, True, False]
    assert states(app) == [("order.confirmed", "available")] * 2

    # the worker's code has the handler, and its annotations
    seen = []

    @app.task(name="order.confirmed")
    async def order_confirmed(id: UUID, at: datetime) -> None:
        seen.append((type(id), at))

    assert drain(app) == Counts(finished=2)
    assert seen == [(UUID, datetime(2030, 1, 31, tzinfo=UTC))] * 2


# -- a blog: Flask, a factory, and a row for each job that the pages show ------------------------------------


class Blog:
    """Flask's factory and Flask-SQLAlchemy, and a table of exports whose key is the job's id."""

    def __init__(self, app: sqlq.App) -> None:
        self.app = app
        self.db = db = flask_sqlalchemy.SQLAlchemy()

        class Export(db.Model):  # type: ignore[name-defined,misc]
            __tablename__ = "exports"
            id = db.Column(db.Integer, primary_key=True)
            user_id = db.Column(db.Integer)
            state = db.Column(db.String(255), default="in progress")

        self.Export: Any = Export

        @app.task(name="blog.give_up")
        def give_up(ended: sqlq.JobOutcome) -> None:
            db.session.get_one(Export, ended.id).state = "failed"
            db.session.commit()

        @app.task(name="blog.export", max_attempts=1, on_failure=give_up)
        def export(user_id: int) -> None:
            job = sqlq.current_job()
            row = db.session.get(Export, job.id)
            assert row is not None, "the row is committed with the job"
            if flask.current_app.config["MAIL_IS_DOWN"]:
                raise ConnectionRefusedError
            row.state = "sent"
            job.progress(25, of=25, note="posts")
            job.complete(db.session)
            db.session.commit()

        self.export = export

    def create_app(self, url: str, **config: Any) -> flask.Flask:
        web = flask.Flask("blog")
        web.config.update(SQLALCHEMY_DATABASE_URI=url, MAIL_IS_DOWN=False, **config)
        self.db.init_app(web)
        with web.app_context():
            self.db.create_all()
            self.app.use(engine=self.db.engine)

        @web.post("/export/<int:user_id>")
        def start(user_id: int) -> str:
            new = self.export.new(user_id).set(unique_key=f"export-{user_id}")
            job = self.app.enqueue(new, session=self.db.session)
            if job.created:  # and not a second click
                self.db.session.add(self.Export(id=job.id, user_id=user_id))
            self.db.session.commit()
            return "started" if job.created else "is on its way"

        @web.get("/export/<int:id>")
        def look(id: int) -> str:
            job = self.app.jobs.get(id)
            return f"{job.state}: {job.progress}"

        return web

    def states(self, web: flask.Flask) -> list[str]:
        with web.app_context():
            return list(self.db.session.scalars(select(self.Export.state).order_by(self.Export.id)))


def test_a_blog(app: sqlq.App, database_url: str) -> None:
    """Each job has a row that pages look at, in the application's context, also when it has failed for
    good."""
    blog = Blog(app)
    web = blog.create_app(database_url)

    @app.middleware
    def in_web_context(running: sqlq.JobContext) -> Iterator[None]:
        with web.app_context():
            yield

    client = web.test_client()
    assert [client.post("/export/7").text for _ in range(2)] == ["started", "is on its way"]
    assert blog.states(web) == ["in progress"]
    assert drain(app) == Counts(finished=1)
    assert blog.states(web) == ["sent"]
    assert client.get("/export/1").text == "finished: 25 of 25 (100%): posts"
    web.config["MAIL_IS_DOWN"] = True
    assert client.post("/export/7").text == "started"
    assert drain(app) == Counts(finished=1, failed=1)
    assert blog.states(web) == ["sent", "failed"]
    with web.app_context():
        blog.db.engine.dispose()


@needs("file")
def test_a_blogs_own_tests_in_memory(app: sqlq.App) -> None:
    """They call the factory with a database in memory, and run jobs in the request, after its commit."""
    blog = Blog(app)
    with on_database(app, "sqlite://"):
        web = blog.create_app("sqlite://")
        with web.app_context(), inline(app, at="commit") as ran:
            with blog.db.engine.begin() as conn:
                create_tables(conn)
                assert conn.execute(text("SELECT count(*) FROM jobs")).scalar_one() == 0
            assert web.test_client().post("/export/7").text == "started"
        assert [job.state for job in ran.jobs] == ["finished"]
        assert blog.states(web) == ["sent"]
        with web.app_context():
            blog.db.engine.dispose()
