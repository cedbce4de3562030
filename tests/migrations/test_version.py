"""Reading the revision on a caller's connection: any driver, inside any transaction, which stays usable."""

from __future__ import annotations

import asyncio
from contextlib import closing

import pytest
from sqlalchemy import URL, Connection, Engine, create_engine, make_url, text
from sqlalchemy.ext.asyncio import create_async_engine

import sqlq
from sqlq.admin.doctor.doctor import examine
from sqlq.admin.doctor.finding import Verdict
from sqlq.database import migrate, standing
from sqlq.errors import SchemaVersionError
from sqlq.schema import tables, version
from tests.kit import needs
from tests.kit.databases import DATABASES

pytestmark = pytest.mark.each_database


def test_read_returns_none_or_the_revision(empty: Engine) -> None:
    with empty.connect() as connection:
        assert version.read(connection, None) is None
    migrate.upgrade(empty, None)
    with empty.connect() as connection:
        assert version.read(connection, None) == version.HEAD
        version.require(connection, None)


def test_each_schema_has_a_revision_of_its_own(empty: Engine) -> None:
    if empty.dialect.name == "sqlite":
        migrate.upgrade(empty, "queueing")  # SQLite has no schemas: the setting means nothing there
        with empty.connect() as connection:
            assert version.read(connection, "queueing") == version.read(connection, None) == version.HEAD
    else:
        migrate.upgrade(empty, "queueing")
        with empty.connect() as connection:
            assert version.read(connection, "queueing") == version.HEAD
            assert version.read(connection, None) is None


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        ("0099", "newer than the 0001 this sqlq knows: install the newer sqlq here"),
        ("0000", "older than the 0001 this sqlq needs: run `sqlq migrate -d {url}`"),
        (None, "does not hold sqlq's tables yet: create them with `sqlq migrate -d {url}`"),
    ],
)
def test_require_names_the_fault_and_its_remedy(
    empty: Engine, monkeypatch: pytest.MonkeyPatch, found: str | None, sentence: str
) -> None:
    monkeypatch.setattr(version, "HEAD", "0001")
    migrate.upgrade(empty, None)
    with empty.begin() as connection:
        connection.execute(text("DELETE FROM sqlq_version"))
        if found:
            connection.execute(
                text("INSERT INTO sqlq_version (version_num, oldest_code) VALUES (:found, :found)"),
                {"found": found},
            )
    with empty.begin() as connection, pytest.raises(SchemaVersionError) as complaint:
        version.require(connection, None)
    assert sentence.format(url=empty.url.render_as_string()) in str(complaint.value)
    assert str(complaint.value).startswith(empty.url.render_as_string())


@pytest.mark.parametrize(
    ("oldest_code", "usable"), [("0001", True), ("0002", True), ("0003", False), ("0004", False)]
)
def test_newer_tables_are_usable_by_their_oldest_code(
    empty: Engine, monkeypatch: pytest.MonkeyPatch, oldest_code: str, usable: bool
) -> None:
    migrate.upgrade(empty, None)
    with empty.begin() as connection:
        connection.execute(
            text("UPDATE sqlq_version SET version_num = '0004', oldest_code = :oldest"),
            {"oldest": oldest_code},
        )
    monkeypatch.setattr(version, "HEAD", "0002")
    with empty.begin() as connection:
        if usable:
            assert version.require(connection, None) == "0004"
        else:
            with pytest.raises(SchemaVersionError, match="newer than the 0002 this sqlq knows"):
                version.require(connection, None)
        assert connection.execute(text("SELECT count(*) FROM jobs")).scalar() == 0, (
            "the transaction is still usable"
        )


def test_a_version_table_without_oldest_code_is_read(empty: Engine) -> None:
    """As an old sqlq_version that nobody has dropped; nothing may fail in a caller's transaction."""
    with empty.begin() as connection:
        connection.execute(text("CREATE TABLE sqlq_version (version_num VARCHAR(32) NOT NULL)"))
        assert version.find(connection, None) is None
        connection.execute(text("INSERT INTO sqlq_version VALUES ('0099')"))
        assert version.find(connection, None) == ("0099", "0099")


@needs("postgresql", empty=True)
def test_a_password_is_masked(empty_database_url: str) -> None:
    engine = create_engine(make_url(empty_database_url).set(password="hunter2"))  # trust takes any
    with engine.connect() as connection, pytest.raises(SchemaVersionError) as complaint:
        version.require(connection, None)
    engine.dispose()
    assert "hunter2" not in str(complaint.value)
    assert "postgres:***@" in str(complaint.value)


def refused_and_still_usable(connection: Connection) -> None:
    """In an open transaction: refused for want of tables, and what was written before is still there."""
    connection.execute(text("CREATE TEMPORARY TABLE orders (id INTEGER)"))
    connection.execute(text("INSERT INTO orders VALUES (1)"))
    with pytest.raises(SchemaVersionError):
        version.require(connection, None)
    assert connection.execute(text("SELECT count(*) FROM orders")).scalar() == 1


LEVELS = {
    "postgresql": [None, "AUTOCOMMIT", "REPEATABLE READ", "SERIALIZABLE"],
    "sqlite": [None, "AUTOCOMMIT", "SERIALIZABLE"],
    "mariadb": [None, "AUTOCOMMIT", "READ COMMITTED", "SERIALIZABLE"],
}
DRIVERS = {
    "postgresql": ["psycopg", "psycopg2", "asyncpg"],
    "sqlite": ["pysqlite", "aiosqlite"],
    "mariadb": ["pymysql", "asyncmy"],
}


@pytest.mark.parametrize(
    ("empty_database_url", "driver", "level"),
    [
        pytest.param(database, driver, level, marks=pytest.mark.variants if level else ())
        for database in DATABASES
        for driver in DRIVERS[database]
        for level in LEVELS[database]
    ],
    indirect=["empty_database_url"],
)
def test_a_callers_transaction_survives_on_every_driver(
    empty: Engine, driver: str, level: str | None
) -> None:
    url = empty.url.set(drivername=f"{empty.dialect.name}+{driver}")
    options = {"isolation_level": level} if level else {}
    if driver in ("asyncpg", "aiosqlite", "asyncmy"):
        asyncio.run(_asynchronously(url, options, empty))
    else:
        engine = create_engine(url, **options)
        with engine.connect() as connection:
            refused_and_still_usable(connection)
        migrate.upgrade(empty, None)
        with engine.connect() as connection:
            version.require(connection, None)
        engine.dispose()


async def _asynchronously(url: URL, options: dict[str, str], empty: Engine) -> None:
    engine = create_async_engine(url, **options)
    async with engine.connect() as connection:
        await connection.run_sync(refused_and_still_usable)
    migrate.upgrade(empty, None)
    async with engine.connect() as connection:
        await connection.run_sync(version.require, None)
    await engine.dispose()


@needs("schemas", empty=True)
def test_the_search_path_of_a_session_does_not_hide_the_version(empty: Engine) -> None:
    migrate.upgrade(empty, None)
    with empty.connect() as connection:
        connection.execute(text("SET search_path = pg_catalog"))
        version.require(connection, None)
        assert version.read(connection, None) == version.HEAD


@needs("roles", empty=True)
@pytest.mark.parametrize("granted", [[], ["USAGE ON SCHEMA queueing"], ["SELECT ON queueing.sqlq_version"]])
def test_a_missing_grant_does_not_abort_the_transaction(empty: Engine, granted: list[str]) -> None:
    migrate.upgrade(empty, "queueing")
    with empty.connect() as connection:
        connection.execute(text("CREATE ROLE sqlq_producer"))
        for grant in granted:
            connection.execute(text(f"GRANT {grant} TO sqlq_producer"))
        connection.execute(text("SET ROLE sqlq_producer"))
        with pytest.raises(
            SchemaVersionError,
            match=r"SQLQ_SCHEMA=queueing sqlq grants sqlq_producer --as producer -d postgresql\S+` prints$",
        ):
            version.require(connection, "queueing")
        connection.execute(text("RESET ROLE"))
        connection.execute(text("GRANT USAGE ON SCHEMA queueing TO sqlq_producer"))
        connection.execute(text("GRANT SELECT ON queueing.sqlq_version TO sqlq_producer"))
        connection.execute(text("SET ROLE sqlq_producer"))
        version.require(connection, "queueing")


def test_older_tables_are_reported_as_older_whatever_they_lack(empty: Engine) -> None:
    """The next revision may add a column, and who has not migrated yet has no other sqlq to go on with."""
    migrate.upgrade(empty, None)
    with empty.begin() as connection:
        for view in tables.VIEWS:
            connection.execute(text(f"DROP VIEW {view}"))
        connection.execute(text("ALTER TABLE jobs DROP COLUMN label"))
        connection.execute(text("UPDATE sqlq_version SET version_num = '0000'"))
    with closing(sqlq.App(empty.url)) as app:
        said = examine(app.database)[0]
    assert (said.check, said.verdict) == ("migrations", Verdict.TO_DO)
    assert "at revision 0000, older than the 0001 this sqlq needs: run `sqlq migrate" in said.said


def test_an_extra_column_is_accepted(empty: Engine) -> None:
    migrate.upgrade(empty, None)
    with empty.begin() as connection:
        connection.execute(text("ALTER TABLE jobs ADD COLUMN note TEXT"))
    assert standing.check(empty, None).standing is standing.Standing.UP_TO_DATE
    assert migrate.upgrade(empty, None) == version.HEAD
