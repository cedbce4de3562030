"""Creates, upgrades and downgrades the tables. The only module that imports Alembic, which costs 60 MB and
0.4 s.

A migration is one transaction on one connection. It takes a lock, checks the database, runs the revisions and
writes the version number. It happens as a whole or not at all, and leaves nothing behind when its process is
killed. An empty database is upgraded in one transaction. One with tables is upgraded revision by revision. So
no lock is held for longer than one revision needs, and workers can run at each revision.

On MariaDB each statement that changes a table commits. So each statement of a revision can be repeated there,
and has ALGORITHM and LOCK: it would rather fail than keep the traffic waiting. The version number is written
last, and after a kill the next migration repeats the revision.

A revision changes a view by CREATE OR REPLACE VIEW, which keeps its grants. It drops none, since users' views
may depend on it.

A revision that builds an index declares `concurrently = ("jobs", "jobs_by_task")`, its table and its name,
and does nothing else. On PostgreSQL it is built beside the traffic, outside transactions; the number moves
when the index is complete.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, TextIO, TypeVar

from sqlalchemy import Connection, Dialect, Engine, make_url, text
from sqlalchemy.exc import DBAPIError, PendingRollbackError

from sqlq.config import urls
from sqlq.database import standing
from sqlq.database.dialects import dialect_named, dialect_of
from sqlq.database.postgresql import online
from sqlq.database.standing import Standing
from sqlq.errors import ConfigurationError, SchemaVersionError
from sqlq.schema import tables, version


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Alembic's progress out of the log of an application that shows INFO."""

    def matters(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING

    loggers = [logging.getLogger(f"alembic.runtime.{name}") for name in ("migration", "plugins")]
    for logger in loggers:
        logger.addFilter(matters)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(matters)


with _quiet():
    from alembic.operations import Operations
    from alembic.runtime.migration import MigrationContext
    from alembic.script import Script, ScriptDirectory
    from alembic.util import CommandError

log = logging.getLogger(__name__)
T = TypeVar("T")

HOLDER_AFTER_S = 5.0
"""After this time a migration that waits names the holder of the lock."""

Direction = Literal["up", "down"]


def upgrade(engine: Engine, schema: str | None) -> str | None:
    """Bring the tables of a database to the newest revision, and return the one they had before (None: there
    were none).

    Creates the SQLite file and the schema where they are missing. If several processes call it,
    one migrates; the others wait and find nothing to do. It may run while jobs are enqueued and worked on: it
    waits for no lock longer than `online.LOCK_TIMEOUT_MS`, and tries again. It leaves newer tables that this
    sqlq works with as they are. After a kill or an error at any point, another call continues.

    Raises `SchemaVersionError` for tables too new for this sqlq. Raises
    `ConfigurationError` when a foreign table has one of sqlq's names, another migration does not end, or the
    tables are never free. Then it does not make that step.
    """
    step = partial(_step_up, engine, schema)
    before = current = _patiently(engine, step)
    while current is not None and current < version.HEAD:
        current = _patiently(engine, step)
    with engine.connect() as connection:
        version.require(connection, schema)
    return before


def _step_up(engine: Engine, schema: str | None) -> str | None:
    """Raise the tables by one revision, or an empty database to the newest; return the revision they had
    before."""
    with transaction(engine, schema) as connection:
        dialect, current = dialect_of(connection), version.read(connection, schema)
        if current is None:
            _limit_waits(connection)
            run(connection, schema, "up", "head")
        elif current < version.HEAD:
            following = _following(current)
            if following is None:
                raise SchemaVersionError(version.unknown(version.database(connection, schema), current))
            if hasattr(following.module, "concurrently") and dialect.migrations.build_index is not None:
                _build_index(engine, connection, schema, following)
            else:
                _limit_waits(connection)
                run(connection, schema, "up", following.revision)
        return current


def _limit_waits(connection: Connection) -> None:
    """Let no statement of a migration wait long for a table, since all others would wait behind it."""
    dialect = dialect_of(connection)
    if not dialect.in_a_file:
        connection.detach()  # no pool gets a session with these settings
    dialect.driver.limit_time(connection, "lock", online.LOCK_TIMEOUT_MS)


def _patiently(engine: Engine, step: Callable[[], T]) -> T:
    """Run `step`, a whole transaction, and repeat it while it does not get its locks.

    Between two tries it waits as long as a try may take, so that traffic has at least half of the time.
    Raises `ConfigurationError` after `online.TIMEOUT_S`.
    """
    dialect, where = dialect_of(engine), urls.masked(engine.url)
    waits = f"waiting for a moment in which no session uses the tables in {where}"
    for _ in online.tries(online.TIMEOUT_S, online.LOCK_TIMEOUT_MS / 1000, waits):
        try:
            return step()
        except DBAPIError as error:
            if not dialect.driver.problem(error).rolled_back:  # guard: migration-lock-timeout-is-reported
                raise
    raise ConfigurationError(
        f"the tables in {where} were in use whenever the migration tried, for {online.TIMEOUT_S:.0f} s; "
        f"this step of it was not made: end the oldest transactions in "
        f"{dialect.migrations.open_transactions}, then try again"
    )


def _following(revision: str) -> Script | None:
    """Return the revision after this one, None where no release has this one; the history is linear."""
    scripts = ScriptDirectory(str(location())).walk_revisions()
    return next((script for script in scripts if script.down_revision == revision), None)


def _build_index(engine: Engine, connection: Connection, schema: str | None, revision: Script) -> None:
    """Carry out a revision that builds an index, on a connection beside this one.

    This one's transaction keeps other migrators out meanwhile, and then moves the number. It is idle during
    the build, and must hold no snapshot then, or the build waits for it for ever. So its last statement
    before the build has no parameters. By measurement, the protocol keeps one with parameters open, with its
    snapshot.
    """
    name = version.effective_schema(connection, schema)
    assert name is not None
    table, index = revision.module.concurrently
    # others connect and work while this one only keeps other migrators out
    connection.detach()  # a pool of one connection has room for the other now
    connection.exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout = 0")

    def create(beside: Connection) -> None:
        context = MigrationContext.configure(beside, opts=options(name) | {"live": True})
        revision.module.upgrade(op=Operations(context), schema=name)

    with _quiet():
        online.build_index(engine, name, table, index, create)
        MigrationContext.configure(connection, opts=options(name)).stamp(
            ScriptDirectory(str(location())), revision.revision
        )


def downgrade(
    engine: Engine, schema: str | None, revision: str, *, force: bool = False
) -> tuple[str | None, str | None]:
    """Take the tables back to an older revision; "base" removes them. Return the revision before and the one
    now; None where no tables are left.

    Unless `force`, raises `ConfigurationError` when a job is in any of the tables, since a revision may drop
    its table. Also raises it for an unknown revision, and `SchemaVersionError` for tables that are missing or
    newer than this sqlq.
    """
    # `transaction` refuses the rest
    before = standing.check(engine, schema)
    if before.standing in (Standing.MISSING, Standing.FOREIGN):
        raise SchemaVersionError(before.message)
    try:
        with transaction(engine, schema) as connection:
            _lock_tables(connection, schema)
            if not force:
                _refuse_jobs(connection, schema)
            run(connection, schema, "down", revision)
            return before.revision, version.read(connection, schema)
    except DBAPIError as error:
        if not dialect_of(engine).driver.problem(error).rolled_back:
            raise
        raise ConfigurationError(
            f"the tables in {urls.masked(engine.url)} are in use: stop the workers and whatever enqueues, "
            "then try again"
        ) from None


def render_sql(dialect_name: str, schema: str | None) -> str:
    """Return the SQL of the whole upgrade of an empty database, as its shell runs it."""
    shell, begin, commit = dialect_named(dialect_name).migrations.script
    script = io.StringIO()
    script.write(f"-- sqlq's tables at revision {version.HEAD}, for {shell} and an empty database\n\n{begin}")
    dialect = make_url(f"{dialect_name}://").get_dialect()()
    write(dialect, script, None if dialect_name == "sqlite" else schema, "up", None, "head")
    script.write(commit)
    return script.getvalue()


# ── One migration, on whatever connection ───────────────────────────────────────────────────────────────────


@contextmanager
def transaction(engine: Engine, schema: str | None) -> Iterator[Connection]:
    """Open the transaction of a migration, without any other migrator, and on tables of sqlq's or none."""
    level = {} if dialect_of(engine).in_a_file else {"isolation_level": "READ COMMITTED"}
    with (
        engine.connect().execution_options(**level) as connection,
        prepared(connection, schema, lock=_begin_locked),
    ):
        yield connection
        connection.commit()


def _begin_locked(connection: Connection, schema: str | None) -> bool:
    """Begin a transaction that has the lock, or none: CREATE INDEX CONCURRENTLY of the lock's holder may wait
    for any open one."""
    connection.begin()
    dialect = dialect_of(connection)
    driver: Any = connection.connection.driver_connection  # SQLAlchemy counts one before SQLite begins it
    if dialect.in_a_file and driver.in_transaction:
        # A hook begins this engine's transactions, perhaps without the write lock; this one has read nothing
        # yet.
        connection.exec_driver_sql("ROLLBACK")
    if dialect.migrations.lock(connection, schema):
        return True
    connection.rollback()
    return False


@contextmanager
def prepared(
    connection: Connection, schema: str | None, lock: Callable[[Connection, str | None], bool] | None = None
) -> Iterator[None]:
    """Prepare a connection for a migration in its transaction, and keep other migrators out during the
    block, or until the transaction ends.

    Raises `SchemaVersionError` for tables too new for this sqlq and `ConfigurationError` for tables that are
    not sqlq's.
    """
    migrations = dialect_of(connection).migrations
    _wait(partial(lock or migrations.lock, connection, schema), connection, schema)
    try:
        _prepare(connection, schema)
        with online.looking_nowhere_else(connection):
            yield
    finally:
        if migrations.unlocks:
            with suppress(DBAPIError, PendingRollbackError):  # a lost session holds no lock
                name = version.effective_schema(connection, schema)
                connection.scalar(text(migrations.unlocks), {"schema": name})


def _prepare(connection: Connection, schema: str | None) -> None:
    """Refuse tables that cannot be migrated, and create the schema."""
    current = version.find(connection, schema)
    if current is not None and current.revision > version.HEAD and not current.usable:
        raise SchemaVersionError(version.complaint(connection, schema, current.revision))
    if current is None and (taken := standing.taken(connection, schema)):
        raise ConfigurationError(standing.foreign(connection, schema, taken))
    name, query = version.effective_schema(connection, schema), dialect_of(connection).migrations.finds_schema
    # The query comes first, since CREATE SCHEMA IF NOT EXISTS needs the right to create even if the schema
    # exists.
    if name and not connection.scalar(text(query), {"schema": name}):
        connection.exec_driver_sql(
            f"CREATE SCHEMA {connection.dialect.identifier_preparer.quote_schema(name)}"
        )


def run(connection: Connection, schema: str | None, direction: Direction, revision: str) -> None:
    """Run the revisions up or down to one, in the transaction of a connection that went through `prepare`.

    Raises `ConfigurationError` for a revision that is unknown or not in that direction. Raises
    `SchemaVersionError` for tables newer than this sqlq, whose revisions it does not have.
    """
    current = version.read(connection, schema)
    if current is not None and current > version.HEAD:
        raise SchemaVersionError(version.complaint(connection, schema, current))
    with _quiet(), _sentences(direction, revision):
        own = options(version.effective_schema(connection, schema)) | {"fn": _steps(direction, revision)}
        run_in(MigrationContext.configure(connection, opts=own))


def write(
    dialect: Dialect,
    script: TextIO,
    schema: str | None,
    direction: Direction,
    start: str | None,
    revision: str,
) -> None:
    """Write the revisions from `start` (None: from nothing) to another one as SQL, without BEGIN and
    COMMIT."""
    with _quiet(), _sentences(direction, revision):
        offline = {
            "fn": _steps(direction, revision),
            "as_sql": True,
            "output_buffer": script,
            "starting_rev": start,
        }
        run_in(MigrationContext.configure(dialect=dialect, opts=options(schema) | offline))


def options(schema: str | None) -> dict[str, Any]:
    """Return the options of an Alembic context of sqlq's history.

    `live` is for revisions that build an index: whether to use CONCURRENTLY, outside transactions.
    """
    return {"version_table": version.TABLE, "version_table_schema": schema, "live": False}


def run_in(context: MigrationContext) -> None:
    """Run an Alembic context's revisions with an `op` of their own, so that the global one stays the host
    project's."""
    schema = context.version_table_schema
    if context.as_sql and schema:
        context.execute(
            f"CREATE SCHEMA IF NOT EXISTS {context.dialect.identifier_preparer.quote_schema(schema)}"
        )
    context.run_migrations(op=Operations(context), schema=schema)


def location() -> Path:
    """Return the directory of the history: in the package when installed, beside it in a checkout."""
    package = Path(__file__).parents[1]
    for directory in (package / "migrations", package.parent / "migrations"):
        if any(directory.glob(f"versions/{version.HEAD}_*.py")):
            return directory
    raise ConfigurationError(f"this installation of sqlq has no migrations in {package}: install it again")


def _steps(direction: Direction, revision: str) -> Callable[[Any, MigrationContext], Any]:
    scripts = ScriptDirectory(str(location()))
    plan = scripts._upgrade_revs if direction == "up" else scripts._downgrade_revs  # noqa: SLF001 - as Alembic's own commands, and no public way
    return lambda heads, context: plan(revision, heads)


@contextmanager
def _sentences(direction: Direction, revision: str) -> Iterator[None]:
    begin = f"sqlq's tables cannot be taken {direction} to revision {revision!r}"
    try:
        yield
    except CommandError as error:
        raise ConfigurationError(f'{begin}: {error}; revisions go from "base" to {version.HEAD}') from None
    except (AssertionError, ValueError):  # Alembic's, for a value without the form of a revision
        # guard: unknown-revision-is-reported
        raise ConfigurationError(f'{begin}: give the number of a revision, or "base"') from None


# ── What stands in the way ──────────────────────────────────────────────────────────────────────────────────


def _wait(attempt: Callable[[], bool], connection: Connection, schema: str | None) -> None:
    where, holder = urls.masked(connection.engine.url), ""
    for waited_s in online.tries(online.TIMEOUT_S, 0.1, f"waiting for another migration of {where}"):
        if attempt():
            return
        if waited_s >= HOLDER_AFTER_S and not holder:
            holder = f" (it is held by {_holder(connection, schema)})"  # any role may hold it
            log.warning("waiting for the lock of migrations of %s%s", where, holder)
    raise ConfigurationError(
        f"{where} has been locked for {online.TIMEOUT_S:.0f} s, perhaps by another migration{holder}: try "
        "again when that has ended"
    )


def _holder(connection: Connection, schema: str | None) -> str:
    query, name = dialect_of(connection).migrations.holder, version.effective_schema(connection, schema)
    with nullcontext() if connection.in_transaction() else connection.begin():
        holder = query and connection.scalar(text(query), {"schema": name})
    return holder or "another session"


def _lock_tables(connection: Connection, schema: str | None) -> None:
    """Let no session add a job between the count and the drop."""
    dialect = dialect_of(connection)
    _limit_waits(connection)
    # on MariaDB a session that has locked some tables may use no others
    names = _JOB_TABLES if dialect.migrations.in_transactions else (*tables.TABLE_NAMES, version.TABLE)
    present = standing.present(connection, schema, names)
    if len(present) == len(names):  # else a downgrade was broken off on MariaDB, and goes on
        dialect.migrations.lock_tables(connection, present)


def _refuse_jobs(connection: Connection, schema: str | None) -> None:
    counts = {
        table: connection.exec_driver_sql(f"SELECT count(*) FROM {table}").scalar()
        for table in standing.present(connection, schema, _JOB_TABLES)
    }
    if remaining := [f"{count} in {table}" for table, count in counts.items() if count]:
        raise ConfigurationError(
            f"{version.database(connection, schema)} still holds jobs, which going down may lose: "
            f"{', '.join(remaining)}; delete them first, or add --force"
        )


_JOB_TABLES = ("jobs", "finished_jobs", "failed_jobs")
