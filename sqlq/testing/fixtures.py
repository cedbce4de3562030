"""The pytest plugin of sqlq: the fixture `sqlq_app`. Loaded in every project where sqlq is installed, so it imports little."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from sqlq.app import App


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("sqlq_app", "the App that the fixture sqlq_app gives tests: module:attribute (else SQLQ_APP)", default="")


@pytest.fixture(scope="session")
def sqlq_test_schema() -> Iterator[tuple[str, str | None]]:
    """URL and schema of the server SQLQ_TEST_DATABASE_URL names, with tables; the schema is this test run's own and goes with it."""
    with _test_schema(os.environ["SQLQ_TEST_DATABASE_URL"]) as place:
        yield place


@pytest.fixture
def sqlq_app(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[App]:
    """Your App, on a database with sqlq's tables and no jobs, for this test alone.

    The App is the one that the ini option `sqlq_app` (or SQLQ_APP) names. The database is an SQLite file made for the test,
    or lies on the server that SQLQ_TEST_DATABASE_URL names: on PostgreSQL in a schema of its own, dropped at the end of the
    session, so that nothing else there is touched; on SQLite in that very file, which must hold no jobs. Code under test
    that enqueues through a session needs a session on the same database: `create_engine(sqlq_app.database.engine.url)`.

    To say more, define a fixture of the same name with `sqlq.testing.on_database(app, url)` in it.
    """
    from sqlq.testing.place import on_database

    app = _app(request)
    if os.environ.get("SQLQ_TEST_DATABASE_URL"):
        url, schema = request.getfixturevalue("sqlq_test_schema")
        with on_database(app, url, schema=schema):
            try:
                yield app
            finally:
                _empty(app)
    else:
        file = tmp_path / "sqlq-test.db"
        with on_database(app, _sqlite_url(file)):
            yield app


def _app(request: pytest.FixtureRequest) -> App:
    import importlib

    from sqlq.app import App

    named = request.config.getini("sqlq_app") or os.environ.get("SQLQ_APP", "")
    module_name, _, attribute = named.partition(":")
    if not module_name or not attribute:
        raise pytest.UsageError(
            f"the fixture sqlq_app does not know your App: sqlq_app is {named!r}, not 'module:attribute'. Set it in pytest's "
            "configuration, for example under [tool.pytest.ini_options], or define a fixture sqlq_app of your own with "
            "sqlq.testing.on_database"
        )
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise pytest.UsageError(
            f"sqlq_app = {named!r}: there is no module {error.name!r} where pytest looks; add its folder to pythonpath in pytest's "
            'configuration, for example pythonpath = ["."]'
        ) from None
    for name in attribute.split("."):
        found = getattr(found, name, None)
    if not isinstance(found, App):
        raise pytest.UsageError(f"sqlq_app = {named!r} is not a sqlq.App, but a {type(found).__name__}")
    return found


@contextmanager
def _test_schema(url: str) -> Iterator[tuple[str, str | None]]:
    from sqlalchemy import func, select

    from sqlq.app import App
    from sqlq.schema.tables import jobs
    from sqlq.settings import database_url

    postgresql = database_url(url).get_backend_name() == "postgresql"
    schema = f"sqlq_test_{uuid.uuid4().hex[:12]}" if postgresql else None
    there = App(url, schema=schema)
    there.migrate()
    try:
        with there.database.read() as conn:
            held = conn.scalar(select(func.count()).select_from(jobs))
        if held:
            raise pytest.UsageError(f"the database of SQLQ_TEST_DATABASE_URL holds {held} jobs, and a test may not run them: name another")
        yield url, schema
    finally:
        if schema:
            with there.database.engine.begin() as conn:
                conn.exec_driver_sql(f'DROP SCHEMA "{schema}" CASCADE')
        there.close()


def _empty(app: App) -> None:
    """Delete a test's jobs. Only what the session found empty, or made itself, is ever emptied."""
    from sqlalchemy import delete

    from sqlq.schema.tables import metadata

    with app.database.begin() as conn:
        for table in metadata.tables.values():
            conn.execute(delete(table))


def _sqlite_url(file: Path) -> str:
    from sqlalchemy import URL

    return URL.create("sqlite", database=str(file)).render_as_string()
