"""The caller's session: its connection, and the transaction in which sqlq writes.

Nothing here queries the database.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, cast

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, UnboundExecutionError

from sqlq.config.urls import supported
from sqlq.database.caller.driver import DriverConnection
from sqlq.database.caller.drivers import driver_of, kind_of
from sqlq.database.caller.transactions import Call, at_the_end_of, nothing, when_over
from sqlq.database.dialect import Dialect
from sqlq.database.dialects import NAMES, dialect_named
from sqlq.database.sqlite.driver import begin_as_for_a_write, savepoint_may_be_outermost
from sqlq.errors import ConfigurationError, EnqueueError, UnsupportedDatabaseError
from sqlq.schema.tables import jobs as jobs_table

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
    from sqlalchemy.orm import Session, scoped_session

T = TypeVar("T")


class AnyDriverConnection(Protocol):
    """A connection of psycopg, psycopg2, PyMySQL, mysqlclient or sqlite3, or one of Django's."""

    def cursor(self) -> Any: ...
    def commit(self) -> None: ...


class AnyAsyncDriverConnection(Protocol):
    """A connection of asyncpg, or an AsyncConnection of psycopg."""

    def execute(self, query: Any, /, *args: Any, **kwargs: Any) -> Awaitable[Any]: ...


SyncSession: TypeAlias = "Session | scoped_session[Any] | Connection | AnyDriverConnection"
AnyAsyncSession: TypeAlias = (
    "AsyncSession | AsyncConnection | async_scoped_session[Any] | AnyAsyncDriverConnection"
)


AnySession: TypeAlias = "SyncSession | None"
AnySessionToAwait: TypeAlias = "AnyAsyncSession | None"
SessionOfNow: TypeAlias = (
    "scoped_session[Any] | async_scoped_session[Any] | Callable[[], SyncSession | AnyAsyncSession | None]"
)
"""The type of an App's `session`: it returns a session of its own for each thread, request or task."""


def session_getter(session: Any) -> Callable[[], Any] | None:
    """Return a function that returns the current session, for an App's `session`; None without one. Raises
    `ConfigurationError` for a value that leads all threads to one session."""
    if session is None:
        return None
    driver = kind_of(session.__class__)
    if hasattr(session, "registry") or (driver is not None and driver.is_each_threads_own):
        return lambda: session
    if driver is not None or not callable(session) or isinstance(session, type):
        raise ConfigurationError(
            f"App(session=…) is {_named(session)}: give a scoped_session, or a function that returns the "
            "session or connection of the moment, or None"
        )
    return cast("Callable[[], Any]", session)


@dataclass(eq=False)
class CallersTransaction:
    """The transaction of a caller, in which sqlq writes. The caller alone commits it or rolls it back."""

    session: Any
    """The Session itself, or the Connection."""
    conn: Any
    """It runs the store's statements in the transaction."""
    dialect: Dialect

    def write(self, work: Callable[[], T]) -> tuple[T, bool]:
        """Do `work` in it. Return the result, and whether it is committed already."""
        done = work()
        note_write(self.session)
        return done, False

    def begin_as_for_a_write(self) -> None:
        """Begin it where the driver would begin it before a write. Raises `EnqueueError` where a write would
        be committed at once."""
        if self.dialect.in_a_file:
            begin_as_for_a_write(self.conn)

    def at_the_end(self, *, committed: Call = nothing, rolled_back: Call = nothing) -> bool:
        """Call `committed` when it commits, and `rolled_back` when it, or its present savepoint, is rolled
        back. Neither may refer to the connection. Return False where nothing reports the end."""
        at_the_end_of(self.conn, committed=committed, rolled_back=rolled_back)
        return True

    def when_over(self, committed: Call, rolled_back: Call) -> bool:
        """Do as `at_the_end`, for calls that use the session or the connection again."""
        note_write(self.session)
        when_over(self.session, self.conn, committed, rolled_back)
        return True

    def refuse_if_lost(self, error: Exception) -> None:
        """Raise `EnqueueError` where the database has undone the whole transaction for this error, and ended
        it. The caller's next write would begin another, whose commit would keep that part alone. So the
        connection then refuses to go on."""
        cause, dialect = self.database_error(error), self.dialect
        query = dialect.driver.in_transaction
        if cause is None or not (query and dialect.driver.problem(cause).rolled_back):
            return
        if not self.conn.exec_driver_sql(query).scalar():
            self.conn.invalidate()  # guard: undone-transaction-invalidates-its-connection
            raise EnqueueError(
                f"{dialect.title} has undone the whole transaction, also what came before its savepoints, "
                "for a deadlock (1213) or a row that another changed (1020): roll it back, and run it again "
                f"from its start, best in READ COMMITTED ({getattr(cause, 'orig', None) or cause})"
            ) from error

    def database_error(self, error: BaseException) -> BaseException | None:
        """Return the database's error, even if a caller's hook raised another in its place. None if there is
        none."""
        if isinstance(error, DBAPIError):
            return error
        conn = self.conn
        errors = conn.errors if isinstance(conn, DriverConnection) else conn.dialect.loaded_dbapi.Error
        return next((each for each in (error, error.__cause__) if isinstance(each, errors)), None)


class DriversTransaction(CallersTransaction):
    """A transaction on a driver's own connection."""

    def write(self, work: Callable[[], T]) -> tuple[T, bool]:
        self.conn.refuse_broken()
        return cast("tuple[T, bool]", self.conn.write(work))

    def begin_as_for_a_write(self) -> None:
        self.conn.refuse_broken()
        if self.conn.commits_at_once():  # guard: no-completing-in-autocommit
            raise EnqueueError(
                "no transaction is open on this connection, and its driver begins none, so that this would "
                "be committed at once, and alone: begin one, with what the handler writes in it (the block "
                "completing(connection) begins one to complete the job)"
            )
        self.conn.begin()  # guard: driver-begins-as-for-its-own

    def at_the_end(self, *, committed: Call = nothing, rolled_back: Call = nothing) -> bool:
        """Call `committed` after the commit, where the driver reports one. None reports a rollback."""
        return bool(self.conn.on_commit(committed))

    def when_over(self, committed: Call, rolled_back: Call) -> bool:
        """Call `committed` now, where each statement is a transaction."""
        if not self.conn.commits_at_once():
            return self.at_the_end(committed=committed)
        committed()
        return True


def transaction_to_write(session: Any) -> CallersTransaction:
    """Return the transaction in which a session writes a job or its end.

    Raises `EnqueueError` where no rollback would undo the write, or no commit would keep it.
    """
    session = itself(session)
    conn = connection_of(session)
    if isinstance(conn, DriverConnection):
        return DriversTransaction(session, conn, dialect_named(conn.database))
    if conn.dialect.name not in NAMES:
        supported(conn.engine.url)  # which has a sentence for each
        raise UnsupportedDatabaseError(
            f"sqlq runs on PostgreSQL, MariaDB and SQLite; this session is connected to {conn.dialect.name}"
        )
    dialect = dialect_named(conn.dialect.name)
    if not conn.in_transaction():
        conn.begin()  # as the write would
    if dialect.in_a_file and savepoint_may_be_outermost(conn):  # guard: loose-savepoint-is-refused
        raise EnqueueError(
            "this SQLite connection may be in a SAVEPOINT outside any transaction, so that an outer "
            "rollback would not undo "
            "what is written: call sqlq.configure_sqlite(engine) once, where the engine is made"
        )
    if dialect.driver.commits_at_once(conn.connection):  # guard: enqueue-refuses-autocommit
        raise EnqueueError(
            "this connection is in AUTOCOMMIT, where no rollback takes back what is written: use an engine "
            "or connection with another isolation_level (enqueue without a session commits at once, too)"
        )
    zope = _zope()
    if zope is not None and _joined(zope).get(session) == zope.STATUS_READONLY:  # guard: zope-read-only
        raise EnqueueError(
            "zope.sqlalchemy has this session registered as read only, and rolls back what is written: use "
            "another session"
        )
    return CallersTransaction(session, conn, dialect)


def transaction_to_complete(session: Any) -> CallersTransaction:
    """Return the transaction in which a session writes the end of a job, or its cursor, and which the caller
    commits. Otherwise as `transaction_to_write`."""
    joined = transaction_to_write(session)
    joined.begin_as_for_a_write()
    return joined


def note_write(session: Any) -> None:
    """Mark the session as changed, so that its transaction commits a write that bypassed the ORM.

    Where zope.sqlalchemy ends the transaction, it rolls back a session that is not marked as changed.
    """
    zope = _zope()
    if zope is None or not hasattr(session := itself(session), "dispatch") or isinstance(session, Connection):
        return
    # the hooks know its transaction manager, and join a session that is new to them
    for listener in session.dispatch.after_flush:
        hooks = getattr(listener, "__self__", None)
        if isinstance(hooks, zope.ZopeTransactionEvents):
            hooks.mark_changed(session)  # guard: zope-session-is-marked-changed
            return
    if session in _joined(zope):  # by hand
        zope.mark_changed(session)


def _zope() -> Any:
    return sys.modules.get("zope.sqlalchemy.datamanager")


def _joined(zope: Any) -> Mapping[Any, Any]:
    """Return the sessions whose transactions zope.sqlalchemy ends, with its status of each."""
    return cast("Mapping[Any, Any]", zope._SESSION_STATE)  # noqa: SLF001 - it has no other place to look


def itself(session: Any) -> Any:
    """Return the Session of a scoped_session, and anything else as it is."""
    # This looks among the loaded modules, so that callers without a Session never import the ORM.
    orm: Any = sys.modules.get("sqlalchemy.orm")
    return session() if orm is not None and isinstance(session, orm.scoped_session) else session


def connection_of(session: Any) -> Connection:
    """Return the connection a session reads and writes on. Raises `EnqueueError` for a value that is no
    session, or one without a database."""
    if isinstance(session, (Connection, DriverConnection)):
        return cast("Connection", session)
    session = itself(session)
    orm: Any = sys.modules.get("sqlalchemy.orm")
    if orm is not None and isinstance(session, orm.Session):
        try:
            return cast("Connection", session.connection(bind_arguments={"clause": jobs_table}))
        except UnboundExecutionError:
            raise EnqueueError(
                "this session has no bind for the jobs table: make it with Session(engine), or pass "
                "session.connection(bind_arguments=…) of the database that holds the jobs"
            ) from None
    if (driver := driver_of(session)) is not None:
        if driver.is_async:
            raise EnqueueError(f"this is {_named(session)}, which is asynchronous: {_AWAIT}")
        return cast("Connection", driver)
    if hasattr(session, "run_sync"):
        raise EnqueueError(
            f"this is {_named(session)}: {_AWAIT}, or await session.run_sync(…) of what takes a Session"
        )
    raise EnqueueError(
        f"session is {_named(session)}: pass a Session or Connection of SQLAlchemy, or a connection of a "
        "driver that sqlq knows; on any other run what app.statement(task.new(…)) returns, or leave it out"
    )


_AWAIT = "await the call of the same name with an a before it, as in await app.aenqueue(…, session=…)"


def asynchronous(session: Any) -> Any:
    """Return the object of an asynchronous session whose `run_sync` runs synchronous work on its connection,
    awaited on the caller's loop. Raises `EnqueueError` for one that is not asynchronous."""
    if hasattr(session, "registry"):  # an async_scoped_session, which has no run_sync
        session = session()
    if hasattr(session, "run_sync"):
        return session
    if (driver := driver_of(session)) is not None and driver.is_async:
        return driver
    raise EnqueueError(
        f"an awaited call takes an AsyncSession, an AsyncConnection or an asynchronous driver's connection, "
        f"not {_named(session)}: use the call of the same name without the a, as in app.enqueue(…), or run "
        "what app.statement(task.new(…)) returns"
    )


def transaction_of(driver: DriverConnection) -> Any:
    """Return a context manager of a transaction on a driver's connection, asynchronous where the connection
    is. Raises `EnqueueError` where one is open, which this one would end."""
    if driver.has_started():
        raise EnqueueError(
            "a transaction is open on this connection, and this block makes one of its own: end that one "
            "before, or write complete(connection) in it"
        )
    return driver.transaction()


@contextmanager
def transaction_in(sessions: Any) -> Iterator[Any]:
    """Yield a session of an engine or a factory. Its transaction is committed at the block's end, and rolled
    back if it raises. For a driver's connection yield itself, in a transaction of its own; see
    `transaction_of`."""
    from sqlalchemy.orm import Session

    kind = getattr(sessions, "class_", sessions)
    if hasattr(kind, "run_sync") or hasattr(kind, "sync_engine"):
        raise ConfigurationError(
            f"this block is given {_named(sessions)}: write async with acompleting(…), or await "
            "step.once_async(…)"
        )
    if (driver := driver_of(sessions)) is not None:
        with transaction_of(driver):
            yield sessions
        return
    with Session(sessions) if not callable(sessions) else sessions() as session, session.begin():
        yield session


@asynccontextmanager
async def atransaction_in(sessions: Any) -> AsyncIterator[Any]:
    """`transaction_in` with an AsyncEngine, a factory of AsyncSessions or an asynchronous driver's
    connection."""
    from sqlalchemy.ext.asyncio import AsyncSession

    if (driver := driver_of(sessions)) is not None:
        async with transaction_of(driver):
            yield sessions
        return
    async with (
        AsyncSession(sessions) if not callable(sessions) else sessions() as session,
        session.begin(),
    ):
        yield session


def _named(session: Any) -> str:
    """Return a session's class name for a message, with the library where the name alone is not clear."""
    kind = type(session)
    library = kind.__module__.partition(".")[0]
    name = kind.__name__ if library in ("builtins", "sqlalchemy") else f"{library}.{kind.__name__}"
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"
