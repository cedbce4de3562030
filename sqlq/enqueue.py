"""STAGE 1: a NewJob becomes a row in the caller's transaction.

The caller's connection is borrowed: it is never committed, rolled back or closed here. Everything is checked before the
first write, and the one question asked of the database beforehand cannot fail, so that a refusal leaves the caller's
transaction as it was.
"""

from __future__ import annotations

import asyncio
import os
import sys
import warnings
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError, OperationalError, UnboundExecutionError

from sqlq.errors import EnqueueError, SqlqError, UnsupportedDatabaseError
from sqlq.hints import Hints
from sqlq.job import Job, NewJob
from sqlq.schema import version
from sqlq.schema.tables import jobs as jobs_table
from sqlq.settings import masked
from sqlq.store import cluster, jobs
from sqlq.store.database import Database
from sqlq.store.sqlite import savepoint_may_be_outermost

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
    from sqlalchemy.orm import Session, scoped_session

SyncSession: TypeAlias = "Session | scoped_session[Any] | Connection"
AnyAsyncSession: TypeAlias = "AsyncSession | AsyncConnection | async_scoped_session[Any]"


class Enqueuer:
    """Puts jobs into the database, in the caller's transaction or one of its own."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._hints = Hints(database)
        self._ready: weakref.WeakKeyDictionary[Engine, str | None] = weakref.WeakKeyDictionary()

    def enqueue(self, new: Sequence[NewJob], session: SyncSession | None = None) -> list[Job]:
        """Insert jobs and return them in the order given; without a session, in a transaction that is committed here."""
        _check_new(new)
        if not new:
            return []
        if session is None:
            schema = self._own_schema()
            if len(new) == 1 and new[0].unique_key is None and self._database.takes_single_statements:
                return [self._enqueue_alone(new[0], schema)]
            done = self._database.run(lambda conn: jobs.insert(conn, new, schema))
            self._hints.send()
            return done
        conn = connection_of(session)
        schema = self._schema_of(conn)
        refuse_loose_savepoint(conn)
        try:
            done = jobs.insert(conn, new, schema)
        except OperationalError as error:
            if conn.dialect.name == "sqlite" and jobs.DIALECTS["sqlite"].rolled_back(error):
                raise EnqueueError(
                    "SQLite refused the write because somebody else wrote after this transaction first read: begin such transactions "
                    "with the write lock, by sqlq.configure_sqlite(engine, immediate=True), or run this one again"
                ) from error
            raise
        self._hints.on_commit_of(conn)
        return done

    def _enqueue_alone(self, new: NewJob, schema: str | None) -> Job:
        database = self._database
        statement, parameters = jobs.insertion(new, database.engine.dialect, schema)
        if self._hints.takes_along():
            try:
                (row,) = database.run_alone(*cluster.notifying(statement, parameters, schema))
                return jobs.inserted(new, row)
            except DBAPIError as error:
                if not database.dialect.has_no_room(error):
                    raise  # else the hint was refused, and with it the job, which does not depend on it
        (row,) = database.run_alone(statement, parameters)
        self._hints.send()
        return jobs.inserted(new, row)

    async def aenqueue(self, new: Sequence[NewJob], session: AnyAsyncSession | None = None) -> list[Job]:
        """The same for an asynchronous session; without one, the synchronous way in a thread."""
        if session is None:
            return await asyncio.to_thread(self.enqueue, new)
        target: Any = session
        if hasattr(session, "registry"):  # an async_scoped_session, which has no run_sync
            target = target()
        if not hasattr(target, "run_sync"):
            raise EnqueueError(f"aenqueue takes an AsyncSession or AsyncConnection, not a {_kind(target)}: use enqueue for that")
        done: list[Job] = await target.run_sync(lambda sync: self.enqueue(new, sync))
        return done

    def close(self) -> None:
        """Send what hints are still to be sent."""
        self._hints.close()

    def _own_schema(self) -> str | None:
        engine = self._database.engine
        if engine not in self._ready:
            with self._database.read() as conn:
                self._schema_of(conn)
        return self._ready[engine]

    def _schema_of(self, conn: Connection) -> str | None:
        """Return the schema for jobs on this connection, after asking, once per engine, whether the tables are there."""
        try:
            return self._ready[conn.engine]
        except KeyError:
            pass
        if conn.dialect.name not in jobs.DIALECTS:
            raise UnsupportedDatabaseError(f"sqlq runs on PostgreSQL and SQLite; this session is connected to {conn.dialect.name}")
        schema = self._database.schema_for(conn)
        version.require(conn, schema)
        if conn.engine is not self._database.engine and not self._is_ours(conn):
            warnings.warn(
                f"jobs are being enqueued into {masked(conn.engine.url)}, but this App's workers look into "
                f"{masked(self._database.engine.url)}: they will not see them",
                RuntimeWarning,
                stacklevel=4,
            )
        self._ready[conn.engine] = schema
        return schema

    def _is_ours(self, conn: Connection) -> bool:
        """Whether a caller's connection leads to the App's own database, by whatever name, host or proxy."""
        own, theirs = self._database.engine.url, conn.engine.url
        if own.get_backend_name() != theirs.get_backend_name():
            return False
        if own.get_backend_name() == "sqlite":
            return os.path.realpath(own.database or "") == os.path.realpath(theirs.database or "")
        if (own.host, own.port, own.database) == (theirs.host, theirs.port, theirs.database):
            return True
        who = text("SELECT current_database(), pg_postmaster_start_time()")
        try:
            with self._database.read() as mine:
                return tuple(mine.execute(who).one()) == tuple(conn.execute(who).one())
        except (DBAPIError, SqlqError):
            return True  # it cannot be told, and the caller has done nothing wrong


def _check_new(new: Sequence[NewJob]) -> None:
    for job in new:
        if not isinstance(job, NewJob):
            hint = "calling a task runs it here and now; " if job is None or asyncio.iscoroutine(job) else ""
            if asyncio.iscoroutine(job):
                job.close()
            raise EnqueueError(f"enqueue takes what task.new(…) returns, not a {_kind(job)}: {hint}write app.enqueue(task.new(…))")


def connection_of(session: Any) -> Connection:
    """Return the connection on which a session would write a job. Raises `EnqueueError` for what has no transaction to join."""
    if isinstance(session, Connection):
        return session
    # whoever has a Session has imported the ORM; who has none saves its time and memory
    orm: Any = sys.modules.get("sqlalchemy.orm")
    if orm is not None and isinstance(session, orm.scoped_session):
        session = session()
    if orm is not None and isinstance(session, orm.Session):
        try:
            conn: Connection = session.connection(bind_arguments={"clause": jobs_table})
        except UnboundExecutionError:
            raise EnqueueError(
                "this session has several binds and none for the jobs table: add binds={sqlq.schema.tables.jobs: engine} to it, "
                "or pass session.connection(bind_arguments=…) of the database that holds the jobs"
            ) from None
        return conn
    if hasattr(session, "run_sync"):
        raise EnqueueError(
            f"this is an {_kind(session)}: write await app.aenqueue(…, session=session), "
            "or await session.run_sync(…) of what takes a Session"
        )
    raise EnqueueError(f"session is a {_kind(session)}: pass a Session or Connection, which has a transaction to join, or leave it out")


def _kind(value: Any) -> str:
    return type(value).__name__


def refuse_loose_savepoint(conn: Connection) -> None:
    """Raise `EnqueueError` on an SQLite connection whose savepoint may be outermost, so that nothing can undo it as a whole."""
    if conn.dialect.name == "sqlite" and savepoint_may_be_outermost(conn):
        raise EnqueueError(
            "this SQLite connection may be in a SAVEPOINT outside any transaction, so that an outer rollback would not undo "
            "what is written: call sqlq.configure_sqlite(engine) once, where the engine is made"
        )
