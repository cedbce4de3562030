"""STAGE 1: a NewJob becomes a row in the caller's transaction.

The connection is the caller's: it is never committed, rolled back or closed here. Everything is checked
before the first write. Queries for these checks run on that same connection, and cannot fail in the database.
So a refusal leaves the caller's transaction as it was.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any, TypeVar

from sqlalchemy import URL, Connection, Engine
from sqlalchemy.exc import DBAPIError

from sqlq.config.durations import LONGEST_MS, Duration, milliseconds
from sqlq.config.urls import in_memory, is_same_place, masked
from sqlq.database import dialects
from sqlq.database.caller.driver import DriverConnection, Place
from sqlq.database.caller.session import (
    AnyAsyncSession,
    SyncSession,
    asynchronous,
    connection_to_write,
    database_error,
    note_write,
    on_callers,
)
from sqlq.database.caller.transactions import at_the_end_of
from sqlq.database.database import Database
from sqlq.database.dialect import Dialect
from sqlq.database.schemas import in_schema
from sqlq.enqueue.notify import Notifier
from sqlq.errors import EnqueueError, SchemaVersionError, SqlqError
from sqlq.events import Events
from sqlq.model.checks import refusing_by
from sqlq.model.flow import EnqueuedFlow, Plan
from sqlq.model.handle import Origin
from sqlq.model.job import Job, NewJob
from sqlq.schema import version
from sqlq.store.flows import flows
from sqlq.store.jobs import insert as inserting
from sqlq.store.workers import notify

T = TypeVar("T")
log = logging.getLogger("sqlq")

PARAMETER_STYLES = ("qmark", "numeric", "named", "format", "pyformat", "numeric_dollar")
"""Those of PEP 249, and $1, $2 …"""


Batch = Sequence[NewJob] | Plan
"""Jobs, or a flow, to enqueue: all of it or nothing."""


class Enqueuer:
    """Puts jobs into the database, in the caller's transaction or one of its own."""

    def __init__(self, database: Database, events: Events) -> None:
        self._database = database
        self._events = events
        self._notifier = Notifier(database)
        self._ready: weakref.WeakKeyDictionary[Engine | Place, str | None] = weakref.WeakKeyDictionary()

    def enqueue(self, batch: Batch, session: SyncSession | None = None) -> Any:
        """Insert jobs and return them in the order given, or a flow; without a session, in a transaction that
        is committed here."""
        new = batch.jobs if isinstance(batch, Plan) else batch
        if not new:
            return []
        if (seal := self._database.seal) is not None:
            new = [job._sealed_by(seal) for job in new]  # guard: jobs-are-sealed
        insert: Callable[[Connection], Any] = partial(inserting.insert, new=new)
        if isinstance(batch, Plan):
            insert = partial(flows.insert_flow, plan=batch._replace(jobs=list(new)))
        if session is not None:
            return self.join(session, insert, new)
        done = self._insert_alone(insert, None if isinstance(batch, Plan) or len(new) > 1 else new[0])
        made = _logged(done)
        self._events.enqueued(new, made)
        return done

    async def aenqueue(self, batch: Batch, session: AnyAsyncSession | None = None) -> Any:
        """The same for an asynchronous session; without one, the synchronous way in a thread."""
        if session is None:
            return await asyncio.to_thread(self.enqueue, batch)
        return await asynchronous(session).run_sync(partial(self.enqueue, batch))

    def _insert_alone(self, insert: Callable[[Connection], Any], lone: NewJob | None) -> Any:
        """Insert in a transaction of sqlq's own, a `lone` job if possible by a statement of its own."""
        database = self._database
        if database.engine not in self._ready:
            with database.read() as conn:
                self._schema_of(conn)
        schema = self._ready[database.engine]
        is_plain = lone is not None and lone.unique_key is None and lone.limit_key is None
        try:
            if lone is not None and is_plain and database.takes_single_statements:
                return [self._insert_one(lone, schema)]
            done = database.run(insert)
        except DBAPIError as error:
            _say_why(error, database.dialect, database.engine.url)
            raise
        self._notifier.send()
        return done

    def _insert_one(self, new: NewJob, schema: str | None) -> Job:
        database = self._database
        statement, parameters = inserting.insert_statement(new, database.engine.dialect, schema)
        if self._notifier.takes_along():  # guard: hint-goes-along
            try:
                (row,) = database.run_statement(*notify.notifying_statement(statement, parameters, schema))
                return inserting.inserted(new, row)
            except DBAPIError as error:
                if not database.dialect.driver.trouble(error).has_no_room:  # guard: job-without-its-hint
                    raise  # else the notification was refused, and with it the job, which needs none
        (row,) = database.run_statement(statement, parameters)
        self._notifier.send()
        return inserting.inserted(new, row)

    def join(self, session: SyncSession, work: Callable[[Connection], T], new: Sequence[NewJob] = ()) -> T:
        """Do `work` in the caller's transaction, on its connection. Listeners are notified of the jobs that
        it enqueues, where these are `new`."""
        conn, is_committed = connection_to_write(session), False
        if isinstance(conn, DriverConnection):
            conn.refuse_broken()
            done, is_committed = conn.write(lambda: self._work(conn, work))
        else:
            done = self._work(conn, work)
        note_write(session)
        made = _logged(done)
        if not is_committed:
            self._mark(conn, made)
        if not isinstance(conn, DriverConnection):
            self._notifier.on_commit_of(conn)
            self._events.enqueued(new, made, conn)
        elif is_committed:
            self._committed(new, made)
        # most drivers report no commit: workers are notified when the transaction ends, and listeners never
        elif not conn.on_commit(partial(self._committed, new, made)):
            self._notifier.at_the_end_of(conn.connection)
        return done

    def _committed(self, new: Sequence[NewJob], made: list[Job]) -> None:
        self._notifier.send()
        self._events.enqueued(new, made)

    def _work(self, conn: Any, work: Callable[[Connection], T]) -> T:
        """Do `work` on a caller's connection."""
        schema = self._schema_of(conn)
        try:
            with on_callers(conn, schema, self._database.seal):
                return work(conn)
        except Exception as error:
            if (said := database_error(conn, error)) is not None:
                self._ready.pop(conn.engine, None)  # a file or database made anew, perhaps
                _say_why(said, dialects.dialect_of(conn), conn.engine.url)
            raise

    def _mark(self, conn: Any, made: list[Job]) -> None:
        """Have handles know that their rows may go with the caller's transaction, and their ids to others."""
        if not (made and dialects.dialect_of(conn).in_a_file):
            return
        if isinstance(conn, DriverConnection):
            with in_schema(conn, None):
                origin = Origin(inserting.created(conn, [job.id for job in made]))
        else:
            origin, made = Origin(), [job for job in made if job.created]
            at_the_end_of(conn, undone=origin.undo)
        for job in made:
            job.enqueued_in(origin)

    def statement(self, job: NewJob, style: str | None) -> tuple[str, Any]:
        """Return the statement that inserts a job, and its parameters; see `App.statement`."""
        if job.limit_key is not None or job.unique_until == "pruned":
            option = 'unique_until="pruned"' if job.limit_key is None else f"the limit {job.limit_key!r}"
            raise EnqueueError(
                f"{option} of a job of {job.task} takes a second statement: enqueue it with "
                "app.enqueue(job, session=…), which takes connections of psycopg, asyncpg and sqlite3, too"
            )
        dialect = self._database.engine.dialect
        if style is None:
            style = dialects.dialect_named(dialect.name).driver.sqlalchemy.default_paramstyle
        if style not in PARAMETER_STYLES:
            raise EnqueueError(
                f"paramstyle is {style!r}: it is one of {', '.join(PARAMETER_STYLES)}, as the driver's own "
                "paramstyle says"
            )
        if (seal := self._database.seal) is not None:
            job = job._sealed_by(seal)
        return inserting.foreign_statement(job, dialect.name, style, self._database.requested_schema)

    def close(self) -> None:
        """Send the notifications that are still to be sent."""
        self._notifier.close()

    def _schema_of(self, conn: Connection) -> str | None:
        """Return the schema for jobs on this connection. Once per engine it checks that the tables are
        there."""
        try:
            return self._ready[conn.engine]
        except KeyError:
            pass
        ours = conn.engine is self._database.engine or self._is_ours(conn)
        if not ours and self._is_in_a_test and not in_memory(conn.engine.url):
            # guard: test-jobs-stay-in-the-test
            raise EnqueueError(
                f"a test database is open, {masked(self._database.engine.url)}, but this session is "
                f"connected to {masked(conn.engine.url)}: give the code under test an engine on app.url, or "
                "open that other database with sqlq.testing.on_database"
            )
        self._database.require_version_of(conn)
        schema = self._database.schema_for(conn)
        try:
            version.require(conn, schema)
        except SchemaVersionError as error:
            if ours:
                raise
            raise SchemaVersionError(
                f"session is connected to {masked(conn.engine.url)}, but this App's workers look into "
                f"{masked(self._database.engine.url)}: give a session of that database ({error})"
            ) from None
        if not ours:
            warnings.warn(
                f"jobs are being enqueued into {masked(conn.engine.url)}, but this App's workers look into "
                f"{masked(self._database.engine.url)}: they will not see them",
                RuntimeWarning,
                stacklevel=_callers_level(),
            )
        self._ready[conn.engine] = schema
        return schema

    @property
    def _is_in_a_test(self) -> bool:
        return self._database.address is not None and self._database.address.is_test

    def _is_ours(self, conn: Connection) -> bool:
        """Whether a caller's connection leads to the App's own database, by whatever name, host or proxy; in
        doubt it does.

        The own database is not connected to for that, since it may not answer; a test's is.
        """
        own, theirs = self._database.engine.url, conn.engine.url
        if own.get_backend_name() != theirs.get_backend_name():
            return False
        if dialects.dialect_at(own).in_a_file:
            if in_memory(own) and in_memory(theirs):
                return True
            return os.path.realpath(own.database or "") == os.path.realpath(theirs.database or "")
        if is_same_place(own, theirs):
            return True
        dialect = self._database.dialect
        if not self._is_in_a_test:
            name = conn.exec_driver_sql(dialect.driver.server).scalar()
            return not own.database or own.database in (theirs.database, name)
        try:
            with self._database.read() as mine:
                one, other = (each.exec_driver_sql(dialect.driver.server).one() for each in (mine, conn))
                return tuple(one) == tuple(other)
        except (DBAPIError, SqlqError):
            return True


def _callers_level() -> int:
    """Return the `stacklevel` with which a warning of the calling function names the caller of sqlq."""
    level = 1
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - what warnings themselves go by
    while frame is not None and frame.f_globals.get("__name__", "").startswith("sqlq."):
        level, frame = level + 1, frame.f_back
    return level


def _logged(done: Any) -> list[Job]:
    """Return the jobs that work in a caller's transaction has enqueued, by its result, and log them."""
    each = done.jobs if isinstance(done, EnqueuedFlow) else done if isinstance(done, list) else [done]
    made = [job for job in each if isinstance(job, Job)]
    for job in made if log.isEnabledFor(logging.DEBUG) else ():
        event = "enqueued" if job.created else "not_unique"
        log.debug(
            "job %d: %s in queue %s, %s",
            *(job.id, job.task, job.queue, "enqueued" if job.created else "has the unique key already"),
            extra={"job_id": job.id, "task": job.task, "queue": job.queue, "event": event},
        )
    return made


def spread_over(jobs: Iterable[NewJob], spread: Duration | None) -> list[NewJob]:
    """Return the jobs of a batch, due one after the other, evenly over a time. Each is due that much later
    than its own options have it. Raises `EnqueueError` for anything but jobs, and where `spread` is no
    duration."""
    if not isinstance(jobs, Iterable):
        raise EnqueueError(
            f"enqueue_many takes a list of what task.new(…) returns, not a {type(jobs).__name__}: write "
            "app.enqueue_many([task.new(…), …])"
        )
    new = list(jobs)
    if spread is None:
        return new
    with refusing_by(EnqueueError):
        span_ms = milliseconds(spread, "spread")
    check_new(new)
    return [_later(job, span_ms * i // len(new)) for i, job in enumerate(new)]


def _later(job: NewJob, ms: int) -> NewJob:
    if job.available_at is None:
        return replace(job, delay_ms=min(job.delay_ms + ms, LONGEST_MS))
    return replace(job, available_at=job.available_at + timedelta(milliseconds=ms))


def _say_why(error: BaseException, dialect: Dialect, url: URL) -> None:
    """Raise `EnqueueError` where sqlq has advice on a refused write that the database's message lacks. To the
    error of a role that lacks a right, add how to get it."""
    why = dialect.driver.trouble(error).advice  # guard: snapshot-refusal-is-said
    if why is not None:
        raise EnqueueError(why) from error
    if (mend := dialect.health.missing_grant(error, url, "producer")) is not None:
        error.add_note(mend)


def check_new(new: Sequence[NewJob]) -> None:
    """Raise `EnqueueError` for anything but a job that can be enqueued."""
    for job in new:
        if not isinstance(job, NewJob):
            hint = "calling a task runs it here and now; " if job is None or asyncio.iscoroutine(job) else ""
            if asyncio.iscoroutine(job):
                job.close()
            raise EnqueueError(
                f"enqueue takes what task.new(…) returns, not a {type(job).__name__}: {hint}write "
                "app.enqueue(task.new(…))"
            )
        if job.limit_key is not None and job.rule is None:
            raise EnqueueError(
                f"limit is {job.limit_key!r}: no limit of that name is declared; write "
                f"app.limit({job.limit_key!r}, running=5)"
            )
        if job._results:
            raise EnqueueError(
                f"an argument of {job.task} is {job._results[0][1]!r}, and the job is no step of a flow: add "
                "it to that step's flow, and enqueue the flow"
            )
