"""The pytest plugin of sqlq: the fixture `sqlq_app`. Loaded in every project where sqlq is installed, so it
imports little."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from sqlalchemy import URL, MetaData

    from sqlq.app.app import App


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(
        "sqlq_app",
        "the App that the fixture sqlq_app gives tests: module:attribute or module:function() (else "
        "SQLQ_APP, else app in pyproject.toml under [tool.sqlq])",
        default="",
    )


@pytest.fixture(scope="session")
def sqlq_test_server() -> Iterator[App]:
    """An App without tasks on the server of SQLQ_TEST_DATABASE_URL. The tables belong to this test run; on
    PostgreSQL they are in a schema of it, on MariaDB in a database."""
    with _server_app(os.environ["SQLQ_TEST_DATABASE_URL"]) as test_app:
        yield test_app


@pytest.fixture
def sqlq_metadata() -> MetaData | None:
    """The tables that `sqlq_app` creates for each test and drops after it, beside sqlq's: none. Define a
    fixture of this name that returns your own metadata.

    >>> @pytest.fixture  # doctest: +SKIP
    ... def sqlq_metadata():
    ...     return shop.Base.metadata
    """
    return None


@pytest.fixture
def sqlq_app(request: pytest.FixtureRequest, tmp_path: Path, sqlq_metadata: MetaData | None) -> Iterator[App]:
    """Your App, on a database with sqlq's tables and no jobs, for this test alone.

    The App is the one that the ini option `sqlq_app` names, or SQLQ_APP, or [tool.sqlq] in pyproject.toml. It
    stays on that database until the test ends, whatever `App.use` is given meanwhile. The docstring of
    `sqlq.testing.on_database` lists what is out of reach. The database is an SQLite file made for the
    test, or the one that SQLQ_TEST_DATABASE_URL names:

    - On PostgreSQL, a schema of the test run's own in it, dropped at the end of the run.
      `sqlq_app.database.engine.url` leads into this schema and sees no other. On an engine of that URL your
      own tables are made, written and dropped beside sqlq's. `public` is out of reach, with what extensions
      have put there. The driver asyncpg does not take the `options` in that URL; psycopg does, for async,
      too. Where your tables are there beforehand, use an engine of SQLQ_TEST_DATABASE_URL itself: the jobs
      go into the test's schema all the same.
    - On MariaDB, a database of the test run's own on the same server, dropped at the end of the run.
      `sqlq_app.database.engine.url` names it, and the account in the URL has to be able to create it.
    - On SQLite, that very file, which may hold no rows of sqlq's.

    A schema, database or file so named serves all tests of a run: jobs are deleted after each, and ids go on.
    Your own tables keep their rows, but those of the fixture `sqlq_metadata` are new for each test.

    To set more, define a fixture of the same name with `sqlq.testing.on_database(app, url)` in it.

    >>> @pytest.fixture  # doctest: +SKIP
    ... def session(sqlq_app):
    ...     engine = create_engine(sqlq_app.database.engine.url)
    ...     Base.metadata.create_all(engine)
    ...     with Session(engine) as session:
    ...         yield session
    ...     Base.metadata.drop_all(engine)
    ...     engine.dispose()
    """
    from sqlalchemy import URL

    from sqlq.testing.database import on_database

    app = _app(request)
    if os.environ.get("SQLQ_TEST_DATABASE_URL"):
        test_app: App = request.getfixturevalue("sqlq_test_server")
        with on_database(app, test_app.url, schema=test_app.schema):
            try:
                with _own_tables(test_app, sqlq_metadata):
                    yield app
            finally:
                _empty(test_app)
    else:
        url = URL.create("sqlite", database=str(tmp_path / "sqlq-test.db"))
        with on_database(app, url), _own_tables(app, sqlq_metadata):
            yield app


def _app(request: pytest.FixtureRequest) -> App:
    import pkgutil

    from sqlq.app.app import App
    from sqlq.config import pyproject

    named = request.config.getini("sqlq_app") or os.environ.get("SQLQ_APP", "")
    if not named and (project := pyproject.find(request.config.rootpath)) is not None:
        named = project.app or ""
    try:
        app = pkgutil.resolve_name(named.removesuffix("()"))
    except (ValueError, ImportError, AttributeError) as error:
        raise pytest.UsageError(
            f"the fixture sqlq_app does not know your App: sqlq_app is {named!r} ({error}). Name it in "
            'pyproject.toml, as in app = "shop:app" under [tool.sqlq], or as sqlq_app in pytest\'s '
            'configuration, where pythonpath = ["."] adds the folder of its module; or define a fixture '
            "sqlq_app of your own with sqlq.testing.on_database"
        ) from error
    if named.endswith("()") and callable(app):
        app = app()
    if not isinstance(app, App):
        raise pytest.UsageError(f"sqlq_app = {named!r} is not a sqlq.App, but a {type(app).__name__}")
    return app


@contextmanager
def _server_app(url: str) -> Iterator[App]:
    from sqlalchemy import create_engine, text

    from sqlq.app.app import App
    from sqlq.config.urls import database_url
    from sqlq.database.dialects import dialect_at

    where, schema = database_url(url), None
    dialect = dialect_at(where)
    if not dialect.in_a_file:
        schema = f"sqlq_test_{uuid.uuid4().hex[:12]}"
        if dialect.schemas_are_databases:  # no URL leads into one that is not there
            engine = create_engine(where)
            with engine.connect() as conn:
                conn.execute(text(f"CREATE SCHEMA {schema}"))
            engine.dispose()
            where = where.set(database=schema)
        else:
            where = _into(where, schema)
    test_app = App(where, schema=schema)
    with test_app._on_test_database(where, schema=schema):
        test_app.migrate()
        try:
            _refuse_rows(test_app)
            yield test_app
        finally:
            if schema:
                with test_app.database.engine.begin() as conn:
                    cascade = "" if dialect.schemas_are_databases else " CASCADE"
                    conn.execute(text(f"DROP SCHEMA {schema}{cascade}"))


def _into(url: URL, schema: str) -> URL:
    """Return the URL with the schema as the whole search_path. Were `public` in it, too, `create_all` would
    take the tables there for those it is to make, and `drop_all` would drop them."""
    if url.get_driver_name() not in ("psycopg", "psycopg2"):
        return url
    options = url.query.get("options") or os.environ.get("PGOPTIONS", "")
    # guard: test-schema-alone
    return url.update_query_dict({"options": f"{options} -csearch_path={schema}".strip()})


@contextmanager
def _own_tables(test_app: App, metadata: MetaData | None) -> Iterator[None]:
    """Create the user's tables, and drop them at the end. Those that are there already may be no test's."""
    from sqlalchemy import create_engine, inspect
    from sqlalchemy.pool import NullPool

    if metadata is None:
        yield
        return
    engine = create_engine(test_app.url, poolclass=NullPool)
    present = {*inspect(engine).get_table_names()}
    others = [name for name, table in metadata.tables.items() if table.schema or table.name in present]
    if others:  # guard: only-a-tests-own-tables-are-dropped
        raise pytest.UsageError(
            f"sqlq_metadata has tables that exist already, or name a schema: {', '.join(others)}; sqlq_app "
            "drops its tables after each test, so create and empty these in a fixture of your own"
        )
    metadata.create_all(engine)
    try:
        yield
    finally:
        with engine.begin() as conn:
            # a test may have left a transaction open
            test_app.database.dialect.driver.limit_time(conn, lock_ms=10_000)
            metadata.drop_all(conn)


def _refuse_rows(test_app: App) -> None:
    """Refuse a database with anything of sqlq's in it: a test would run it, or delete it afterwards."""
    from sqlalchemy import func, select

    from sqlq.schema.tables import metadata

    with test_app.database.read() as conn:
        counts = {
            table.name: conn.scalar(select(func.count()).select_from(table))
            for table in metadata.sorted_tables
        }
    rows = [f"{count} in {name}" for name, count in counts.items() if count]
    if rows:  # guard: only-what-was-empty-is-emptied
        raise pytest.UsageError(
            f"the database of SQLQ_TEST_DATABASE_URL holds rows of sqlq's ({', '.join(rows)}), and tests run "
            "jobs and delete them: name another, or remove the file if it is a test's"
        )


def _empty(test_app: App) -> None:
    """Delete the rows of a test, in the database that the session found empty or made itself."""
    from sqlalchemy import delete

    from sqlq.schema.tables import metadata

    with test_app.database.begin() as conn:
        for table in metadata.tables.values():
            conn.execute(delete(table))
