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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any, TypeGuard, TypeVar
from weakref import WeakKeyDictionary

from sqlalchemy import URL, Connection, Engine
from sqlalchemy.exc import DBAPIError

from sqlq.config.constants import DEFAULT_QUEUE, WAIT_TASK
from sqlq.config.durations import MAX_MS, Duration, milliseconds
from sqlq.config.urls import in_memory, is_same_database, masked
from sqlq.database.caller.driver import Endpoint
from sqlq.database.caller.session import (
    AnyAsyncSession,
    CallersTransaction,
    DriversTransaction,
    SyncSession,
    asynchronous,
    transaction_to_write,
)
from sqlq.database.database import Database
from sqlq.database.dialect import Dialect
from sqlq.database.schemas import in_schema
from sqlq.enqueue.notify import Notifier
from sqlq.errors import EnqueueError, SchemaVersionError, SqlqError
from sqlq.events import Events
from sqlq.model.checks import refusing_by
from sqlq.model.flow import Plan
from sqlq.model.flow_parts import EnqueuedFlow
from sqlq.model.handle import Origin
from sqlq.model.job import Job, NewJob
from sqlq.schema import version
from sqlq.store.flows import flows
from sqlq.store.jobs import insert as inserting
from sqlq.store.signals import waits
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
        self._is_in_a_test = database.address is not None and database.address.is_test
        self._schemas: WeakKeyDictionary[Engine | Endpoint, str | None] = WeakKeyDictionary()
        """The schemas of the jobs' tables, by engine. Each database is checked once, at its first job."""

    def enqueue(self, batch: Batch, session: SyncSession | None = None) -> Any:
        """Insert jobs and return them in the order given, or a flow; without a session, in a transaction that
        is committed here."""
        new = batch.jobs if isinstance(batch, Plan) else batch
        if not new:
            return []
        if (encryption := self._database.encryption) is not None:
            new = [job._protected_by(encryption) for job in new]  # guard: jobs-are-protected
            batch = batch._replace(jobs=new) if isinstance(batch, Plan) else new
        if session is not None:
            return self._join(session, partial(self._insert, batch), new)
        answer = self._insert_alone(batch)
        self._publish(new, _logged(answer))
        return answer

    async def aenqueue(self, batch: Batch, session: AnyAsyncSession | None = None) -> Any:
        """The same for an asynchronous session; without one, the synchronous way in a thread."""
        if session is None:
            return await asyncio.to_thread(self.enqueue, batch)
        return await asynchronous(session).run_sync(partial(self.enqueue, batch))

    def join(self, session: SyncSession, work: Callable[[Connection], T]) -> T:
        """Do other work in the caller's transaction, on its connection, and treat the jobs that it returns as
        those that are enqueued there."""

        def in_its_schema(conn: Connection, schema: str | None) -> T:
            with in_schema(conn, schema, self._database.encryption):
                return work(conn)

        return self._join(session, in_its_schema)

    def signal(self, name: str, value: str | None, keep_ms: int, session: SyncSession | None = None) -> bool:
        """Keep a signal, whose value is JSON, in the caller's transaction or one of its own. Return whether
        it is the first of its name."""
        if value is not None and (encryption := self._database.encryption) is not None:
            # guard: signals-are-protected
            value = encryption.protect("result", WAIT_TASK, DEFAULT_QUEUE, value)
        work = partial(waits.signal, name=name, value=value, keep_ms=keep_ms)
        if session is not None:
            return self.join(session, work)
        self._database.require_tables()
        is_first = self._database.run(work)
        self._notify()
        return is_first

    def close(self) -> None:
        """Send the notifications that are still to be sent."""
        self._notifier.close()

    # -- in the caller's transaction -------------------------------------------------------------------------

    def _join(
        self, session: SyncSession, work: Callable[[Connection, str | None], T], new: Sequence[NewJob] = ()
    ) -> T:
        """Do `work` in the caller's transaction. Listeners are notified of the jobs that it enqueues, where
        these are `new`."""
        joined = transaction_to_write(session)
        answer, is_committed = joined.write(partial(self._work, joined, work))
        jobs = _logged(answer)
        if is_committed:
            self._committed(new, jobs)
            return answer
        if joined.dialect.in_a_file and jobs:
            self._mark(joined, jobs)
        self._notify_at_the_end(joined, new, jobs)
        return answer

    def _work(self, joined: CallersTransaction, work: Callable[[Connection, str | None], T]) -> T:
        """Do `work` on the caller's connection, with the schema of the jobs there."""
        conn = joined.conn
        try:
            schema = self._schemas[conn.engine]
        except KeyError:
            schema = self._require_schema(conn)
        try:
            return work(conn, schema)
        except Exception as error:
            if (cause := joined.database_error(error)) is not None:
                self._schemas.pop(conn.engine, None)  # a file or database made anew, perhaps
                joined.refuse_if_lost(error)
                _explain(cause, joined.dialect, conn.engine.url)
            raise

    def _insert(self, batch: Batch, conn: Connection, schema: str | None) -> Any:
        """Insert jobs or a flow on the caller's connection."""
        if _is_plain(batch):
            return [inserting.insert_one(conn, batch[0], schema)]
        with in_schema(conn, schema, self._database.encryption):
            return _insert_all(batch, conn)

    def _mark(self, joined: CallersTransaction, jobs: list[Job]) -> None:
        """Have handles know that their rows may go with the caller's transaction, and their ids to others."""
        if isinstance(joined, DriversTransaction):  # which reports no rollback
            with in_schema(joined.conn, None):
                origin = Origin(inserting.created(joined.conn, [job.id for job in jobs]))
        else:
            origin, jobs = Origin(), [job for job in jobs if job.created]
            joined.at_the_end(rolled_back=origin.undo)
        for job in jobs:
            job.enqueued_in(origin)

    def _notify_at_the_end(self, joined: CallersTransaction, new: Sequence[NewJob], jobs: list[Job]) -> None:
        """Notify idle workers and listeners when the transaction commits."""
        if isinstance(joined, DriversTransaction):
            # most drivers report no commit: workers are notified when the transaction ends, listeners never
            if not joined.at_the_end(committed=partial(self._committed, new, jobs)):
                self._notifier.at_the_end_of(joined.conn.connection)
            return
        if self._notifier.are_needed:
            self._notifier.connect()  # guard: hint-connects-early
            joined.at_the_end(committed=self._notifier.send)
        if new and "enqueued" in self._events.subscribed:
            joined.at_the_end(committed=partial(self._events.enqueued, new, jobs))

    def _committed(self, new: Sequence[NewJob], jobs: list[Job]) -> None:
        self._notify()
        self._publish(new, jobs)

    # -- in a transaction of sqlq's own ----------------------------------------------------------------------

    def _insert_alone(self, batch: Batch) -> Any:
        """Insert in a transaction of sqlq's own, a plain job if possible by a statement of its own."""
        database = self._database
        if database.engine not in self._schemas:
            with database.read() as conn:
                self._require_schema(conn)
        try:
            if _is_plain(batch) and database.takes_single_statements:
                return [self._insert_one(batch[0], self._schemas[database.engine])]
            answer = database.run(partial(_insert_all, batch))
        except DBAPIError as error:
            _explain(error, database.dialect, database.engine.url)
            raise
        self._notify()
        return answer

    def _insert_one(self, job: NewJob, schema: str | None) -> Job:
        database = self._database
        statement, parameters = inserting.insert_statement(job, database.engine.dialect, schema)
        if self._notifier.notifies and self._notifier.takes_along():  # guard: hint-goes-along
            try:
                (row,) = database.run_statement(*notify.notifying_statement(statement, parameters, schema))
                return inserting.inserted(job, row)
            except DBAPIError as error:
                if not database.dialect.driver.problem(error).has_no_room:  # guard: job-without-its-hint
                    raise  # else the notification was refused, and with it the job, which needs none
        (row,) = database.run_statement(statement, parameters)
        self._notify()
        return inserting.inserted(job, row)

    # -- afterwards ------------------------------------------------------------------------------------------

    def _notify(self) -> None:
        if self._notifier.are_needed:
            self._notifier.send()

    def _publish(self, new: Sequence[NewJob], jobs: list[Job]) -> None:
        """Publish the events of jobs that were enqueued."""
        if new and "enqueued" in self._events.subscribed:
            self._events.enqueued(new, jobs)

    # -- for other drivers -----------------------------------------------------------------------------------

    def statement(self, job: NewJob, style: str | None) -> tuple[str, Any]:
        """Return the statement that inserts a job, and its parameters; see `App.statement`."""
        if job.limit_key is not None or job.unique_until == "pruned":
            option = 'unique_until="pruned"' if job.limit_key is None else f"the limit {job.limit_key!r}"
            raise EnqueueError(
                f"{option} of a job of {job.task} takes a second statement: enqueue it with "
                "app.enqueue(job, session=…), which takes connections of psycopg, asyncpg and sqlite3, too"
            )
        dialect = self._database.dialect
        style = style or dialect.driver.sqlalchemy.default_paramstyle
        if style not in PARAMETER_STYLES:
            raise EnqueueError(
                f"paramstyle is {style!r}: it is one of {', '.join(PARAMETER_STYLES)}, as the driver's own "
                "paramstyle says"
            )
        if (encryption := self._database.encryption) is not None:
            job = job._protected_by(encryption)
        return inserting.foreign_statement(job, dialect.name, style, self._database.requested_schema)

    # -- which database it is --------------------------------------------------------------------------------

    def _require_schema(self, conn: Connection) -> str | None:
        """Return the schema for jobs on this connection. Raises an error where its tables are not there, or
        a test's jobs would leave the test."""
        own, theirs = self._database.engine.url, conn.engine.url
        is_own = conn.engine is self._database.engine or self._is_own(conn)
        if not is_own and self._is_in_a_test and not in_memory(theirs):
            # guard: test-jobs-stay-in-the-test
            raise EnqueueError(
                f"a test database is open, {masked(own)}, but this session is connected to "
                f"{masked(theirs)}: give the code under test an engine on app.url, or open that other "
                "database with sqlq.testing.on_database"
            )
        self._database.require_version_of(conn)
        schema = self._database.schema_for(conn)
        try:
            version.require(conn, schema)
        except SchemaVersionError as error:
            if is_own:
                raise
            raise SchemaVersionError(
                f"session is connected to {masked(theirs)}, but this App's workers look into {masked(own)}: "
                f"give a session of that database ({error})"
            ) from None
        if not is_own:
            warnings.warn(
                f"jobs are being enqueued into {masked(theirs)}, but this App's workers look into "
                f"{masked(own)}: they will not see them",
                RuntimeWarning,
                stacklevel=_callers_level(),
            )
        self._schemas[conn.engine] = schema
        return schema

    def _is_own(self, conn: Connection) -> bool:
        """Whether a caller's connection leads to the App's own database, by whatever name, host or proxy; in
        doubt it does.

        The own database is not connected to for that, since it may not answer; a test's is.
        """
        own, theirs = self._database.engine.url, conn.engine.url
        if own.get_backend_name() != theirs.get_backend_name():
            return False
        if self._database.dialect.in_a_file:
            is_same_file = os.path.realpath(own.database or "") == os.path.realpath(theirs.database or "")
            return is_same_file or (in_memory(own) and in_memory(theirs))
        if is_same_database(own, theirs):
            return True
        query = self._database.dialect.driver.server
        if not self._is_in_a_test:
            name = conn.exec_driver_sql(query).scalar()
            return not own.database or own.database in (theirs.database, name)
        try:
            with self._database.read() as connection:
                own_server = connection.exec_driver_sql(query).one()
        except (DBAPIError, SqlqError):
            return True
        return bool(own_server == conn.exec_driver_sql(query).one())


def _callers_level() -> int:
    """Return the `stacklevel` with which a warning of the calling function names the caller of sqlq."""
    level = 1
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - what warnings themselves go by
    while frame is not None and frame.f_globals.get("__name__", "").startswith("sqlq."):
        level, frame = level + 1, frame.f_back
    return level


def _is_plain(batch: Batch) -> TypeGuard[Sequence[NewJob]]:
    """Whether this is a single job that one statement inserts, whatever is in the table."""
    if isinstance(batch, Plan) or len(batch) > 1:
        return False
    return batch[0].unique_key is None and batch[0].limit_key is None


def _insert_all(batch: Batch, conn: Connection) -> Any:
    return flows.insert_flow(conn, batch) if isinstance(batch, Plan) else inserting.insert(conn, batch)


def _logged(answer: Any) -> list[Job]:
    """Return the jobs in the answer of work in a transaction, which may be another one, and log them."""
    if isinstance(answer, EnqueuedFlow):
        answer = answer.jobs
    jobs = [job for job in (answer if isinstance(answer, Sequence) else [answer]) if isinstance(job, Job)]
    if log.isEnabledFor(logging.DEBUG):
        for job in jobs:
            event = "enqueued" if job.created else "not_unique"
            log.debug(
                "job %d: %s in queue %s, %s",
                job.id,
                job.task,
                job.queue,
                "enqueued" if job.created else "has the unique key already",
                extra={"job_id": job.id, "task": job.task, "queue": job.queue, "event": event},
            )
    return jobs


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
    for i, job in enumerate(new):
        ms = span_ms * i // len(new)
        if job.available_at is None:
            new[i] = replace(job, delay_ms=min(job.delay_ms + ms, MAX_MS))
        else:
            new[i] = replace(job, available_at=job.available_at + timedelta(milliseconds=ms))
    return new


def _explain(error: BaseException, dialect: Dialect, url: URL) -> None:
    """Raise `EnqueueError` where sqlq has advice on a refused write that the database's message lacks. To the
    error of a role that lacks a right, add how to get it."""
    why = dialect.driver.problem(error).advice  # guard: snapshot-refusal-is-said
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
