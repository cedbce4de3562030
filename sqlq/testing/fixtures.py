"""The pytest plugin of sqlq: the fixture `sqlq_app`. Loaded in every project where sqlq is installed, so it
imports little."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from sqlalchemy import MetaData

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
    from sqlq.testing.database import server_app

    with server_app(os.environ["SQLQ_TEST_DATABASE_URL"]) as test_app:
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

    from sqlq.testing.database import empty, on_database, own_tables

    app = _app(request)
    if os.environ.get("SQLQ_TEST_DATABASE_URL"):
        test_app: App = request.getfixturevalue("sqlq_test_server")
        with on_database(app, test_app.url, schema=test_app.schema):
            try:
                with own_tables(test_app, sqlq_metadata):
                    yield app
            finally:
                empty(test_app)
    else:
        url = URL.create("sqlite", database=str(tmp_path / "sqlq-test.db"))
        with on_database(app, url), own_tables(app, sqlq_metadata):
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
