"""Migrates while jobs come and go: short timeouts for locks, and indexes built beside the traffic. PostgreSQL
only.

A statement that waits for ACCESS EXCLUSIVE on a table makes all others wait behind it, readers too. So none
waits for long: it times out, lets the waiting sessions pass, and is tried again. CREATE INDEX CONCURRENTLY
builds an index and blocks no other session, but cannot be part of a transaction.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import cast

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

from sqlq.config import urls
from sqlq.errors import ConfigurationError
from sqlq.schema.qualify import in_catalog

log = logging.getLogger(__name__)


LOCK_TIMEOUT_MS = 2_000
"""The timeout of one wait of a migration for a lock. It is longer than the second after which PostgreSQL
cancels an autovacuum."""
TIMEOUT_S = 120.0
"""The time that a migration waits for another one to end, and that it keeps trying to get its locks."""
INDEX_TIMEOUT_MS = 3_600_000
"""The time that the build of an index waits for a transaction that began earlier; only vacuums and other
builds wait along."""

MIGRATIONS = int.from_bytes(b"sqlq")
"""The advisory lock of migrations."""

LOCK_NOT_AVAILABLE = "55P03"


def sqlstate(error: BaseException) -> str:
    """Return PostgreSQL's code of an error, whatever its driver is; no text for any other error."""
    cause = getattr(error, "orig", None) or error
    return getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None) or ""


def tries(seconds: float, rest_s: float, waits: str) -> Iterator[float]:
    """Yield the seconds so far for each try of something, until the time is over. A caller that has not
    returned by then gives up. Between two tries this rests, and it logs once that it waits."""
    began = time.monotonic()
    yield 0.0
    log.info(waits)
    while (so_far := time.monotonic() - began) < seconds:
        time.sleep(random.uniform(1.0, 2.0) * rest_s)
        yield so_far


@contextmanager
def looking_nowhere_else(connection: Connection) -> Iterator[None]:
    """Resolve functions, operators and types of the block in pg_catalog alone, until it or the transaction
    ends. Rules, defaults and views keep for ever the objects that were found at their creation."""
    if connection.dialect.name != "postgresql":
        yield
        return
    before = connection.exec_driver_sql("SELECT pg_catalog.current_setting('search_path')").scalar()
    connection.exec_driver_sql("SET LOCAL search_path = pg_catalog")  # guard: a-migration-looks-nowhere-else
    try:
        yield
    finally:
        with suppress(DBAPIError):  # the transaction may be broken, and the setting ends with it
            connection.execute(_SET_PATH, {"path": before})


_SET_PATH = text("SELECT pg_catalog.set_config('search_path', :path, true)")


def build_index(
    engine: Engine, schema: str, table: str, index: str, create: Callable[[Connection], None]
) -> None:
    """Build an index by `create`, which runs CREATE INDEX CONCURRENTLY IF NOT EXISTS; it can be repeated
    after any interruption.

    An interrupted build leaves an invalid index. Such an index slows every write, serves no query, and
    satisfies IF NOT EXISTS. If it is unique, it also enforces its rule as far as it can. So this drops it
    first. But a server may still run the build of a killed migrator, so this first waits for every build on
    the table.

    Call it while no other migrator can be here, for a transaction that holds no lock on the table. Raises
    `ConfigurationError` when a transaction from before the build does not end; errors of the database pass
    through.
    """
    quoted = engine.dialect.identifier_preparer.quote
    name = f"{quoted(schema)}.{quoted(index)}"
    with outside_transactions(engine) as connection:
        _await_builds(connection, f"{quoted(schema)}.{quoted(table)}")
        connection.execution_options(isolation_level="AUTOCOMMIT")
        if is_valid(connection, schema, index) is False:  # guard: broken-index-is-dropped
            log.info("dropping the index %s, whose build was broken off", index)
            connection.exec_driver_sql(f"DROP INDEX CONCURRENTLY IF EXISTS {name}")
        try:
            create(connection)
        except DBAPIError as error:
            with suppress(DBAPIError):  # a broken index slows writes, and the next try drops it in any case
                connection.exec_driver_sql(f"SET lock_timeout = {LOCK_TIMEOUT_MS}")
                connection.exec_driver_sql(f"DROP INDEX CONCURRENTLY IF EXISTS {name}")
            if sqlstate(error) != LOCK_NOT_AVAILABLE:
                raise
            raise ConfigurationError(
                f"the index {index} in {urls.masked(engine.url)} was not built, for transactions from "
                "before its build did not end: "
                "end the oldest ones in pg_stat_activity (by xact_start), then try again"
            ) from None
        if not is_valid(connection, schema, index):
            raise AssertionError(f"the revision did not build {name}")


def is_valid(connection: Connection, schema: str, index: str) -> bool | None:
    """Whether queries can use an index; None where there is no index of that name."""
    return cast("bool | None", connection.scalar(_VALID, {"schema": schema, "index": index}))


_VALID = text(
    in_catalog("""
SELECT i.indisvalid AND i.indisready AND i.indislive
  FROM pg_catalog.pg_index i
  JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname = :schema AND c.relname = :index
""")
)


@contextmanager
def outside_transactions(engine: Engine) -> Iterator[Connection]:
    """A connection that does not return to its pool, since its settings belong to the session and not to a
    transaction."""
    # An engine whose connections rest in autocommit begins no transaction.
    with engine.connect().execution_options(isolation_level="READ COMMITTED") as connection:
        with connection.begin():
            connection.exec_driver_sql("SET search_path = pg_catalog")
            connection.exec_driver_sql(f"SET lock_timeout = {INDEX_TIMEOUT_MS}")
        try:
            yield connection
        finally:
            connection.invalidate()


def _await_builds(connection: Connection, table: str) -> None:
    """Wait until no session builds an index on a table; taking the lock of a build disturbs no reader or
    writer.

    It tries the lock again and again, each time in a new transaction. A build waits for open transactions, so
    it would wait for one that waited for it.
    """
    seconds = INDEX_TIMEOUT_MS / 1000
    for _ in tries(seconds, 0.5, f"waiting for another build or a vacuum of {table}"):
        try:
            with connection.begin():
                connection.exec_driver_sql(f"LOCK TABLE {table} IN SHARE UPDATE EXCLUSIVE MODE NOWAIT")
            return
        except DBAPIError as error:
            if sqlstate(error) != LOCK_NOT_AVAILABLE:
                raise
    raise ConfigurationError(
        f"on {table} another session has been building an index, or vacuuming, for {seconds:.0f} s: "
        "look for it in pg_stat_activity, then try again"
    )
