"""A job is in the database if and only if the transaction it was enqueued in committed (G1)."""

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
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, Engine, MetaData, create_engine, event, make_url, select, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool, StaticPool

import sqlq
from sqlq import tables
from sqlq.enqueue import notify
from sqlq.schema.tables import jobs as jobs_table
from tests.kit import committed, execute, for_each, needs
from tests.kit.callers import OfSqlalchemy, Order, Way, async_session_of, dsn
from tests.kit.databases import fresh_database, sqlite_url
from tests.kit.postgresql import PostgreSQL

pytestmark = pytest.mark.each_database
PSYCOPG, PYSQLITE = OfSqlalchemy("psycopg", Session), OfSqlalchemy("pysqlite", Session)
ASYNCPG, AIOSQLITE = OfSqlalchemy("asyncpg", AsyncSession), OfSqlalchemy("aiosqlite", AsyncSession)


@pytest.mark.parametrize("kind", [Session, Connection])
def test_enqueue_leaves_a_transaction_open(app: sqlq.App, send: Any, engine: Engine, kind: type[Any]) -> None:
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
        says = r"call sqlq.configure_sqlite\(engine\) once"
        with caller.savepoint(), pytest.raises(sqlq.EnqueueError, match=says):
            caller.enqueue(app, send.new(1))
        job = caller.enqueue(app, send.new(2))
        caller.commit()
        assert committed(watch) == [job.id]


@needs("postgresql")
@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
@for_each("way", [PSYCOPG, OfSqlalchemy("psycopg2", Connection), ASYNCPG])
def test_enqueue_works_at_every_isolation_level(
    app: sqlq.App, send: Any, watch: Engine, database_url: str, way: Way, level: str
) -> None:
    before, new = committed(watch), send.new(1).set(unique_key=str(way))
    with way(database_url, isolation_level=level) as caller:
        assert caller.execute("SHOW transaction_isolation").scalar() == level.lower()
        first = caller.enqueue(app, new)
        for _ in range(2):
            again = caller.enqueue(app, new)
            assert (again.id, again.created) == (first.id, False)
            caller.commit()
    assert committed(watch) == [*before, first.id]


@needs("postgresql")
@for_each("driver", ["psycopg", "psycopg2"])
def test_two_phase_commit(app: sqlq.App, send: Any, watch: Engine, database_url: str, driver: str) -> None:
    engine = create_engine(make_url(database_url).set(drivername=f"postgresql+{driver}"))
    before = committed(watch)
    for commits in (False, True):
        with Session(engine, twophase=True) as session:
            app.enqueue(send.new(1), session=session)
            session.prepare()
            assert committed(watch) == before
            session.commit() if commits else session.rollback()
        assert len(committed(watch)) == len(before) + commits
    engine.dispose()


def test_a_job_without_a_session_is_committed_on_return(app: sqlq.App, send: Any, watch: Engine) -> None:
    jobs = [app.enqueue(send.new(1)), *app.enqueue_many([send.new(2), send.new(3)])]
    jobs += [asyncio.run(app.aenqueue(send.new(4))), *asyncio.run(app.aenqueue_many([send.new(5)]))]
    assert committed(watch) == [job.id for job in jobs]
    assert app.enqueue_many([]) == []


@for_each(
    "options", [{}, {"poolclass": NullPool}, {"poolclass": StaticPool}, {"isolation_level": "SERIALIZABLE"}]
)
def test_an_app_beside_an_engine(database_url: str, watch: Engine, options: dict[str, Any]) -> None:
    engine = create_engine(database_url, **options)
    with closing(sqlq.App(engine=engine)) as app, Session(engine) as session, session.begin():
        new = app.named("shop.send").new()
        jobs = {app.enqueue(new).id, app.enqueue(new, session=session).id}
    assert jobs <= {*committed(watch)}
    engine.dispose()


def test_enqueue_needs_a_bind_for_the_jobs_table(
    app: sqlq.App, send: Any, engine: Engine, watch: Engine, other: Engine
) -> None:
    Order.metadata.create_all(other)
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


def test_a_schema_map_redirects_no_job(app: sqlq.App, send: Any, engine: Engine, watch: Engine) -> None:
    elsewhere = {"__sqlq__": "elsewhere", None: "elsewhere"}
    with engine.connect().execution_options(schema_translate_map=elsewhere) as conn:
        one = app.enqueue(send.new(1), session=conn)
        two = app.enqueue(send.new(2).set(unique_key="k"), session=conn)
        assert conn.get_execution_options()["schema_translate_map"] == elsewhere
        conn.commit()
    assert committed(watch) == [one.id, two.id]


@needs("schemas")
def test_the_search_path_of_the_caller_does_not_redirect_jobs(
    app: sqlq.App, send: Any, engine: Engine, watch: Engine, database_url: str
) -> None:
    execute(watch, "CREATE SCHEMA tenant; CREATE TABLE tenant.jobs (LIKE public.jobs INCLUDING ALL)")
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
    for path in (None, "missing,Public", r'"$user",\ "public" -cwork_mem=8MB', "pg_temp,public"):
        with psycopg.connect(dsn(database_url), options=path and f"-csearch_path={path}") as driver:
            driver.execute("SET search_path TO tenant")
            app.enqueue(send.new(5), session=driver)
            assert driver.execute("SELECT count(*) FROM public.jobs").fetchone() != (0,)
    assert len(committed(watch)) == 9


@needs("schemas")
def test_an_app_has_its_own_schema_or_the_callers(database_url: str, watch: Engine) -> None:
    execute(watch, "CREATE SCHEMA tenant")
    tenants = make_url(database_url).update_query_dict({"options": "-csearch_path=tenant"})
    with closing(sqlq.App(tenants)) as app:
        app.migrate()
    theirs = create_engine(database_url, connect_args={"options": "-csearch_path=tenant,public"})
    with closing(sqlq.App(database_url)) as app, theirs.begin() as conn:
        job = app.enqueue(app.named("shop.send").new(), session=conn)
    theirs.dispose()
    assert committed(watch, "tenant.jobs") == [job.id]
    with closing(sqlq.App(database_url, schema="queue")) as app:
        app.migrate()
        new = app.named("shop.send").new()
        with watch.begin() as conn:
            jobs = {app.enqueue(new, session=conn).id, app.enqueue(new).id}
    assert committed(watch) == []
    states = tables.job_states.to_metadata(MetaData(), schema="queue")
    with watch.connect() as conn:
        assert {*conn.scalars(select(states.c.id))} == jobs


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Engine]:
    """An engine on another database, without tables."""
    engine = create_engine(sqlite_url(tmp_path / "other.db"))
    yield engine
    engine.dispose()


def test_another_database_than_the_apps_warns_once(
    app: sqlq.App, send: Any, other: Engine, engine: Engine, tmp_path: Path
) -> None:
    said = r"^session is connected to .*other.db, but this App's workers look into .*: give a session of that"
    with Session(other) as session, pytest.raises(sqlq.errors.SchemaVersionError, match=said):
        app.enqueue(send.new(1), session=session)
    with closing(sqlq.App(engine=other)) as theirs:
        theirs.migrate()
    with Session(other) as session:
        said = "but this App's workers look into .*: they will not see them"
        with pytest.warns(RuntimeWarning, match=said) as seen:
            app.enqueue(send.new(1), session=session)
        assert [warning.filename for warning in seen] == [__file__]
        app.enqueue(send.new(2), session=session)
        session.commit()
    assert len(committed(other)) == 2
    url = engine.url.set(host="localhost")
    if engine.dialect.name == "sqlite":
        (tmp_path / "link.db").symlink_to(engine.url.database or "")
        url = make_url(sqlite_url(tmp_path / "link.db"))
    same = create_engine(url)
    with Session(same) as session, session.begin():
        assert app.enqueue(send.new(1), session=session).created
    same.dispose()


@needs("postgresql")
def test_another_database_of_the_same_server_or_a_missing_one_warns(
    app: sqlq.App, postgresql: PostgreSQL, migrated_postgresql: str, tmp_path: Path
) -> None:
    missing = sqlq.App(sqlite_url(tmp_path / "missing.db"))
    with fresh_database(postgresql, template=migrated_postgresql) as url:
        theirs = create_engine(url, poolclass=NullPool)
        for each, says in ((app, ""), (missing, "missing.db: ")):
            warned = pytest.warns(RuntimeWarning, match=f"{says}they will not see them")
            with theirs.connect() as conn, warned:
                each.enqueue(each.named("shop.send").new(), session=conn)
    assert not (tmp_path / "missing.db").exists()


@needs("postgresql")
@pytest.mark.parametrize(("way", "why"), [(PSYCOPG, "silence"), (ASYNCPG, "a wrong role")])
def test_enqueue_in_a_session_works_while_the_apps_database_is_away(
    database_url: str, watch: Engine, why: str, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    # which waits for the thread that connects to wake workers
    monkeypatch.setattr(notify.Notifier, "close", partialmethod(notify.Notifier.close, 0.0))
    url = make_url(database_url)
    with socket.create_server(("127.0.0.1", 0)) as server:  # which takes connections and never answers
        silent = url.set(host="127.0.0.1", port=server.getsockname()[1])
        away = silent if why == "silence" else url.set(username="no")
        with closing(sqlq.App(away)) as app, way(database_url) as caller:
            new = app.named("shop.send").new()
            began = time.monotonic()
            jobs = [caller.enqueue(app, new) for _ in range(2)]
            caller.commit()
            assert time.monotonic() - began < 3  # as long as it tries to connect at least
    assert committed(watch) == [job.id for job in jobs]


def test_delays_count_by_the_databases_clock(app: sqlq.App, send: Any) -> None:
    moment = datetime.now(UTC) + timedelta(hours=3)
    options: list[dict[str, Any]] = [{"delay": "5m"}, {"available_at": moment}]
    options += [{"available_at": moment - timedelta(days=1)}, {"delay": "2h", "unique_key": "k"}]
    jobs = app.enqueue_many([send.new().set(**each) for each in options])
    jobs.append(app.enqueue(send.new().set(unique_key="k")))
    assert [job.state for job in jobs] == [*["scheduled"] * 2, "available", *["scheduled"] * 2]
    first, second = app.jobs.get(jobs[0]), app.jobs.get(jobs[1])
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
        first, second, third = conn.execute(text("SELECT * FROM jobs ORDER BY id")).mappings()
    assert (first["queue"], first["payload"]) == ("mail", '{"args": [7]}')
    assert (second["queue"], second["payload"]) == ("default", "{}")
    for found in (first, second):
        names = ("priority", "attempts", "max_attempts", "lease_token")
        assert [found[name] for name in names] == [0, 0, None, 0]
        assert found["available_at"] == found["created_at"]
    assert [*map(str, committed(watch, "job_states", "state"))] == ["available"] * 3
    again = app.enqueue(app.named("shop.send").new().set(unique_key="k"))
    assert (again.id, again.created) == (third["id"], False)


@needs("file")
def test_a_missing_file_is_not_made(tmp_path: Path, database_url: str) -> None:
    url = sqlite_url(tmp_path / "missing.db")
    says = r"there is no database file (.*missing.db): create it with sqlq migrate -d sqlite:///\1"
    for app in (sqlq.App(url), sqlq.App(engine=create_engine(url))):
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
        for i in range(10):
            assert app.enqueue(app.named("t").new()).id == i + 1
            app.jobs.list()
        with app.database.read() as conn:
            prepared = conn.scalars(text("SELECT statement FROM pg_prepared_statements")).all()
    engine.dispose()
    inserts = [re.sub(r"^WITH done AS \(", "", statement).split(" (")[0] for statement in prepared]
    assert inserts == (["INSERT INTO public.jobs"] * 2 if users_threshold else [])


def files_of(call: Callable[[], object]) -> set[str]:
    """Return the files of sqlq whose code a warm call runs: the fewest, for after a pause it checks more."""
    call()
    found = []
    for _ in range(5):
        files = set[str]()
        sys.setprofile(lambda frame, *_, files=files: files.add(frame.f_code.co_filename))
        try:
            call()
        finally:
            sys.setprofile(None)
        found.append({file for file in files if file.startswith(str(Path(sqlq.__file__).parent))})
    return min(found, key=len)


def test_an_enqueue_runs_through_few_files(
    app: sqlq.App, engine: Engine, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader who follows it opens few files, also for an asyncio session."""
    monkeypatch.setattr(notify, "QUIET_SECONDS", 3600.0)  # only the first sends a notification along
    job = app.task(name="t")(print).new()
    with engine.connect() as conn:
        found = [files_of(lambda: app.enqueue(job)), files_of(lambda: app.enqueue(job, session=conn))]
    with Session(engine) as session:
        found.append(files_of(lambda: app.enqueue(job, session=session)))
    with async_session_of(database_url)(database_url) as caller:
        found.append(files_of(lambda: caller.enqueue(app, job)))
    for files in found:
        assert len(files) <= 8, "\n".join(files)
