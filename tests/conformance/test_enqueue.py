"""A job is in the database if and only if the transaction it was enqueued in committed (G1), by whatever
session and driver."""

from __future__ import annotations

import asyncio
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from functools import partialmethod
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from sqlalchemy import (
    Connection,
    Engine,
    MetaData,
    NullPool,
    StaticPool,
    create_engine,
    event,
    make_url,
    select,
    text,
)
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import sqlq
from sqlq import tables
from sqlq.enqueue import notify
from sqlq.schema.tables import jobs as jobs_table
from tests.kit import committed, execute, needs
from tests.kit.callers import OfSqlalchemy, Way, async_session_of
from tests.kit.databases import sqlite_url
from tests.kit.postgresql import PostgreSQL

pytestmark = pytest.mark.each_database
PSYCOPG, PYSQLITE = OfSqlalchemy("psycopg", Session), OfSqlalchemy("pysqlite", Session)
ASYNCPG, AIOSQLITE = OfSqlalchemy("asyncpg", AsyncSession), OfSqlalchemy("aiosqlite", AsyncSession)


@pytest.fixture
def send(app: sqlq.App) -> Any:
    @app.task(name="shop.send", queue="mail", max_attempts=3, priority=2, timeout="30s")
    def send(order_id: int = 0, **more: Any) -> None: ...

    return send


# -- the caller's transaction --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Session, Connection])
def test_enqueue_does_not_end_the_callers_transaction(
    app: sqlq.App, send: Any, engine: Engine, kind: type[Any]
) -> None:
    ended: list[str] = []
    for name in ("commit", "rollback", "checkin"):
        event.listen(engine, name, lambda *_, name=name: ended.append(name))
    with Session(engine) if kind is Session else engine.connect() as session:
        for unique in (None, "k"):
            app.enqueue(send.new(1).set(unique_key=unique), session=session)
            app.enqueue_many([send.new(1), send.new(1).set(unique_key=unique)] * 3, session=session)
            with pytest.raises(sqlq.EnqueueError):
                app.enqueue(None, session=session)  # type: ignore[arg-type]  # what is refused here
        assert ended == []
        session.commit()
    assert ended in (["commit", "checkin"], ["commit", "rollback", "checkin"])


@needs("file")
@pytest.mark.parametrize("way", [PYSQLITE, OfSqlalchemy("pysqlite", Connection), AIOSQLITE])
def test_a_savepoint_that_may_be_the_outermost_is_refused(
    app: sqlq.App, send: Any, watch: Engine, database_url: str, way: Way
) -> None:
    with way(database_url, configured=False) as caller:
        with (
            caller.savepoint(),
            pytest.raises(sqlq.EnqueueError, match=r"call sqlq.configure_sqlite\(engine\) once"),
        ):
            caller.enqueue(app, send.new(1))
        job = caller.enqueue(app, send.new(2))
        caller.commit()
        assert committed(watch) == [job.id]


@needs("postgresql")
@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("way", [PSYCOPG, OfSqlalchemy("psycopg2", Connection), ASYNCPG])
def test_enqueue_works_at_every_isolation_level(
    app: sqlq.App, send: Any, watch: Engine, database_url: str, way: Way, level: str
) -> None:
    with way(database_url, isolation_level=level) as caller:
        assert caller.execute("SHOW transaction_isolation").scalar() == level.lower()
        first = caller.enqueue(app, send.new(1).set(unique_key="k"))
        again = caller.enqueue(app, send.new(1).set(unique_key="k"))
        assert (again.id, again.created) == (first.id, False)
        caller.commit()
        assert not caller.enqueue(app, send.new(1).set(unique_key="k")).created
        caller.commit()
    assert committed(watch) == [first.id]


@needs("postgresql")
@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_two_phase_commit(app: sqlq.App, send: Any, watch: Engine, database_url: str, driver: str) -> None:
    engine = create_engine(make_url(database_url).set(drivername=f"postgresql+{driver}"))
    for commits in (False, True):
        with Session(engine, twophase=True) as session:
            app.enqueue(send.new(1), session=session)
            session.prepare()
            assert committed(watch) == []
            session.commit() if commits else session.rollback()
        assert len(committed(watch)) == commits
    engine.dispose()


# -- no session, and engines ---------------------------------------------------------------------------------


def test_a_job_without_a_session_is_committed_on_return(app: sqlq.App, send: Any, watch: Engine) -> None:
    one = app.enqueue(send.new(1))
    two, three = app.enqueue_many([send.new(2), send.new(3)])
    four = asyncio.run(app.aenqueue(send.new(4)))
    (five,) = asyncio.run(app.aenqueue_many([send.new(5)]))
    assert committed(watch) == [one.id, two.id, three.id, four.id, five.id]
    assert app.enqueue_many([]) == []


@pytest.mark.parametrize(
    "options", [{}, {"poolclass": NullPool}, {"poolclass": StaticPool}, {"isolation_level": "SERIALIZABLE"}]
)
def test_an_app_beside_an_engine(database_url: str, watch: Engine, options: dict[str, Any]) -> None:
    engine = create_engine(database_url, **options)
    app = sqlq.App(engine=engine)
    task = app.task(name="shop.send")(print)
    one = app.enqueue(task.new())
    with Session(engine) as session, session.begin():
        two = app.enqueue(task.new(), session=session)
    assert committed(watch) == [one.id, two.id]
    app.close()
    engine.dispose()


class Base(DeclarativeBase): ...


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)


def test_enqueue_needs_a_bind_for_the_jobs_table(
    app: sqlq.App, send: Any, engine: Engine, watch: Engine, tmp_path: Path
) -> None:
    other = create_engine(sqlite_url(tmp_path / "orders.db"))
    Base.metadata.create_all(other)
    says = r"this session has no bind for the jobs table: make it with Session\(engine\)"
    with Session(binds={Order: other}) as session:
        session.add(Order(id=1))
        with pytest.raises(sqlq.EnqueueError, match=says):
            app.enqueue(send.new(1), session=session)
        session.commit()
    made = []
    for session in (Session(binds={Order: other, jobs_table: engine}), Session(engine, binds={Order: other})):
        with session:
            session.add(Order())
            made.append(app.enqueue(send.new(1), session=session).id)
            session.commit()
    assert committed(watch) == made
    assert len(committed(other, "orders")) == 3
    other.dispose()


def test_the_schema_map_of_the_caller_does_not_redirect_jobs(
    app: sqlq.App, send: Any, engine: Engine, watch: Engine
) -> None:
    elsewhere = {"__sqlq__": "elsewhere", None: "elsewhere"}
    with engine.connect().execution_options(schema_translate_map=elsewhere) as conn:
        one = app.enqueue(send.new(1), session=conn)
        two = app.enqueue(send.new(2).set(unique_key="k"), session=conn)
        assert conn.get_execution_options()["schema_translate_map"] == elsewhere
        conn.commit()
    assert committed(watch) == [one.id, two.id]


@needs("schemas")
def test_the_search_path_of_the_caller_does_not_redirect_jobs(
    app: sqlq.App, send: Any, engine: Engine, watch: Engine
) -> None:
    execute(watch, "CREATE SCHEMA tenant")
    execute(watch, "CREATE TABLE tenant.jobs (LIKE public.jobs INCLUDING ALL)")
    with engine.begin() as conn:
        conn.execute(text("SET search_path TO tenant"))
        app.enqueue(send.new(1), session=conn)
        app.enqueue(send.new(2).set(unique_key="k"), session=conn)
    app.jobs.list()  # from now on the App knows its schema
    theirs = create_engine(watch.url, connect_args={"options": "-csearch_path=tenant"})
    with theirs.begin() as conn:
        app.enqueue(send.new(3), session=conn)
    for options in ("-csearch_path=public", '-c search_path="public" -cwork_mem=8MB'):
        url = make_url(app.database.engine.url).update_query_dict({"options": options})
        with closing(sqlq.App(url)) as other, theirs.begin() as conn:
            other.enqueue(send.new(4), session=conn)
    theirs.dispose()
    assert len(committed(watch)) == 5


@needs("schemas")
def test_an_app_without_a_schema_uses_the_callers_default_schema(database_url: str, watch: Engine) -> None:
    execute(watch, "CREATE SCHEMA tenant")
    tenants = make_url(database_url).update_query_dict({"options": "-csearch_path=tenant"})
    with closing(sqlq.App(tenants)) as app:
        app.migrate()
    theirs = create_engine(database_url, connect_args={"options": "-csearch_path=tenant,public"})
    with closing(sqlq.App(database_url)) as app, theirs.begin() as conn:
        task = app.task(name="shop.send")(print)
        app.enqueue(task.new(), session=conn)
    theirs.dispose()
    with watch.connect() as conn:
        assert conn.scalar(text("SELECT count(*) FROM tenant.jobs")) == 1


@needs("schemas")
def test_a_schema_of_its_own(database_url: str, watch: Engine) -> None:
    with closing(sqlq.App(database_url, schema="queue")) as app:
        app.migrate()
        new = app.named("shop.send").new()
        with watch.begin() as conn:
            jobs = [app.enqueue(new, session=conn).id, app.enqueue(new).id]
    assert committed(watch) == []
    states = tables.job_states.to_metadata(MetaData(), schema="queue")
    with watch.connect() as conn:
        assert {*conn.scalars(select(states.c.id))} == {*jobs}


# -- another database ----------------------------------------------------------------------------------------


def test_another_database_than_the_apps_warns_once(app: sqlq.App, send: Any, tmp_path: Path) -> None:
    other = create_engine(sqlite_url(tmp_path / "other.db"))
    theirs = sqlq.App(engine=other)
    theirs.migrate()
    with Session(other) as session:
        with pytest.warns(
            RuntimeWarning, match="but this App's workers look into .*: they will not see them"
        ) as seen:
            app.enqueue(send.new(1), session=session)
        assert [warning.filename for warning in seen] == [__file__]
        app.enqueue(send.new(2), session=session)
        session.commit()
    assert len(committed(other)) == 2
    theirs.close()
    other.dispose()


def test_a_session_of_another_database_is_named_before_its_missing_tables(
    app: sqlq.App, send: Any, tmp_path: Path
) -> None:
    other = create_engine(sqlite_url(tmp_path / "other.db"))
    said = r"^session is connected to .*other.db, but this App's workers look into .*: give a session of that"
    with Session(other) as session, pytest.raises(sqlq.errors.SchemaVersionError, match=said):
        app.enqueue(send.new(1), session=session)
    other.dispose()


@needs("postgresql")
def test_an_app_whose_own_database_is_missing_warns_too(engine: Engine, tmp_path: Path) -> None:
    app = sqlq.App(sqlite_url(tmp_path / "missing.db"))
    with Session(engine) as session:
        with pytest.warns(RuntimeWarning, match="missing.db: they will not see them"):
            app.enqueue(app.named("shop.send").new(), session=session)
        session.commit()
    assert not (tmp_path / "missing.db").exists()


@needs("postgresql")
def test_another_database_of_the_same_server_warns(
    app: sqlq.App, send: Any, postgresql: PostgreSQL, migrated_postgresql: str
) -> None:
    url = postgresql.create_database(migrated_postgresql)
    other = create_engine(url)
    with Session(other) as session, pytest.warns(RuntimeWarning, match="they will not see them"):
        app.enqueue(send.new(1), session=session)
    other.dispose()
    postgresql.drop_database(url)


def test_the_same_database_by_another_name_does_not_warn(
    app: sqlq.App, send: Any, engine: Engine, tmp_path: Path
) -> None:
    url = engine.url.set(host="localhost")
    if engine.dialect.name == "sqlite":
        (tmp_path / "link.db").symlink_to(engine.url.database or "")
        url = make_url(sqlite_url(tmp_path / "link.db"))
    other = create_engine(url)
    with Session(other) as session, session.begin():
        assert app.enqueue(send.new(1), session=session).created
    other.dispose()


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@needs("postgresql")
@pytest.mark.parametrize(("way", "why"), [(PSYCOPG, "silence"), (ASYNCPG, "a wrong role")])
def test_enqueue_in_a_session_works_while_the_apps_database_is_away(
    database_url: str, watch: Engine, silent_port: int, why: str, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    # which waits for the thread that connects to wake workers
    monkeypatch.setattr(notify.Notifier, "close", partialmethod(notify.Notifier.close, 0.0))
    url = make_url(database_url)
    wrong = {"silence": url.set(host="127.0.0.1", port=silent_port), "a wrong role": url.set(username="no")}
    with closing(sqlq.App(wrong[why])) as app, way(database_url) as caller:
        task = app.task(name="shop.send")(print)
        began = time.monotonic()
        jobs = [caller.enqueue(app, task.new()) for _ in range(2)]
        caller.commit()
        assert time.monotonic() - began < 3  # as long as it tries to connect at least
    assert committed(watch) == [job.id for job in jobs]


# -- the row -------------------------------------------------------------------------------------------------


def test_delays_count_by_the_databases_clock(app: sqlq.App, send: Any) -> None:
    moment = datetime.now(UTC) + timedelta(hours=3)
    later, then, past, keyed = app.enqueue_many(
        [
            send.new().set(delay="5m"),
            send.new().set(available_at=moment),
            send.new().set(available_at=moment - timedelta(days=1)),
            send.new().set(delay="2h", unique_key="k"),
        ]
    )
    again = app.enqueue(send.new().set(unique_key="k"))
    states = [job.state for job in (later, then, past, keyed, again)]
    assert states == ["scheduled", "scheduled", "available", "scheduled", "scheduled"]
    first, second = app.jobs.get(later), app.jobs.get(then)
    assert first.available_at == first.created_at + timedelta(minutes=5)
    assert second.available_at == pytest.approx(moment, abs=timedelta(milliseconds=1))


def test_a_plain_insert_is_a_complete_enqueue(app: sqlq.App, watch: Engine) -> None:
    with watch.begin() as conn:
        for columns, values in (
            ("queue, task, payload", """'mail', 'shop.send', '{"args": [7]}'"""),
            ("task", "'shop.send'"),
            ("task, priority, max_attempts, unique_key", "'shop.send', 9, 1, 'k'"),
        ):
            conn.exec_driver_sql(f"INSERT INTO jobs ({columns}) VALUES ({values})")
    with watch.connect() as conn:
        first, second, third = conn.execute(text("SELECT * FROM jobs ORDER BY id")).mappings()
        states = list(conn.scalars(text("SELECT state FROM job_states ORDER BY id")))
    assert (first["queue"], first["payload"]) == ("mail", '{"args": [7]}')
    assert (second["queue"], second["payload"]) == ("default", "{}")
    for found in (first, second):
        names = ("priority", "attempts", "max_attempts", "lease_token")
        assert [found[name] for name in names] == [0, 0, None, 0]
        assert found["available_at"] == found["created_at"]
    assert states == ["available"] * 3
    again = app.enqueue(app.named("shop.send").new().set(unique_key="k"))
    assert (again.id, again.created) == (third["id"], False)


@needs("file")
@pytest.mark.parametrize("beside", [False, True])
def test_a_missing_file_is_not_made(tmp_path: Path, beside: bool, database_url: str) -> None:
    url = sqlite_url(tmp_path / "missing.db")
    app = sqlq.App(engine=create_engine(url)) if beside else sqlq.App(url)
    says = r"there is no database file (.*missing.db): create it with sqlq migrate -d sqlite:///\1"
    with pytest.raises(sqlq.errors.ConfigurationError, match=says):
        app.enqueue(app.named("shop.send").new())
    assert not (tmp_path / "missing.db").exists()


@needs("postgresql")
@pytest.mark.parametrize("users_threshold", [5, None])
def test_the_insert_of_one_job_is_prepared_unless_the_user_disables_it(
    database_url: str, users_threshold: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "QUIET_SECONDS", 3600.0)  # only the first sends a notification along
    engine = create_engine(database_url, connect_args={"prepare_threshold": users_threshold})
    with closing(sqlq.App(engine=engine)) as app:
        task = app.named("t")
        for i in range(10):
            assert app.enqueue(task.new()).id == i + 1
            app.jobs.list()
        with app.database.read() as conn:
            prepared = conn.scalars(text("SELECT statement FROM pg_prepared_statements")).all()
    engine.dispose()
    inserts = [re.sub(r"^WITH done AS \(", "", statement).split(" (")[0] for statement in prepared]
    assert inserts == (["INSERT INTO public.jobs"] * 2 if users_threshold else [])


PACKAGE = str(Path(sqlq.__file__).parent)
MOST_FILES = 8


def files_of(call: Callable[[], object]) -> list[str]:
    """Return the files of sqlq whose code a warm call runs, in their order. After a pause a call checks more,
    so this takes the one with the fewest."""
    call()
    found = []
    for _ in range(5):
        files: dict[str, None] = {}

        def entered(frame: FrameType, event: str, argument: Any, files: dict[str, None] = files) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
                files[frame.f_code.co_filename.removeprefix(PACKAGE)] = None

        sys.setprofile(entered)
        try:
            call()
        finally:
            sys.setprofile(None)
        found.append(list(files))
    return min(found, key=len)


def test_an_enqueue_runs_through_few_files(app: sqlq.App, engine: Engine, database_url: str) -> None:
    """A reader who follows it opens few files, also for an asyncio session."""
    job = app.task(name="t")(print).new()
    with engine.connect() as conn:
        found = [files_of(lambda: app.enqueue(job)), files_of(lambda: app.enqueue(job, session=conn))]
    with Session(engine) as session:
        found.append(files_of(lambda: app.enqueue(job, session=session)))
    with async_session_of(database_url)(database_url) as caller:
        found.append(files_of(lambda: caller.enqueue(app, job)))
    for files in found:
        assert len(files) <= MOST_FILES, "\n".join(files)
