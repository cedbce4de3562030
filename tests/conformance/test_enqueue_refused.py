"""Bad input, and servers that sqlq does not run on, are refused in a sentence, before any write."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, make_url, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

import sqlq
from sqlq import EnqueueError
from sqlq.errors import ArgumentsError, ConfigurationError, UnsupportedDatabaseError
from sqlq.schema.version import HEAD
from tests.kit import drain, for_each, needs
from tests.kit.callers import dsn
from tests.kit.command import Command
from tests.kit.databases import fresh_database
from tests.kit.mariadb import MariaDB, OwnMariaDB
from tests.kit.postgresql import async_database_url


async def awaited() -> None: ...


class Bad:
    """Mistakes of a caller, given an App with a task and an open session."""

    def __init__(self, app: Any, task: Any, session: Any) -> None:
        self.app, self.task, self.session = app, task, session

    def enqueue(self, job: Any, session: Any = None) -> None:
        self.app.enqueue(job, session=session or self.session)

    def many(self, jobs: Any) -> None:
        self.app.enqueue_many(jobs, session=self.session)

    def on_the_drivers_cursor(self) -> None:
        with closing(sqlite3.connect(":memory:")) as connection:
            self.enqueue(self.task.new(1), connection.cursor())

    def in_a_batch(self, job: Any) -> None:
        """The jobs before a bad one are not written either."""
        self.many([self.task.new(1), self.task.new(2).set(unique_key="k"), job])


UNKNOWN = SimpleNamespace(cursor=print)  # a connection that sqlq does not know
MISTAKES: dict[type[Exception], list[tuple[Callable[[Bad], Any], str]]] = {
    ArgumentsError: [
        (lambda my: my.task.new(), "missing a required argument: 'order_id'"),
        (lambda my: my.task.new(None), "order_id is None, .* session.flush"),
        (lambda my: my.task.new(1, {"a": [float("nan")]}), r"shop.send: note\['a'\]\[0\] is nan"),
        (lambda my: my.in_a_batch(my.task.new(1, object())), "of type object"),
    ],
    EnqueueError: [
        (lambda my: my.task.new(1).set(delay="5 minutes"), "delay is '5 minutes': write it as in"),
        (lambda my: my.enqueue(my.task), "not a Task: write app.enqueue"),
        (lambda my: my.enqueue(my.task(1)), "not a NoneType: calling a task runs it here and now"),
        (lambda my: my.enqueue(awaited()), "not a coroutine: calling a task runs it here and now; write"),
        (lambda my: my.enqueue([my.task.new(1)]), "not a list: write app.enqueue"),
        (lambda my: my.enqueue("shop.send"), "not a str: write"),
        (lambda my: my.in_a_batch(my.task), "not a Task"),
        (lambda my: my.many(my.task.new(1)), r"takes a list of what task.new\(…\) returns, not a NewJob"),
        (lambda my: my.many(my.task), "not a Task: write app.enqueue_many"),
        (lambda my: my.on_the_drivers_cursor(), r"sqlite3.Cursor: pass a Session .* or a connection of a"),
        (lambda my: my.enqueue(my.task.new(1), UNKNOWN), "Namespace: pass .* on any other run what app.st"),
        (lambda my: my.enqueue(my.task.new(1), my.session.get_bind()), "session is .*Engine.*: pass"),
        (lambda my: my.enqueue(my.task.new(1), sessionmaker()), "session is .*sessionmaker.*: pass"),
        (lambda my: my.enqueue(my.task.new(1), "sqlite:///shop.db"), "session is .*str.*: pass a Session"),
        (lambda my: my.enqueue(my.task.new(1), AsyncSession()), "as in await app.aenqueue"),
    ],
    ConfigurationError: [
        (lambda my: my.app.task(my.task), "^shop.send is a task already: @app.task takes the function"),
        (lambda my: my.app.task(queue="mail")(my.task), "^shop.send is a task already"),
    ],
}


@for_each(("kind", "go_wrong", "message"), [(kind, *row) for kind, rows in MISTAKES.items() for row in rows])
def test_a_mistake_leaves_the_transaction_usable(
    database_url: str, engine: Engine, kind: type[Exception], go_wrong: Callable[[Bad], Any], message: str
) -> None:
    app = sqlq.App(database_url)

    @app.task(name="shop.send")
    def send(order_id: int, note: Any = None) -> None: ...

    with Session(engine) as session:
        first = app.enqueue(send.new(1), session=session)
        with pytest.raises(kind, match=message) as refusal:
            go_wrong(Bad(app, send, session))
        assert ("\n" in str(refusal.value), len(str(refusal.value)) < 500) == (False, True)
        last = app.enqueue(send.new(2), session=session)
        session.commit()
        assert list(session.scalars(text("SELECT id FROM jobs ORDER BY id"))) == [first.id, last.id]
        session.execute(text("DELETE FROM jobs"))
        session.commit()
    assert list(app.tasks) == ["shop.send"]
    app.close()


def test_a_session_of_another_kind_is_refused(app: sqlq.App, database_url: str, engine: Engine) -> None:
    task = app.named("shop.send")
    for session in (Session(engine), engine, create_async_engine(async_database_url(database_url))):
        says = r"an awaited call takes an AsyncSession, an AsyncConnection or .*, not an? .*(Session|Eng)"
        with pytest.raises(EnqueueError, match=says):
            asyncio.run(app.aenqueue(task.new(), session=session))  # type: ignore[arg-type]
    mysql = create_engine("sqlite://")
    mysql.dialect.name = "mysql"
    says = "this session is connected to mysql"
    with mysql.connect() as conn, pytest.raises(UnsupportedDatabaseError, match=says):
        app.enqueue(task.new(), session=conn)
    mysql.dispose()


@needs("mariadb")
def test_mariadb_by_the_name_of_mysql_is_refused_in_a_sentence(app: sqlq.App, database_url: str) -> None:
    engine = create_engine(make_url(database_url).set(drivername="mysql+pymysql"))
    task = app.named("shop.send")
    says = r"mysql: for MariaDB write mariadb\+pymysql://"
    with Session(engine) as session, pytest.raises(UnsupportedDatabaseError, match=says):
        app.enqueue(task.new(), session=session)
    with pytest.raises(UnsupportedDatabaseError, match=says):
        sqlq.App(engine=engine).enqueue(task.new())
    engine.dispose()


@needs("postgresql")
@pytest.mark.parametrize("extension", ["spock", "bdr"])
def test_a_multi_master_extension_is_refused(tmp_path: Path, database_url: str, extension: str) -> None:
    with psycopg.connect(dsn(database_url), autocommit=True) as conn:
        conn.execute("SET allow_system_table_mods = on")
        names = "oid, extname, extowner, extnamespace, extrelocatable, extversion"
        row = f"(99999, '{extension}', 10, 11, false, '5')"
        conn.execute(f"INSERT INTO pg_extension ({names}) VALUES {row}".encode())
    command = Command(tmp_path, SQLQ_DATABASE_URL=database_url)
    words = f"extension {extension} several servers take writes, and two of them may claim the same job"
    assert words in command("migrate").sentence()
    found = command("doctor")
    assert found.code == 1
    assert words in " ".join(found.out.split())


@needs("postgresql")
@for_each(
    ("version", "words"),
    [
        ("PostgreSQL 15.12-YB-2025.1.0.0-b168 on x86_64-pc-linux-gnu", "YugabyteDB does not notify workers"),
        ("CockroachDB CCL v24.1.0 (x86_64-pc-linux-gnu)", "sqlq does not run on .* 'CockroachDB CCL v24"),
    ],
)
def test_migrate_refuses_a_server_by_its_version_text(database_url: str, version: str, words: str) -> None:
    class Pretends(psycopg.Cursor[Any]):
        def execute(self, query: Any, *given: Any, **options: Any) -> Any:
            told = f"SELECT '{version}'" if "version()" in str(query) else query
            return super().execute(told, *given, **options)

    engine = create_engine(database_url, connect_args={"cursor_factory": Pretends})
    with closing(sqlq.App(engine=engine)) as app, pytest.raises(UnsupportedDatabaseError, match=words):
        app.migrate()
    engine.dispose()


@pytest.mark.parametrize("version", ["8.0.36-log", "10.6.18-MariaDB-log"])
def test_another_server_is_refused_by_its_version(version: str) -> None:
    words = rf"runs on MariaDB, and mariadb\S+ leads to MySQL {version}"
    if "MariaDB" in version:
        words = rf"needs MariaDB 10\.11 or newer; mariadb\S+ is version {version.partition('-')[0]}"
    server = OwnMariaDB(f"--version={version}")
    with closing(server), closing(sqlq.App(server.url("mysql"))) as app:
        task = app.task(name="t")(lambda: None)
        for refused in (app.migrate, lambda: app.enqueue(task.new()), lambda: drain(app)):
            with pytest.raises(UnsupportedDatabaseError, match=words):
                refused()


def test_a_url_without_a_database_needs_a_schema_which_migrate_creates(mariadb: MariaDB) -> None:
    with closing(sqlq.App(mariadb.url(""))) as app:
        for refused in (app.migrate, lambda: app.enqueue(app.named("t").new())):
            with pytest.raises(ConfigurationError, match="names no database: add it, as in …/shop, or"):
                refused()
    with fresh_database(mariadb) as url:
        for each in (mariadb.url(""), url):
            name = f"queue_{uuid4().hex[:20]}"
            with closing(sqlq.App(each, schema=name)) as app:
                assert app.migrate() is None
                first, second = (app.task(name=name)(lambda: 1).new() for name in "ab")
                app.enqueue(sqlq.chain(first, second))
                assert drain(app).finished == 2
                assert app.migrate() == HEAD
            mariadb.drop_database(mariadb.url(name))


@pytest.mark.parametrize(
    ("driver", "package"), [("pymysql", r"'sqlq-jobs\[mariadb\]'"), ("mysqldb", "mysqlclient")]
)
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, driver: str, package: str) -> None:
    for module in ("pymysql", "MySQLdb"):
        monkeypatch.setitem(sys.modules, module, None)
    app = sqlq.App(f"mariadb+{driver}://u:secret@127.0.0.1/shop")
    with closing(app), pytest.raises(UnsupportedDatabaseError, match=f"pip install {package}$") as refusal:
        app.migrate()
    assert "secret" not in str(refusal.value)
