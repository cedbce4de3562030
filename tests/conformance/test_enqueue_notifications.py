"""A committed enqueue wakes idle workers on PostgreSQL by one NOTIFY that costs the producer nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, make_url
from sqlalchemy.orm import Session

import sqlq
from sqlq.enqueue import notify
from sqlq.store.workers import notify as notifys
from tests.kit import needs, received, refuse_threads, wait_until
from tests.kit.callers import MODES, SESSIONS, Caller, Way
from tests.kit.notifications import Listener

pytestmark = needs("listen")
WAYS: dict[str, Way] = {**SESSIONS["postgresql"], **MODES["postgresql"]}
OF_SESSIONS = ("psycopg-Session", "psycopg2-Connection", "asyncpg-AsyncSession", "asyncpg-AsyncConnection")
OF_DRIVERS = ("psycopg", "psycopg-autocommit", "psycopg2", "psycopg-async", "asyncpg")


def each_way(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("way", [pytest.param(WAYS[name], id=name) for name in names])


@pytest.fixture
def listener(app: sqlq.App) -> Iterator[Listener]:
    with closing(Listener(app)) as listener:
        yield listener


@each_way(*OF_SESSIONS, *OF_DRIVERS)
def test_a_commit_sends_one_notification(
    app: sqlq.App, send: Any, listener: Listener, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "WATCH_SECONDS", 60.0)
    for _ in range(3):
        caller.begin()
        caller.enqueue_many(app, [send.new(1), send.new(2)])
        caller.enqueue(app, send.new(3))
        assert not listener.hears_within(0.1)
        caller.commit()
        assert (listener.hears_one(), listener.hears_no_more()) == (True, True)
        caller.begin()
        caller.execute("SELECT 1")
        caller.commit()
        assert listener.hears_no_more()
    if caller.begins:
        caller.enqueue(app, send.new(4))
        assert (listener.hears_one(), listener.hears_no_more()) == (True, True)


@each_way(*OF_SESSIONS)
def test_a_rollback_sends_no_notification(app: sqlq.App, send: Any, listener: Any, caller: Caller) -> None:
    caller.enqueue(app, send.new(1))
    caller.rollback()
    with caller.savepoint():
        caller.enqueue(app, send.new(1))
    caller.rollback()
    assert listener.hears_no_more()


def test_a_long_transaction_of_a_driver_is_watched_for_a_limited_time(
    app: sqlq.App, send: Any, listener: Listener, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "WATCH_SECONDS", 0.0)
    with MODES["postgresql"]["psycopg"](database_url) as caller:
        caller.enqueue(app, send.new(1))
        sent: Any = app._connected.enqueuer
        wait_until(lambda: not sent._notifier._watched, what="an end of looking")
        caller.commit()
        assert listener.hears_no_more()


def test_the_insert_of_a_lone_job_sends_its_notification(
    app: sqlq.App, send: Any, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread sends nothing for it. It sends the notifications of the next jobs."""
    by_the_thread = threading.Event()
    monkeypatch.setattr(notifys, "notify", lambda database: by_the_thread.set())
    monkeypatch.setattr(notify, "QUIET_SECONDS", 60.0)  # a busy machine may pause between the two
    job = app.enqueue(send.new(1).set(delay="1s"))
    assert (job.state, listener.hears_one(), by_the_thread.is_set()) == ("scheduled", True, False)
    app.enqueue(send.new(2))
    assert by_the_thread.wait(10)
    assert listener.hears_no_more()


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_the_notification_is_sent_after_the_commit(
    app: sqlq.App, send: Any, listener: Any, database_url: str, driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = create_engine(make_url(database_url).set(drivername=f"postgresql+{driver}"))
    commit = engine.dialect.do_commit

    def slow(connection: Any) -> None:
        assert not listener.hears_within(0.3)
        commit(connection)

    monkeypatch.setattr(engine.dialect, "do_commit", slow)
    with engine.begin() as conn:
        app.enqueue(send.new(1), session=conn)
    assert listener.hears_one()
    engine.dispose()


def test_the_notifier_connects_before_the_session_commits(
    app: sqlq.App, send: Any, listener: Listener, engine: Engine
) -> None:
    """To make one takes ten times as long as a notification, and a transaction lasts a while."""
    made: list[object] = []
    event.listen(app.database.for_loops.engine, "connect", lambda connection, _: made.append(connection))
    with Session(engine) as session:
        app.enqueue(send.new(), session=session)
        wait_until(lambda: len(made) == 1, what="a connection before the commit")
        session.commit()
    assert (listener.hears_one(), len(made)) == (True, 1)


def test_only_notifications_commit_without_waiting_for_the_disk(app: sqlq.App, listener: Listener) -> None:
    """The setting is for its own transaction alone, since the connection may settle jobs next."""
    statements = "SELECT pg_backend_pid(), current_setting('synchronous_commit')"
    before = app.database.run_statement(statements, None)
    notifys.notify(app.database)
    assert app.database.run_statement(statements, None) == before
    assert [how for _, how in before] == ["on"]
    assert listener.hears_one()


def test_each_connection_of_an_engine_sends_one_notification(
    app: sqlq.App, send: Any, listener: Listener, engine: Engine
) -> None:
    """Those made before the first enqueue, too, with execution options, and beside a second App."""
    strict = engine.execution_options(isolation_level="SERIALIZABLE")
    beside = sqlq.App(engine=engine)
    with engine.connect() as one, engine.connect() as two, strict.connect() as three:
        for owner, conn in ((app, one), (app, two), (app, three), (beside, two)):
            owner.enqueue(send.new(1), session=conn)
            conn.commit()
            assert (listener.hears_one(), listener.hears_no_more()) == (True, True)
    beside.close()
    app.enqueue(send.new(1))
    assert (listener.hears_one(), listener.hears_no_more()) == (True, True)
    with Session(engine, twophase=True) as session:
        app.enqueue(send.new(1), session=session)
        session.prepare()
        session.commit()
    assert listener.hears_one()


def test_an_enqueue_adds_one_statement_to_a_transaction(app: sqlq.App, send: Any, engine: Engine) -> None:
    with Session(engine) as session:
        app.enqueue(send.new(1), session=session)
        session.commit()
        with received(engine) as statements:
            app.enqueue(send.new(2), session=session)
            session.commit()
    ((statement, _),) = statements
    assert statement.startswith("INSERT INTO public.jobs ")


def test_the_next_notification_starts_the_thread_that_could_not_start(
    app: sqlq.App, send: Any, engine: Engine, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as short:
        refuse_threads(short, "sqlq-notify")
        with engine.begin() as conn:
            app.enqueue(send.new(1), session=conn)
    with engine.begin() as conn:
        app.enqueue(send.new(2), session=conn)
    assert listener.hears_one()
