"""A job is in the database if and only if the transaction it was enqueued in committed (G1), by whatever
session and driver."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, NullPool, StaticPool, create_engine, event, make_url, text
from sqlalchemy.exc import OperationalError, ProgrammingError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import sqlq
from sqlq.enqueue import notify
from sqlq.schema.tables import jobs as jobs_table
from tests.kit import committed, execute, needs
from tests.kit.callers import OfSqlalchemy, Way
from tests.kit.databases import sqlite_url
from tests.kit.postgresql import PostgreSQL, async_database_url

pytestmark = pytest.mark.each_database


@pytest.fixture
def send(app: sqlq.App) -> Any:
    @app.task(name="shop.send", queue="mail", max_attempts=3, priority=2, timeout="30s")
    def send(order_id: int = 0, **more: Any) -> None: ...

    return send


def row(engine: Engine, id: int) -> dict[str, Any]:
    with engine.connect() as conn:
        return dict(conn.execute(text("SELECT * FROM jobs WHERE id = :id"), {"id": id}).mappings().one())


# -- the caller's transaction --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Session, Connection])
def test_enqueue_does_not_end_the_callers_transaction(
    app: sqlq.App, send: Any, engine: Engine, kind: type[Any]
) -> None:
    ended: list[str] = []
    for name in ("commit", "rollback"):
        event.listen(engine, name, lambda conn, name=name: ended.append(name))
    event.listen(engine, "checkin", lambda *_: ended.append("checkin"))
    with kind(engine) if kind is Session else engine.connect() as session:
        for unique in (None, "k"):
            app.enqueue(send.new(1).set(unique_key=unique), session=session)
            app.enqueue_many([send.new(1), send.new(1).set(unique_key=unique)] * 3, session=session)
            with pytest.raises(sqlq.EnqueueError):
                app.enqueue(None, session=session)  # type: ignore[arg-type]  # what is refused here
        assert ended == []
        session.commit()
    assert ended == ["commit", "checkin"] or ended == ["commit", "rollback", "checkin"]


@needs("file")
@pytest.mark.parametrize(
    "way",
    [
        OfSqlalchemy(*way)
        for way in (("pysqlite", Session), ("pysqlite", Connection), ("aiosqlite", AsyncSession))
    ],
)
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


@needs("one_writer")
def test_a_write_on_a_stale_snapshot_is_refused_in_a_sentence(
    app: sqlq.App, send: Any, watch: Engine, engine: Engine
) -> None:
    sqlq.configure_sqlite(engine)
    with Session(engine) as session:
        session.execute(text("SELECT count(*) FROM jobs")).all()
        first = app.enqueue(send.new(1))
        with pytest.raises(
            sqlq.EnqueueError, match=r"sqlq.configure_sqlite\(engine, immediate=True\), or run this one again"
        ):
            app.enqueue(send.new(2), session=session)
        assert session.execute(text("SELECT count(*) FROM jobs")).scalar() == 0
        session.rollback()
        second = app.enqueue(send.new(2), session=session)
        session.commit()
    assert committed(watch) == [first.id, second.id]


@needs("one_writer")
def test_a_transaction_that_begins_with_the_write_lock_is_never_refused(
    app: sqlq.App, send: Any, watch: Engine, engine: Engine
) -> None:
    sqlq.configure_sqlite(engine, immediate=True)
    with Session(engine) as session:
        session.execute(text("SELECT count(*) FROM jobs")).all()
        beside = sqlq.App(engine=engine)
        with beside.database.read() as reader:
            assert reader.execute(text("SELECT count(*) FROM jobs")).scalar() == 0
        beside.close()
        app.enqueue(send.new(2), session=session)
        session.commit()
    assert len(committed(watch)) == 1


@needs("postgresql")
@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize(
    "way",
    [
        OfSqlalchemy(*way)
        for way in (("psycopg", Session), ("psycopg2", Connection), ("asyncpg", AsyncSession))
    ],
)
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
@pytest.mark.parametrize("commits", [True, False])
def test_two_phase_commit(
    app: sqlq.App, send: Any, watch: Engine, database_url: str, driver: str, commits: bool
) -> None:
    engine = create_engine(make_url(database_url).set(drivername=f"postgresql+{driver}"))
    with Session(engine, twophase=True) as session:
        app.enqueue(send.new(1), session=session)
        session.prepare()
        assert committed(watch) == []
        if commits:
            session.commit()
        else:
            session.rollback()
    engine.dispose()
    assert len(committed(watch)) == commits


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


def test_an_app_beside_an_async_engine(database_url: str, watch: Engine) -> None:
    async def main() -> list[int]:
        engine = create_async_engine(async_database_url(database_url))
        app = sqlq.App(engine=engine)
        task = app.task(name="shop.send")(print)
        one = await app.aenqueue(task.new())
        async with AsyncSession(engine) as session, session.begin():
            two = await app.aenqueue(task.new(), session=session)
        three = app.enqueue(task.new())
        app.close()
        await engine.dispose()
        return [one.id, two.id, three.id]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert asyncio.run(main()) == committed(watch)


class Base(DeclarativeBase): ...


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)


def test_enqueue_needs_a_bind_for_the_jobs_table(
    app: sqlq.App, send: Any, engine: Engine, watch: Engine, tmp_path: Path
) -> None:
    other = create_engine(sqlite_url(tmp_path / "orders.db"))
    Base.metadata.create_all(other)
    with Session(binds={Order: other}) as session:
        session.add(Order(id=1))
        with pytest.raises(
            sqlq.EnqueueError,
            match=r"this session has no bind for the jobs table: make it with Session\(engine\)",
        ):
            app.enqueue(send.new(1), session=session)
        session.commit()
    with Session(binds={Order: other, jobs_table: engine}) as session:
        session.add(Order(id=2))
        job = app.enqueue(send.new(1), session=session)
        session.commit()
    with Session(engine, binds={Order: other}) as session:
        session.add(Order(id=3))
        more = app.enqueue(send.new(1), session=session)
        session.commit()
        assert session.query(Order).count() == 3
    assert committed(watch) == [job.id, more.id]
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
    with watch.begin() as conn:
        conn.execute(text("CREATE SCHEMA tenant"))
        conn.execute(text("CREATE TABLE tenant.jobs (LIKE public.jobs INCLUDING ALL)"))
    with engine.begin() as conn:
        conn.execute(text("SET search_path TO tenant"))
        one = app.enqueue(send.new(1), session=conn)
        two = app.enqueue(send.new(2).set(unique_key="k"), session=conn)
    app.jobs.list()  # from now on the App knows its schema
    theirs = create_engine(watch.url, connect_args={"options": "-csearch_path=tenant"})
    with theirs.begin() as conn:
        three = app.enqueue(send.new(3), session=conn)
    for url in (
        f"{app.database.engine.url}?options=-csearch_path%3Dpublic",
        f"{app.database.engine.url}?options=-c%20search_path%3D%22public%22%20-cwork_mem%3D8MB",
    ):
        other = sqlq.App(url)
        with theirs.begin() as conn:
            other.enqueue(send.new(4), session=conn)
        other.close()
    theirs.dispose()
    assert committed(watch)[:3] == [one.id, two.id, three.id]
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
    execute(watch, "CREATE SCHEMA queue")
    app = sqlq.App(database_url, schema="queue")
    app.migrate()
    task = app.task(name="shop.send")(print)
    with watch.begin() as conn:
        jobs = [app.enqueue(task.new(), session=conn), app.enqueue(task.new())]
    app.close()
    assert committed(watch) == []
    with watch.connect() as conn:
        assert set(conn.scalars(text("SELECT id FROM queue.jobs"))) == {job.id for job in jobs}


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
    task = app.task(name="shop.send")(print)
    with Session(engine) as session:
        with pytest.warns(RuntimeWarning, match="missing.db: they will not see them"):
            app.enqueue(task.new(), session=session)
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


@needs("postgresql")
def test_the_same_database_by_another_name_does_not_warn(app: sqlq.App, send: Any, database_url: str) -> None:
    other = create_engine(make_url(database_url).set(host="localhost"))
    with Session(other) as session, session.begin():
        assert app.enqueue(send.new(1), session=session).created
    other.dispose()


@needs("file")
def test_the_same_file_by_another_name_does_not_warn(
    app: sqlq.App, send: Any, database_url: str, tmp_path: Path
) -> None:
    (tmp_path / "link.db").symlink_to(make_url(database_url).database or "")
    other = create_engine(sqlite_url(tmp_path / "link.db"))
    with Session(other) as session, session.begin():
        assert app.enqueue(send.new(1), session=session).created
    other.dispose()


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@needs("postgresql")
@pytest.mark.parametrize(
    ("way", "why"),
    [(OfSqlalchemy("psycopg", Session), "silence"), (OfSqlalchemy("asyncpg", AsyncSession), "a wrong role")],
)
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


def test_a_job_has_its_tasks_options(app: sqlq.App, send: Any, watch: Engine) -> None:
    job = app.enqueue(send.new(7, copy=True))
    found = row(watch, job.id)
    expected = {
        "queue": "mail",
        "task": "shop.send",
        "priority": 2,
        "attempts": 0,
        "max_attempts": 3,
        "timeout_ms": 30_000,
        "unique_key": None,
        "unique_until": "finish",
        "reserved_at": None,
        "reserved_by": None,
        "lease_expires_at": None,
        "lease_token": 0,
        "releases": 0,
        "losses": 0,
        "errors": None,
    }
    assert {name: found[name] for name in expected} == expected
    assert json.loads(found["payload"]) == {"args": [7], "kwargs": {"copy": True}}
    assert found["available_at"] == found["created_at"]


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
        conn.execute(
            text("""INSERT INTO jobs (queue, task, payload) VALUES ('mail', 'shop.send', '{"args": [7]}')""")
        )
        conn.execute(text("INSERT INTO jobs (task) VALUES ('shop.send')"))
        conn.execute(
            text(
                "INSERT INTO jobs (task, priority, max_attempts, unique_key) VALUES ('shop.send', 9, 1, 'k')"
            )
        )
    with watch.connect() as conn:
        first, second, third = conn.execute(text("SELECT * FROM jobs ORDER BY id")).mappings()
        states = list(conn.scalars(text("SELECT state FROM job_states ORDER BY id")))
    assert (first["queue"], first["payload"], second["queue"], second["payload"]) == (
        "mail",
        '{"args": [7]}',
        "default",
        "{}",
    )
    for found in (first, second):
        assert (found["priority"], found["attempts"], found["max_attempts"], found["lease_token"]) == (
            0,
            0,
            None,
            0,
        )
        assert found["available_at"] == found["created_at"]
    assert states == ["available"] * 3
    task = app.task(name="shop.send")(print)
    again = app.enqueue(task.new().set(unique_key="k"))
    assert (again.id, again.created) == (third["id"], False)


# -- tables that are not there -------------------------------------------------------------------------------


@needs("file")
@pytest.mark.parametrize("beside", [False, True])
def test_a_missing_file_is_not_made(tmp_path: Path, beside: bool, database_url: str) -> None:
    url = sqlite_url(tmp_path / "missing.db")
    app = sqlq.App(engine=create_engine(url)) if beside else sqlq.App(url)
    task = app.task(name="shop.send")(print)
    with pytest.raises(
        sqlq.errors.ConfigurationError,
        match=r"there is no database file (.*missing.db): create it with sqlq migrate -d sqlite:///\1",
    ):
        app.enqueue(task.new())
    assert not (tmp_path / "missing.db").exists()


@needs("postgresql")
@pytest.mark.parametrize("users_threshold", [5, None])
def test_the_insert_of_one_job_is_prepared_unless_the_user_disables_it(
    database_url: str, users_threshold: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "QUIET_SECONDS", 3600.0)  # only the first sends a notification along
    engine = create_engine(database_url, connect_args={"prepare_threshold": users_threshold})
    with closing(sqlq.App(engine=engine)) as app:
        task = app.task(name="t")(lambda: None)
        for i in range(10):
            assert app.enqueue(task.new()).id == i + 1
            app.jobs.list()
        with app.database.read() as conn:
            prepared = conn.scalars(text("SELECT statement FROM pg_prepared_statements")).all()
    engine.dispose()
    inserts = [re.sub(r"^WITH done AS \(", "", statement).split(" (")[0] for statement in prepared]
    assert inserts == (["INSERT INTO public.jobs"] * 2 if users_threshold else [])


def test_an_insert_on_the_driver_raises_sqlalchemys_error(app: sqlq.App) -> None:
    """Whatever the database refuses comes as SQLAlchemy's error, and the connection is good for the next."""
    task = app.task(name="t")(lambda: None)
    app.enqueue(task.new())  # after which the tables are not looked at again
    with app.database.begin() as conn:
        conn.execute(text("ALTER TABLE jobs RENAME TO elsewhere"))
    with pytest.raises((ProgrammingError, OperationalError), match="jobs"):
        app.enqueue(task.new())
    with app.database.begin() as conn:
        conn.execute(text("ALTER TABLE elsewhere RENAME TO jobs"))
    assert app.enqueue(task.new()).created


def test_the_debug_log_has_a_line_for_each_enqueued_job(
    app: sqlq.App, send: Any, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    app.enqueue(send.new())
    assert not caplog.records
    caplog.set_level("DEBUG", "sqlq")
    alone = app.enqueue(send.new())
    with Session(engine) as session, session.begin():
        keyed = app.enqueue(send.new().set(unique_key="k"), session=session)
        app.enqueue(send.new().set(unique_key="k"), session=session)
    told = [record for record in caplog.records if getattr(record, "task", None) == "shop.send"]
    assert [record.getMessage() for record in told] == [
        f"job {alone.id}: shop.send in queue mail, enqueued",
        f"job {keyed.id}: shop.send in queue mail, enqueued",
        f"job {keyed.id}: shop.send in queue mail, has the unique key already",
    ]
    assert [vars(record)["event"] for record in told] == ["enqueued", "enqueued", "not_unique"]
