"""A job is kept exactly if the session's transaction commits, even where a framework ends it (G1)."""

from __future__ import annotations

import asyncio
import gc
import sqlite3
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import django
import django.conf
import django.db
import pytest
import sqlmodel
import transaction
import zope.sqlalchemy
from django.db import transaction as blocks
from django.utils.connection import ConnectionProxy
from sqlalchemy import Connection, Engine, Pool, event
from sqlalchemy.exc import IntegrityError, SAWarning
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import sqlq
from sqlq import EnqueueError
from sqlq.database.caller import drivers
from sqlq.errors import JobNotFoundError
from sqlq.testing import inline
from tests.kit import committed, count, drain, for_each, needs, run_one, wait_until
from tests.kit.callers import Caller, OfSqlalchemy, Order, common_sessions, common_ways, of_django, sessions
from tests.kit.notifications import Listener
from tests.kit.postgresql import async_database_url
from tests.kit.workers import listening

pytestmark = pytest.mark.each_database


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what Pyramid imports is deprecated
    from pyramid.config import Configurator
    from pyramid.request import Request
    from pyramid.response import Response


@pytest.fixture
def shop(engine: Engine) -> Engine:
    """A user's engine, with a table of orders."""
    if engine.dialect.name == "sqlite":
        sqlq.configure_sqlite(engine)
    Order.metadata.create_all(engine)
    return engine


WRITES = ("enqueue", "read", "orm", "savepoint")


def write(name: str, session: Any, app: sqlq.App, new: sqlq.NewJob) -> None:
    if name == "read":
        session.get(Order, 1)
    if name == "orm":
        session.add(Order())
    with session.begin_nested() if name == "savepoint" else nullcontext():
        app.enqueue(new, session=session)


def registered(engine: Engine, **options: Any) -> Any:
    """A scoped session whose transactions are those of zope's manager."""
    maker = scoped_session(sessionmaker(engine))
    zope.sqlalchemy.register(maker, **options)
    return maker


@pytest.mark.parametrize("name", WRITES)
def test_a_job_is_committed_by_zopes_transaction(app: sqlq.App, send: Any, shop: Engine, name: str) -> None:
    maker = registered(shop)

    def write_twice() -> None:
        with transaction.manager:
            write(name, maker, app, send.new(1))
        transaction.begin()
        write(name, maker, app, send.new(1))
        transaction.abort()

    with inline(app, at="commit") as ran:
        write_twice()
    assert [job.state for job in ran.jobs] == ["finished"]
    write_twice()
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
        write(name, request.dbsession, app, send.new(1))
        return Response("done", status=request.params["status"])

    hooks = {"manager_hook": "explicit_manager", "commit_veto": "default_commit_veto"}
    config = Configurator(settings={f"tm.{name}": f"pyramid_tm.{hook}" for name, hook in hooks.items()})
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


def test_zope_takes_no_read_only_session_but_a_reading_handler(
    app: sqlq.App, send: Any, shop: Engine
) -> None:
    maker = registered(shop, initial_state=zope.sqlalchemy.datamanager.STATUS_READONLY)
    says = "this session registered as read only, and rolls back"
    with transaction.manager, pytest.raises(EnqueueError, match=says):
        app.enqueue(send.new(), session=maker)
    assert count(shop) == 0

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


class Automatic(sqlite3.Connection):
    autocommit = True  # as Python 3.12 has it


PYSQLITE, AIOSQLITE = OfSqlalchemy("pysqlite", Session), OfSqlalchemy("aiosqlite", AsyncSession)
PSYCOPG, BY_ENGINE = OfSqlalchemy("psycopg", Session), {"isolation_level": "AUTOCOMMIT"}
AUTOMATIC: dict[str, tuple[str, OfSqlalchemy, dict[str, Any]]] = {
    "psycopg": ("postgresql", PSYCOPG, BY_ENGINE),
    "psycopg2": ("postgresql", OfSqlalchemy("psycopg2", Connection), BY_ENGINE),
    "asyncpg": ("postgresql", OfSqlalchemy("asyncpg", AsyncSession), BY_ENGINE),
    "psycopg_async": ("postgresql", OfSqlalchemy("psycopg_async", AsyncSession), BY_ENGINE),
    "pysqlite": ("sqlite", PYSQLITE, BY_ENGINE),
    "pysqlite_connection": ("sqlite", OfSqlalchemy("pysqlite", Connection), BY_ENGINE),
    "aiosqlite": ("sqlite", AIOSQLITE, BY_ENGINE),
    "of_psycopg": ("postgresql", PSYCOPG, {"connect_args": {"autocommit": True}}),
    "of_sqlite3": ("sqlite", PYSQLITE, {"connect_args": {"isolation_level": None}}),
    "behind_aiosqlite": ("sqlite", AIOSQLITE, {"connect_args": {"factory": Automatic}}),
}
if sys.version_info >= (3, 12):
    for level in (None, ""):
        by_sqlite3 = {"connect_args": {"autocommit": True, "isolation_level": level}}
        AUTOMATIC[f"pysqlite_{level}"] = ("sqlite", PYSQLITE, by_sqlite3)
        AUTOMATIC[f"aiosqlite_{level}"] = ("sqlite", AIOSQLITE, by_sqlite3)


@pytest.mark.parametrize(
    ("database_url", "way", "options"), AUTOMATIC.values(), ids=AUTOMATIC, indirect=["database_url"]
)
def test_autocommit_is_refused(
    app: sqlq.App, send: Any, engine: Engine, database_url: str, way: OfSqlalchemy, options: dict[str, Any]
) -> None:
    with way(database_url, configured=False, **options) as caller:
        for _ in range(2):
            with pytest.raises(EnqueueError, match="this connection is in AUTOCOMMIT, where no rollback"):
                caller.enqueue(app, send.new(1))
            caller.rollback()
    assert count(engine) == 0


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sqlite3 has had autocommit since Python 3.12")
@needs("file")
@for_each(("way", "isolation_level"), [(way, level) for way in (PYSQLITE, AIOSQLITE) for level in (None, "")])
def test_a_connection_of_sqlite3_without_autocommit_is_taken(
    app: sqlq.App, send: Any, engine: Engine, database_url: str, way: Any, isolation_level: str | None
) -> None:
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
    automatic = engine.execution_options(isolation_level="AUTOCOMMIT")

    def pay() -> None:
        with automatic.connect() as conn:
            sqlq.current_job().complete(conn)

    says = "is in AUTOCOMMIT"
    assert says in run_one(app, pay, max_attempts=1).message
    with inline(app, at="commit"), automatic.connect() as conn, pytest.raises(EnqueueError, match=says):
        app.enqueue(send.new(1), session=conn)


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
    with pytest.raises(EnqueueError, match="commit=True is for a transaction of the job's own"):
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


def test_an_async_session_is_joined(app: sqlq.App, send: Any, database_url: str, engine: Engine) -> None:
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


@of_django
def test_djangos_block_commits_or_not_and_an_error_marks_it(app: sqlq.App, send: Any, buyer: Caller) -> None:
    alias = buyer.session.alias
    with blocks.atomic(using=alias):
        buyer.order(1)
        with pytest.raises(EnqueueError):
            buyer.enqueue(app, send)
        assert not buyer.session.needs_rollback
        # mysqlclient takes a CHECK for an error of operation
        with pytest.raises((django.db.IntegrityError, django.db.OperationalError), match="priority"):
            buyer.enqueue(app, replace(send.new(1), priority=1_000))
        with pytest.raises(blocks.TransactionManagementError, match="An error occurred in the current"):
            buyer.enqueue(app, send.new(2))
    assert buyer.committed() == ([], [])

    def order_and_fail(job: sqlq.NewJob, id: int) -> None:
        with suppress(ZeroDivisionError), blocks.atomic(using=alias):
            buyer.order(id)
            buyer.enqueue(app, job)
            raise ZeroDivisionError

    with blocks.atomic(using=alias):
        buyer.order(1)
        first = buyer.enqueue(app, send.new(1))
        order_and_fail(send.new(2).set(unique_key="k"), 2)
        more = buyer.enqueue_many(app, [send.new(3).set(unique_key=key) for key in "kl"])
        assert buyer.committed() == ([], [])
    order_and_fail(send.new(5), 5)
    jobs = sorted(job.id for job in (first, *more))
    assert buyer.committed() == ([1], jobs)
    assert buyer.session.get_autocommit()
    outside = buyer.enqueue(app, send.new(1))
    assert buyer.committed()[1] == [*jobs, outside.id], "it is committed at once"


def test_enqueue_takes_djangos_proxy(app: sqlq.App, send: Any, watch: Engine, connection: Any) -> None:
    app.use(watch.url, session=ConnectionProxy(django.db.connections, connection.alias))
    with suppress(ZeroDivisionError), blocks.atomic(using=connection.alias):
        app.enqueue(send.new(1))
        raise ZeroDivisionError
    with blocks.atomic(using=connection.alias):
        job = app.enqueue(send.new(1))
    assert committed(watch) == [job.id]


@needs("listen")
def test_djangos_commit_notifies_and_its_rollback_does_not(app: sqlq.App, send: Any, connection: Any) -> None:
    heard = listening(app, "enqueued")
    with closing(Listener(app)) as listener:
        with suppress(ZeroDivisionError), blocks.atomic(using=connection.alias):
            app.enqueue(send.new(1), session=connection)
            raise ZeroDivisionError
        assert listener.hears_no_more()
        with blocks.atomic(using=connection.alias):
            job = app.enqueue(send.new(2), session=connection)
        assert listener.hears_one()
    assert app._events.flush(60)
    assert [event.id for event in heard] == [job.id]


@of_django
def test_a_handler_completes_in_a_transaction_of_djangos(app: sqlq.App, buyer: Caller) -> None:
    def pay() -> None:
        own, attempt = django.db.connections[buyer.session.alias], sqlq.current_job().attempt
        with closing(own), sqlq.current_job().completing(own) as same:
            assert same is own
            with own.cursor() as cursor:
                cursor.execute(f"INSERT INTO orders VALUES ({attempt})")
            assert 1 / (attempt - 1)

    done = run_one(app, pay)
    assert (done.state, done.attempts) == ("finished", 2)
    assert buyer.committed() == ([2], [])


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


@pytest.fixture
def task(app: sqlq.App) -> sqlq.Task[..., Any]:
    return app.task(name="shop.double", max_attempts=1)(lambda n: 2 * n)


def refuses(app: sqlq.App, *jobs: sqlq.Job[Any], all_uses: bool = False) -> None:
    """Expect that every call with a handle reports that its job is not there."""
    uses: list[Callable[[sqlq.Job[Any]], Any]] = [
        app.result,
        lambda job: app.wait_all([job], "1s"),
        app.jobs.get,
        lambda job: app.jobs.cancel([job]),
        lambda job: app.result(job, timeout="1s"),
        lambda job: asyncio.run(app.aresult(job, timeout="1s")),
        lambda job: asyncio.run(app.await_all([job], "1s")),
        lambda job: list(app.as_completed([job], "1s")),
        lambda job: app.wait_all([job.id, job], "1s"),
        lambda job: asyncio.run(app.jobs.aget(job)),
        lambda job: app.jobs.cancel([job], force=True),
        lambda job: app.jobs.cancel({job.id, job}),
        lambda job: asyncio.run(app.jobs.acancel([job])),
        lambda job: app.jobs.retry([job]),
        app.jobs.replay,
        lambda job: app.jobs.replay([job]),
        lambda job: app.jobs.delete([job]),
    ]
    for job in jobs:
        for use in uses if all_uses else uses[:4]:
            with pytest.raises(JobNotFoundError, match=rf"job {job.id}\b"):
                use(job)


def serves(app: sqlq.App, job: sqlq.Job[Any], result: Any) -> None:
    assert app.jobs.get(job).id == job.id
    assert app.result(job) == result
    assert app.wait_all([job]).ended[0].id == job.id
    assert app.jobs.cancel([job]) == {job.id: "ended"}
    assert app.jobs.replay(job)


def has_its_id(app: sqlq.App, stale: sqlq.Job[Any], job: sqlq.Job[Any]) -> None:
    """On SQLite the next job gets the id of the one rolled back."""
    assert (job.id == stale.id) is (app.database.engine.dialect.name == "sqlite")


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
    has_its_id(app, stale, mine)
    refuses(app, stale)
    drain(app)
    refuses(app, stale)
    serves(app, mine, 14)


def test_a_dropped_sessions_handle_is_void(app: sqlq.App, task: Any, tmp_path: Path, engine: Engine) -> None:
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
    conn = engine.connect()
    stale = app.enqueue(task.new(1), session=conn)
    del conn
    gc.collect()
    has_its_id(app, stale, app.enqueue(task.new(100)))
    refuses(app, stale, all_uses=True)


@common_sessions
def test_a_rolled_back_savepoint_ends_its_handles_alone(app: sqlq.App, task: Any, caller: Caller) -> None:
    kept = caller.enqueue(app, task.new(1))
    with caller.savepoint() as undo:
        stale = caller.enqueue_many(app, [task.new(2), task.new(3)])
        undo()
    with caller.savepoint():
        late = caller.enqueue(app, task.new(4))
    caller.commit()
    has_its_id(app, stale[0], late)
    drain(app)
    refuses(app, *stale)
    serves(app, kept, 2)
    serves(app, late, 8)


@pytest.fixture
def references_enforced(database_url: str) -> Iterator[None]:
    """SQLite checks foreign keys only on connections with this setting."""

    def connected(connection: Any, record: Any) -> None:
        if database_url.startswith("sqlite"):
            connection.cursor().execute("PRAGMA foreign_keys = ON")

    event.listen(Pool, "connect", connected)
    yield
    event.remove(Pool, "connect", connected)


@pytest.mark.usefixtures("references_enforced")
@sessions("sqlite", "postgresql")
def test_a_handle_of_a_commit_that_fails_names_no_other_job(
    app: sqlq.App, task: Any, database_url: str, way: Any
) -> None:
    """SQLAlchemy reports no rollback after it. Nor does it publish an event."""
    told = listening(app, "enqueued")
    with way(database_url) as caller:
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
    has_its_id(app, stale, app.enqueue(task.new(100)))
    drain(app)
    refuses(app, stale)
    serves(app, kept, 2)


def test_an_outer_savepoint_takes_handles_of_an_inner_one(app: sqlq.App, task: Any, shop: Engine) -> None:
    with shop.connect() as conn:
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
    has_its_id(app, stale[0], late)
    drain(app)
    refuses(app, *stale)
    serves(app, kept, 2)
    serves(app, late, 10)


def test_a_rolled_back_run_or_flow_goes_but_a_met_key_stays(app: sqlq.App, task: Any, engine: Engine) -> None:
    app.schedules.add("yearly", task.new(5), cron="0 0 1 1 *")
    with Session(engine) as session:
        run = app.schedules.run("yearly", session=session)
        flow = app.enqueue(sqlq.chain(task.new(1), task), session=session)
        session.rollback()
    has_its_id(app, run, app.enqueue(task.new(100)))
    app.enqueue_many([task.new(1), task.new(2)])
    drain(app)
    refuses(app, run)
    for timeout in ("0s", "10s"):
        with pytest.raises(JobNotFoundError):
            app.result(flow, timeout=timeout)
    there = app.enqueue(task.new(1).set(unique_key="there"))
    with Session(engine) as session:
        first = app.enqueue(task.new(2).set(unique_key="mine"), session=session)
        old = app.enqueue(task.new(4).set(unique_key="there"), session=session)
        assert (old.id, old.created) == (there.id, False)
        session.rollback()
    has_its_id(app, first, app.enqueue(task.new(100)))
    drain(app)
    refuses(app, first)
    serves(app, old, 2)
