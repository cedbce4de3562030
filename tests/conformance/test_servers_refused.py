"""Servers and URLs that sqlq does not run on are refused in one sentence, before anything is written."""

from __future__ import annotations

import ssl
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from sqlalchemy import create_engine

import sqlq
from sqlq.errors import ConfigurationError, UnsupportedDatabaseError
from tests.kit import for_each, needs
from tests.kit.command import Command
from tests.kit.databases import fresh_database
from tests.kit.mariadb import MariaDB, OwnMariaDB

# -- like PostgreSQL -----------------------------------------------------------------------------------------


@pytest.fixture(params=["spock", "bdr"])
def extended(request: pytest.FixtureRequest, database_url: str) -> str:
    """The name of a multi-master extension that the database has, as far as its catalogue knows."""
    with psycopg.connect(database_url.replace("+psycopg", ""), autocommit=True) as conn:
        conn.execute("SET allow_system_table_mods = on")
        conn.execute(
            "INSERT INTO pg_extension (oid, extname, extowner, extnamespace, extrelocatable, extversion) "
            "VALUES (99999, %s, 10, 11, false, '5')",
            [request.param],
        )
    return str(request.param)


@needs("postgresql")
def test_a_database_with_a_multi_master_extension_is_refused(
    tmp_path: Path, database_url: str, extended: str
) -> None:
    command = Command(tmp_path, SQLQ_DATABASE_URL=database_url)
    words = (
        f"with the extension {extended} several servers take writes, and two of them may claim the same job"
    )
    assert words in command("migrate").sentence()
    found = command("doctor")
    assert found.code == 1
    assert " ".join(words.split()) in " ".join(found.out.split())


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


# -- MariaDB -------------------------------------------------------------------------------------------------


@pytest.fixture(params=["8.0.36-log", "10.6.18-MariaDB-log"])
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pretender(version: str) -> Iterator[MariaDB]:
    """A server that reports another version."""
    server = OwnMariaDB(f"--version={version}")
    try:
        yield server
    finally:
        server.close()


def test_another_server_is_refused_by_its_version(pretender: MariaDB, version: str) -> None:
    app = sqlq.App(pretender.url("mysql"))
    words = rf"runs on MariaDB, and mariadb\S+ leads to MySQL {version}"
    if "MariaDB" in version:
        words = rf"needs MariaDB 10\.11 or newer; mariadb\S+ is version {version.partition('-')[0]}"
    with closing(app):
        for refused in (
            app.migrate,
            lambda: app.enqueue(app.task(name="t")(lambda: None).new()),
            lambda: app.worker(drain=True).run(),
        ):
            with pytest.raises(UnsupportedDatabaseError, match=words):
                refused()


def test_a_url_without_a_database_needs_a_schema(mariadb: MariaDB) -> None:
    with closing(sqlq.App(mariadb.url(""))) as app:
        for refused in (app.migrate, lambda: app.enqueue(app.task(name="t")(lambda: None).new())):
            with pytest.raises(ConfigurationError, match="names no database: add it, as in …/shop, or"):
                refused()
    works_in_a_schema(mariadb, mariadb.url(""))


def test_pymysqls_connections_share_a_tls_context_unless_the_url_has_tls_options(
    mariadb: MariaDB, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, Any]] = []
    make = ssl.create_default_context

    def counted(**options: Any) -> ssl.SSLContext:
        made.append(options)
        return make(**options)

    with fresh_database(mariadb) as url, closing(sqlq.App(url)) as app:
        monkeypatch.setattr(ssl, "create_default_context", counted)  # the test has made its own connections
        app.migrate()
        for _ in range(3):
            app.close()
            assert app.queues.list() == []
        assert len(made) <= 1
        pooled = [app.database.engine.raw_connection() for _ in range(2)]
        drivers: list[Any] = [each.driver_connection for each in pooled]
        assert drivers[0].ctx is drivers[1].ctx
        assert not drivers[0]._ssl_required, "a server without TLS is still taken"
        assert drivers[0]._create_ssl_ctx({"ca": None}) is not drivers[0].ctx
        for each in pooled:
            each.close()


def test_a_schema_is_another_database_that_migrate_creates(mariadb: MariaDB) -> None:
    with fresh_database(mariadb) as url:
        works_in_a_schema(mariadb, url)


def works_in_a_schema(mariadb: MariaDB, url: str) -> None:
    name = f"queue_{uuid4().hex[:20]}"
    with closing(sqlq.App(url, schema=name)) as app:
        assert app.migrate() is None
        first = app.task(name="a")(lambda: 1).new()
        second = app.task(name="b")(lambda: 2).new()
        app.enqueue(sqlq.chain(first, second))
        assert app.worker(drain=True).run().finished == 2
        assert app.migrate() == "0001"
    mariadb.drop_database(mariadb.url(name))


@pytest.mark.parametrize(
    ("driver", "package"), [("pymysql", r"'sqlq-jobs\[mariadb\]'"), ("mysqldb", "mysqlclient")]
)
def test_a_missing_driver_is_named_with_its_package(
    monkeypatch: pytest.MonkeyPatch, driver: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, "pymysql", None)
    monkeypatch.setitem(sys.modules, "MySQLdb", None)
    app = sqlq.App(f"mariadb+{driver}://u:secret@127.0.0.1/shop")
    with closing(app), pytest.raises(UnsupportedDatabaseError, match=f": pip install {package}$") as refusal:
        app.migrate()
    assert "secret" not in str(refusal.value)
