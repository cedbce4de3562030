"""sqlq's own connections and transactions, and the retry of a transaction where it is safe.

Callers' connections never come from here. User code never sees a connection from here.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Self

from sqlalchemy import URL, Connection, Engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import QueuePool

from sqlq.config.background import FORKABLE
from sqlq.config.constants import ANSWER_SECONDS
from sqlq.config.urls import masked, search_path_of
from sqlq.database.dialect import Dialect
from sqlq.database.dialects import dialect_named, dialect_of
from sqlq.database.engines import engine_at, engine_beside
from sqlq.database.pool import (
    RawConnections,
    dispose,
    look_at_errors,
    look_at_idle,
    raise_sqlalchemys_errors,
)
from sqlq.database.schemas import ENCRYPTION, execute_on, named
from sqlq.database.sqlite.driver import READ_ONLY, is_open, mind_the_file
from sqlq.database.timeouts import (
    ANY,
    CLAIMS,
    LISTENING,
    LOOPS,
    AnswerTimeout,
    FileUse,
    T,
    Use,
    answers,
    gate,
    is_over,
    turn,
)
from sqlq.database.values import Execute, RawRows
from sqlq.errors import ConfigurationError, UnsupportedDatabaseError
from sqlq.payload.encryption import Encryption
from sqlq.schema import version
from sqlq.schema.qualify import qualified
from sqlq.schema.tables import TOKEN_SCHEMA

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine


@dataclass(frozen=True, slots=True)
class Address:
    """The place of an App's database: a URL, and perhaps a caller's engine beside which to connect. It also
    has the requested schema, and the URL for LISTEN, if it is another."""

    url: URL = field(repr=False)
    engine: Engine | AsyncEngine | None = field(repr=False)
    schema: str | None
    listen_url: URL | None = field(default=None, repr=False)
    is_test: bool = False
    """Whether the App is at this address only for a test."""
    is_shut: Callable[[], object] = field(default=lambda: False, compare=False, repr=False)
    """Whether a test has moved the App to another database: then no connection to the App's own one is
    opened."""
    encryption: Encryption | None = field(default=None, compare=False, repr=False)
    """Encrypts or signs payloads and results there, and opens them."""

    def open(self, *, create: bool = False, use: Use = ANY) -> Database:
        """Return the database, connected to nothing yet."""
        database = Database(self.url, self.schema, self.engine, create=create, use=use)
        database.address = self
        database.encryption = self.encryption
        return database


class Database:
    """The database of an App: connections in READ COMMITTED (SQLite: BEGIN IMMEDIATE), opened when first
    needed.

    `create` allows it to make an SQLite file. Otherwise a missing file raises an error. A worker that quietly
    made an empty database would wait for ever for jobs in another one.
    """

    def __init__(
        self,
        url: URL,
        schema: str | None = None,
        engine: Engine | AsyncEngine | None = None,
        *,
        create: bool = False,
        use: Use = ANY,
    ) -> None:
        """Connects to nothing yet. `urls.database_url` has accepted the URL.

        With a caller's `engine`, to which the URL belongs, it has a pool beside the caller's. The pool
        connects as that does, so that certificates, generated passwords and other hooks keep working. It
        cannot use an asynchronous driver's connections, nor the caller's to a read-only file. There it opens
        the URL anew, with psycopg or sqlite3.
        """
        callers: Any = getattr(engine, "sync_engine", engine)
        beside = None if callers is None else engine_beside(callers, url)
        self.engine = engine = beside or engine_at(url, use)
        self._use = use
        timeout = FileUse if self.dialect.in_a_file else AnswerTimeout
        self.answer_timeout = timeout(use.answer_seconds, use.max_answer_seconds)
        """The timeout of an answer: in `begin`, `read` and `run`, and for callers that connect within it."""
        self.address: Address | None = None
        self.encryption: Encryption | None = None
        self.requested_schema = schema
        """The requested schema; None means the connection's default one."""
        self._create = create
        self._file_seen: tuple[int, int] | None = None
        self._was_open_at_fork = False
        self.on_another_file: Callable[[], None] = lambda: None
        """Called when the file of the URL is another one than before."""
        FORKABLE.add(self)
        # its threads may have opened connections after `close`; guard: collected-database-closes-its-pool
        weakref.finalize(self, dispose, engine).atexit = False
        dialect = self.dialect
        self._raw = RawConnections(engine, dialect.driver)
        raise_sqlalchemys_errors(engine)
        # guard: claims-are-planned-once
        dialect.driver.prepare(engine, self.answer_timeout, plans_once=use.plan_once)
        if dialect.in_a_file:
            event.listen(engine, "do_connect", lambda *_: mind_the_file(engine.url, create) and None)
        else:
            look_at_errors(dialect.driver, engine, self.answer_timeout)
            if use.pre_ping:
                look_at_idle(dialect.driver, engine)

    @cached_property
    def for_loops(self) -> Database:
        """The same database for endless loops that retry. It has a pool apart from user code, short timeouts,
        and no check of a connection before use. Closed with this one."""
        return self._for(LOOPS)

    @cached_property
    def for_claims(self) -> Database:
        """The same for claims alone, whose connections plan prepared statements once and by indexes. Such
        plans would be bad for other statements, with many rows at a time. Closed with this one."""
        return self._for(CLAIMS)

    def for_listening(self) -> Database:
        """Return the same database, or the one at the App's `listen_url`, for a connection that stays open to
        LISTEN. The caller closes it."""
        url = None if self.address is None else self.address.listen_url
        database = (
            self._for(LISTENING) if url is None else Database(url, self.requested_schema, use=LISTENING)
        )
        database.schema = self.schema  # queried once, on a connection that has other uses
        return database

    def for_looking(self, listening: Database) -> Database:
        """Return the database for a permanent connection that polls for jobs. It is the one for LISTEN,
        unless that has a URL of its own. The caller closes it."""
        if self.address is None or self.address.listen_url is None:
            return listening
        looking = self._for(CLAIMS)
        looking.schema = self.schema
        return looking

    def _for(self, use: Use) -> Database:
        if self.dialect.in_a_file or self.address is None:
            return self
        return self.address.open(create=self._create, use=use)

    may_wait = True
    """Whether a write may wait for a lock that another transaction holds."""

    def in_thread(self, work: Callable[..., T], *args: Any, **options: Any) -> Coroutine[Any, Any, T]:
        """Do synchronous work for asynchronous code."""
        return asyncio.to_thread(work, *args, **options)

    def after_commit(self, work: Callable[[], object]) -> None:
        """Do work that needs the commit of what was written before."""
        work()

    def require_tables(self) -> None:
        """Raise `SchemaVersionError` unless the tables are at the revision this sqlq needs."""
        with self.read() as conn:
            version.require(conn, self.schema)

    @property
    def dialect(self) -> Dialect:
        return dialect_named(self.engine.dialect.name)

    @property
    def _turn(self) -> AbstractContextManager[object]:
        """A lock in this process for writers, where the database has one writer. Each of its write
        transactions begins as soon as the one before ends, instead of polling for the file lock."""
        return turn(_turns(self._file)) if self.dialect.in_a_file else nullcontext()

    @cached_property
    def _file(self) -> str:
        return os.path.realpath(self.engine.url.database or "")

    @cached_property
    def schema(self) -> str | None:
        """The schema of the tables, always named on PostgreSQL; queries the database once where none was
        set."""
        with self.answer_timeout, self._open() as conn:
            self.require_version_of(conn)
            return version.effective_schema(conn, self.requested_schema)

    def schema_for(self, conn: Connection) -> str | None:
        """Return the schema of the jobs as seen from a caller's connection, without a query.

        It is the schema that was set, else that of sqlq's own connections if known, else the default of the
        caller's engine.
        """
        if conn.dialect.name == "sqlite":
            return None
        known: str | None = self.__dict__.get("schema") or search_path_of(self.engine.url)
        if self.dialect.schemas_are_databases:  # a caller's connection to another one is meant for that
            known = conn.dialect.default_schema_name or known
        return version.effective_schema(conn, self.requested_schema or known)  # guard: own-schema-first

    def require_version(self) -> None:
        """Raise `UnsupportedDatabaseError` for a server or library older than sqlq runs on, and for one that
        breaks a promise."""
        with self.answer_timeout, self._open() as conn:
            self.require_version_of(conn)
            if why := self.dialect.health.unfit(conn):  # guard: servers-that-break-promises-are-refused
                raise UnsupportedDatabaseError(f"sqlq does not run on {masked(self.engine.url)}: {why}")

    def require_version_of(self, conn: Connection) -> None:
        """Do the same for a connection, perhaps a caller's, without a query."""
        version, dialect = conn.dialect.server_version_info or (), dialect_of(conn)
        if version < dialect.oldest:
            raise UnsupportedDatabaseError(
                f"sqlq needs {dialect.title} {'.'.join(map(str, dialect.oldest))} or newer; "
                f"{masked(conn.engine.url)} is version {'.'.join(map(str, version))}"
            )

    def connect(self, **options: Any) -> Connection:
        """Open a connection on which every statement goes to sqlq's own schema."""
        own = self._own_options  # before, since the pool may have one connection only
        return self._open().execution_options(**own, **options)

    @property
    def _own_options(self) -> dict[str, Any]:
        return {"schema_translate_map": {TOKEN_SCHEMA: self.schema}, ENCRYPTION: self.encryption}

    def _open(self) -> Connection:
        self._may_connect()
        self._raw.close()  # one thread needs one connection only
        try:
            conn = self.engine.connect()
        except AssertionError as error:  # SQLAlchemy's, of a server that is no PostgreSQL
            raise UnsupportedDatabaseError(
                f"sqlq does not run on {masked(self.engine.url)}: {error}"
            ) from None
        conn.dialect = qualified(conn.dialect)  # guard: own-statements-are-qualified
        return conn.execution_options(**self.dialect.driver.own_options)

    def _may_connect(self) -> None:
        """Raise `ConfigurationError` where no connection may be opened."""
        if self.address is not None and self.address.is_shut():
            raise ConfigurationError(
                f"a test database is open, and this worker or connection, made before, leads to "
                f"{masked(self.engine.url)}: take it from the App again while the test database is open"
            )
        if self._was_open_at_fork:  # guard: inherited-file-is-not-used
            raise ConfigurationError(
                f"this process was forked while {self._file} was open, and SQLite could lose its writes: "
                "close connections to the file before a fork, as by engine.dispose(), or spawn processes"
            )
        # a pool beside the caller's connects by the caller's engine, without our own events
        if self.dialect.in_a_file:
            self.mind_the_file()

    def mind_the_file(self) -> None:
        """Raise an error where the file is missing. Where another one has taken its place, go over to that.
        Nobody would read what connections to the old one write."""
        file = mind_the_file(self.engine.url, self._create)
        if file != self._file_seen:
            if self._file_seen is not None:
                self.on_another_file()
                self.close()  # guard: replaced-file-is-reopened
            self._file_seen = file

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        """A transaction of its own: committed at the end of the block, rolled back if it raises."""
        with self.answer_timeout, self._turn, self.connect() as conn, conn.begin():
            yield conn
        answers.answered()

    @contextmanager
    def single_statements(self) -> Iterator[Connection]:
        """A connection for one statement that is a transaction by itself: one round trip to PostgreSQL
        instead of three. Several statements are one transaction each there. On SQLite and MariaDB they share
        one, since a change takes several."""
        if not (self.dialect.driver.default_isolation and self.takes_single_statements):
            with self.begin() as conn:
                yield conn
        else:
            self._may_connect()
            with self.answer_timeout, self._single.connect() as conn:
                conn.dialect = qualified(conn.dialect)
                yield conn
            answers.answered()

    @cached_property
    def takes_single_statements(self) -> bool:
        """Whether a statement may be a transaction by itself. On PostgreSQL it may not if the default
        isolation is stricter than READ COMMITTED, since such a statement cannot change it."""
        query = self.dialect.driver.default_isolation
        if not query:
            return True
        with self.read() as conn:
            # guard: single-statements-are-read-committed
            return conn.exec_driver_sql(query).scalar() in ("read committed", "read uncommitted")

    @cached_property
    def _single(self) -> Engine:
        return self.engine.execution_options(**self._own_options)

    @contextmanager
    def read(self, *, within_ms: int | None = None) -> Iterator[Connection]:
        """A transaction that only reads, and so waits for no writer. `within_ms` limits the time of each
        statement where these connections have no limit of their own."""
        with self.answer_timeout, self.connect(**{READ_ONLY: True}) as conn, conn.begin():
            limit_ms = self._use.read_ms or within_ms
            if limit_ms is not None:
                self.dialect.driver.limit_time(conn, "statement", limit_ms)
            yield conn
        answers.answered(reads=True)

    def run(self, work: Callable[[Connection], T], *, tries: int = 5, in_one_statement: bool = False) -> T:
        """Run `work` in a transaction of its own, or as `single_statements`; retry it, with jitter between,
        when the database undid it whole.

        It retries only where certainly nothing was written: the database reported a rollback, or the
        connection broke before COMMIT was sent. It retries only for as long as one answer may take, since the
        caller waits.
        """
        committing = False

        def transaction() -> T:
            nonlocal committing
            committing = in_one_statement
            with self.single_statements() if in_one_statement else self.begin() as conn:
                result = work(conn)
                committing = True
            return result

        return self._repeatedly(
            transaction, lambda error: error.connection_invalidated and not committing, tries
        )

    def run_statement(self, statement: str, parameters: Any) -> RawRows:
        """Run one statement, written as the driver takes it, in a transaction of its own and return its rows.
        It names its schema itself. It retries when the database undid it, but not when the connection broke,
        since the write may be done."""
        return self._on_driver(lambda execute: execute(statement, parameters))

    def run_raw(self, work: Callable[[Execute], T], *, reads: bool = False) -> T:
        """Run `work(execute)` in one transaction on a raw driver connection; retry it if the database rolled
        it back. It is one statement on PostgreSQL, and may be several on SQLite. With `reads` it is one
        statement everywhere, and waits for no writer. Where a statement may not be a transaction by itself,
        SQLAlchemy's connection begins one."""
        if not self.takes_single_statements:
            with self.begin() as conn:
                return work(execute_on(conn))
        name = self.naming()  # queries before, since the pool may have one connection only
        begins = "" if reads else self.dialect.driver.begins

        def transaction(execute: Execute) -> T:
            if begins:
                execute(begins, ())
            result = work(name(execute))
            if begins:
                execute("COMMIT", ())
            return result

        with self.answer_timeout, nullcontext() if reads else self._turn:
            return self._on_driver(transaction, reads=reads)

    def naming(self) -> Callable[[Execute], Execute]:
        """Return a function that wraps an `Execute`, so that statements name the schema of the tables."""
        dialect, schema = self.engine.dialect, self.schema
        return lambda execute: (
            lambda statement, parameters: execute(named(statement, dialect, schema), parameters)
        )

    def _on_driver(self, work: Callable[[Execute], T], *, reads: bool = False) -> T:
        def transaction() -> T:
            with self.answer_timeout:
                self._may_connect()
                return self._raw.run(work)

        result = self._repeatedly(transaction)
        answers.answered(reads=reads)
        return result

    def _repeatedly(
        self,
        attempt: Callable[[], T],
        was_not_done: Callable[[DBAPIError], bool] = lambda error: False,
        tries: int = 5,
    ) -> T:
        until = time.monotonic() + ANSWER_SECONDS
        for number in range(1, tries + 1):
            try:
                return attempt()
            except DBAPIError as error:
                again = self.dialect.driver.problem(error).rolled_back or was_not_done(error)
                if not again or number == tries or time.monotonic() >= until or is_over():
                    raise
                time.sleep(random.uniform(0.5, 1.5) * 0.02 * 2**number)
        raise AssertionError("unreachable")

    def close_idle(self, *, more_than: int = 0) -> None:
        """Close the pooled connections if there are more than `more_than` and none is in use; the next use
        opens a new one."""
        pool = self.engine.pool
        if isinstance(pool, QueuePool):
            self._raw.close()
            if pool.checkedin() > more_than and not pool.checkedout():  # guard: idle-connections-are-closed
                dispose(self.engine)

    def begin_anew(self) -> None:
        """Leave the connections open, to the parent process of a fork: shared, they would mix two
        conversations."""
        self._was_open_at_fork |= self.dialect.in_a_file and is_open(self._file)
        self._raw.forget()  # guard: forked-child-leaves-resting-connections
        self.engine.dispose(close=False)  # guard: forked-child-leaves-the-pool

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. One that a thread still uses is closed when it comes back. The Database may
        be used again and then opens new ones."""
        self._raw.close()
        dispose(self.engine)
        for name in ("for_loops", "for_claims"):
            derived: Database | None = self.__dict__.get(name)
            if derived is not None and derived is not self:
                derived.close()


_turns = cache(lambda file: threading.RLock())
"""The lock of this process for each file."""


def _before_fork() -> None:
    gate.begin_fork()
    for part in list(FORKABLE):
        if isinstance(part, Database) and part.dialect.in_a_file:
            part.close()  # guard: files-are-closed-before-a-fork


def _forked() -> None:
    _turns.cache_clear()  # a thread that is not in this process may hold a lock
    for part in FORKABLE:
        part.begin_anew()
    gate.end_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=gate.end_fork, after_in_child=_forked)
