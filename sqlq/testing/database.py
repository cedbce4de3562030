"""Where a test's jobs go: another database under the user's own App, and a worker that runs what is in it."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from sqlalchemy import URL, MetaData, NullPool, create_engine, delete, func, inspect, select, text
from sqlalchemy.exc import OperationalError

from sqlq.admin.schedules import follow, tick_all
from sqlq.app.app import App
from sqlq.config import urls
from sqlq.config.durations import aware
from sqlq.database.caller.session import SyncSession, connection_of, note_write
from sqlq.database.dialects import dialect_at
from sqlq.errors import ConfigurationError, SqlqError
from sqlq.model.job import JobDetails
from sqlq.schema import version
from sqlq.schema.tables import metadata
from sqlq.worker.settle.settle import Counts

_current: list[App] = []
"""The apps whose blocks a test is in, the innermost last. No ContextVar, for a test may look from another
thread."""


@contextmanager
def on_database(app: App, url: str | URL, *, schema: str | None = None) -> Iterator[App]:
    """Point an App at a test's database, with sqlq's tables in it, while the block runs.

    The App stays the same object, so the code under test needs to know nothing. It stays on that database,
    too: `App.use` in an application factory, for example, takes effect when the block ends. Until then
    nothing is read from or written to the App's own database. A worker that was made before refuses to run.
    `enqueue` refuses a session on another database, unless that is in memory. A second App, another process,
    or SQL on another engine are out of reach.

    The tables are made where they are missing, and stay, with the jobs in them. In memory they are yours to
    make, with `create_tables`: `sqlite://` serves for what is enqueued through a session, and for `inline`.
    `assert_enqueued` knows the database without `app=`. Raises what `App(url)` and `App.migrate` raise.

    With pytest there is the fixture `sqlq_app`. With unittest:

    >>> from sqlq.testing import assert_enqueued, drain, on_database
    >>> class TestOrders(unittest.TestCase):  # doctest: +SKIP
    ...     def setUp(self):
    ...         folder = self.enterContext(tempfile.TemporaryDirectory())
    ...         self.enterContext(on_database(shop.app, f"sqlite:///{folder}/test.db"))
    ...
    ...     def test_an_order_sends_a_receipt(self):
    ...         shop.place_order(7)
    ...         assert_enqueued(shop.send_receipt, args=[7])
    ...         self.assertEqual(drain(shop.app).finished, 1)
    """
    with app._on_test_database(url, schema=schema), current(app):
        if not urls.in_memory(app.database.engine.url):
            app.migrate()
        yield app


@contextmanager
def current(app: App) -> Iterator[None]:
    """Make an App the one that `assert_enqueued` looks at, while the block runs."""
    _current.append(app)
    try:
        yield
    finally:
        _current.remove(app)


def current_app() -> App | None:
    """Return the App of the innermost block or fixture."""
    return _current[-1] if _current else None


def create_tables(connection: SyncSession, *, schema: str | None = None) -> None:
    """Make sqlq's tables where they are missing, on a Connection or Session of yours and in its transaction.

    For a test's own database in memory, or a test that runs in one transaction and rolls it back; elsewhere
    `App.migrate()` is the way. Nothing is committed here, but MariaDB itself commits with each new table.
    `schema` is as in `App(schema=…)`. Raises `ConfigurationError` where tables of another program stand in
    the way.

    >>> engine = create_engine("sqlite://", poolclass=StaticPool)  # doctest: +SKIP
    >>> with engine.begin() as connection:  # doctest: +SKIP
    ...     sqlq.testing.create_tables(connection)
    >>> async with async_engine.begin() as connection:  # doctest: +SKIP
    ...     await connection.run_sync(sqlq.testing.create_tables)
    """
    from sqlq.database import migrate

    asynchronous: Any = connection
    if hasattr(asynchronous, "run_sync"):
        raise ConfigurationError(
            f"this is an {type(connection).__name__}: write await connection.run_sync(create_tables)"
        )
    conn, schema = connection_of(connection), urls.schema_name(schema)
    tables = version.find(conn, schema)
    if tables is not None and tables.usable:
        return  # without waiting for another test, which may have the migrators' lock until it ends
    with migrate.prepared(conn, schema):
        migrate.run(conn, schema, "up", "head")
    note_write(connection)


def drain(app: App, queues: Sequence[str] | None = None) -> Counts:
    """Run every job that is available, and what these enqueue in turn, and return how many attempts ended
    how.

    A worker in this process does it, as `sqlq work --drain` would. `def` handlers run in threads, `async def`
    ones on an event loop. A failure is retried or ends in `failed_jobs`, and nothing is raised here. Only
    what is due is run: not a job with a delay, nor the next attempt of one that failed just now. Only
    committed jobs are seen, so commit first. On SQLite an open transaction that has written would keep the
    worker waiting: `SqlqError` refuses it. While the fixture `sqlq_app` or `on_database` keeps an App on a
    test's database, draining another App raises `ConfigurationError`. So does a database in memory, which the
    worker's threads could not share.

    >>> assert sqlq.testing.drain(app) == sqlq.testing.Counts(finished=2)  # doctest: +SKIP
    """
    _refuse_undrainable(app)
    return app.worker(queues, drain=True).run()


async def adrain(app: App, queues: Sequence[str] | None = None) -> Counts:
    """Do what `drain` does, with `async def` handlers and the App's lifespan on this event loop.

    There they share the engines and clients that the test has made. `drain` would run them on another loop,
    where asyncpg, for example, refuses the test's connections. `def` handlers run in threads. When the test
    is cancelled, running handlers are, too.

    >>> assert (await sqlq.testing.adrain(app)).finished == 1  # doctest: +SKIP
    """
    await asyncio.to_thread(_refuse_undrainable, app)
    return await app.worker(queues, drain=True)._arun()  # noqa: SLF001 - of no use outside of tests


def _refuse_undrainable(app: App) -> None:
    _refuse_real_database(app)
    try:
        with app.database.begin():
            pass  # on SQLite this takes the write lock, or finds that another connection keeps it
    except OperationalError as error:
        if app.database.dialect.driver.problem(error).rolled_back:
            raise SqlqError(
                "drain() cannot write: a transaction of this test is still open; commit it or roll it back "
                "first"
            ) from error
        raise


def write_declared(app: App) -> None:
    """Write the schedules that code declares, and retire those that it declares no more, as a worker does
    that starts now."""
    follow(app.database, app._schedules.declared, app._schedules.service, app.tasks, lambda: 0.0)


def tick(app: App, at: datetime, *, since: datetime | None = None) -> list[JobDetails]:
    """Enqueue what schedules have due as if it were `at`, and return the jobs in the order of their times.

    The App's declared schedules are written first, as by a worker that starts. With `since` all schedules
    begin then, as if no worker had run until `at`. Without it each goes on from its last tick, and a new one
    from now. The jobs are available at once, whatever the clock, so that `drain` runs them. Raises
    `ConfigurationError` for a time without a time zone, and as `drain` does.

    >>> noon = datetime(2026, 3, 28, 12, tzinfo=UTC)  # doctest: +SKIP
    >>> [job] = sqlq.testing.tick(app, noon + timedelta(days=1), since=noon)  # doctest: +SKIP
    """
    _refuse_real_database(app, "tick() reads and writes schedules on connections of its own, which")
    at, since = aware(at, "at"), None if since is None else aware(since, "since")
    write_declared(app)
    return [app.jobs.get(job.id) for job in tick_all(app.database, at=at, since=since)]


def _refuse_real_database(app: App, subject: str = "drain() runs a worker, whose threads") -> None:
    where = app.database.engine.url
    if urls.in_memory(where):
        raise ConfigurationError(
            f"{subject} cannot share an SQLite database in memory: run the jobs "
            'with sqlq.testing.inline(app, at="commit"), or put the test on a file'
        )
    in_tests = [other for other in _current if other._connected.address.is_test]
    if in_tests and app not in in_tests:  # guard: only-a-tests-jobs-are-drained
        raise ConfigurationError(
            f"drain() would run the jobs of {urls.masked(where)}, where no test put this App, while a "
            "test database is open for another: put this one on a test database, too, with "
            "sqlq.testing.on_database(app, url)"
        )


# -- for the fixtures of pytest ------------------------------------------------------------------------------


@contextmanager
def server_app(url: str) -> Iterator[App]:
    """An App without tasks on a server, in a schema or database made for this test run."""
    where, schema = urls.database_url(url), None
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
            with test_app.database.read() as conn:
                counts = {
                    table.name: conn.scalar(select(func.count()).select_from(table))
                    for table in metadata.sorted_tables
                }
            rows = [f"{count} in {name}" for name, count in counts.items() if count]
            if rows:  # a test would run or delete them; guard: only-what-was-empty-is-emptied
                raise ConfigurationError(
                    f"the database of SQLQ_TEST_DATABASE_URL holds rows of sqlq's ({', '.join(rows)}), and "
                    "tests run jobs and delete them: name another, or remove the file if it is a test's"
                )
            yield test_app
        finally:
            if schema:
                cascade = "" if dialect.schemas_are_databases else " CASCADE"
                with test_app.database.engine.begin() as conn:
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
def own_tables(test_app: App, own: MetaData | None) -> Iterator[None]:
    """Create the user's tables, and drop them at the end. Those that are there already may be no test's."""
    if own is None:
        yield
        return
    engine = create_engine(test_app.url, poolclass=NullPool)
    present = inspect(engine).get_table_names()
    others = [name for name, table in own.tables.items() if table.schema or table.name in present]
    if others:  # guard: only-a-tests-own-tables-are-dropped
        raise ConfigurationError(
            f"sqlq_metadata has tables that exist already, or name a schema: {', '.join(others)}; sqlq_app "
            "drops its tables after each test, so create and empty these in a fixture of your own"
        )
    own.create_all(engine)
    try:
        yield
    finally:
        with engine.begin() as conn:
            # a test may have left a transaction open
            test_app.database.dialect.driver.limit_time(conn, "lock", 10_000)
            own.drop_all(conn)


def empty(test_app: App) -> None:
    """Delete the rows of a test, in the database that the session found empty or made itself."""
    with test_app.database.begin() as conn:
        for table in metadata.tables.values():
            conn.execute(delete(table))
