"""The job of a handler, as the handler sees it, and `current_job`."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
)
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

from sqlq.config.constants import NOTE_CHARACTERS
from sqlq.database.caller.session import (
    AnyAsyncSession,
    SyncSession,
    asynchronous,
    atransaction_in,
    transaction_in,
)
from sqlq.errors import ConfigurationError, JobTimeoutError, PayloadKeyError
from sqlq.model.flow import Growth
from sqlq.model.job import JobOrFlow, NewJob, Progress
from sqlq.model.retry import scrubbed
from sqlq.payload import headers as headings
from sqlq.store.flows import flows
from sqlq.store.flows.flows import Before
from sqlq.store.signals import waits
from sqlq.worker.attempt import own_row
from sqlq.worker.attempt.attempt import Attempt
from sqlq.worker.attempt.own_row import AD, D, Step, decode_cursor, encode_cursor, steps_in
from sqlq.worker.threads.log import log

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker
    from sqlalchemy.orm import Session, sessionmaker

running_attempt: ContextVar[Attempt | None] = ContextVar("sqlq_current_job", default=None)

T = TypeVar("T")
J = TypeVar("J")
_RAISES: Any = object()


@overload
def current_job() -> JobContext: ...


@overload
def current_job(default: T) -> JobContext | T: ...


def current_job(default: Any = _RAISES) -> Any:
    """Return the job of the calling handler; outside a handler return the default.

    Works in `def` and `async def` handlers and in functions that they call, also through `asyncio.to_thread`.
    Does not work in threads that a handler starts by itself. Raises `ConfigurationError` outside a handler
    where no default is given. A function that runs as a job, and is called as a function too, calls
    `current_job(None)`.

    >>> sqlq.current_job().id  # doctest: +SKIP
    42
    >>> if job := sqlq.current_job(None):  # doctest: +SKIP
    ...     job.progress(25, of=100)
    """
    attempt = running_attempt.get()
    if attempt is not None:
        return attempt.context or attempt.__dict__.setdefault("context", JobContext(attempt))
    if default is _RAISES:
        raise ConfigurationError(
            "current_job() was called outside a handler: there is no job here; current_job(None) is None then"
        )
    return default


class AnyApp(Protocol):
    """The App of a job: its handlers mostly enqueue. The type of all else is that of `sqlq.App`."""

    def enqueue(
        self, job: JobOrFlow[J], session: Any = None, *, commit: bool = False, eager: Any = None
    ) -> J:
        """See `sqlq.App.enqueue`."""
        ...

    async def aenqueue(
        self, job: JobOrFlow[J], session: Any = None, *, commit: bool = False, eager: Any = None
    ) -> J:
        """See `sqlq.App.aenqueue`."""
        ...

    def __getattr__(self, name: str) -> Any: ...


def begin(attempt: Attempt) -> None:
    """Mark the start of an attempt, in the thread or asyncio task that runs its handler."""
    attempt.mark_started()
    running_attempt.set(attempt)
    if log.logger.isEnabledFor(logging.DEBUG):
        job = attempt.claimed
        log.debug(
            "job %d %s (queue %s, attempt %d of %d) starts",
            job.id,
            job.task,
            job.queue,
            job.attempts,
            job.max_attempts,
            **attempt.labels(),
            event="begun",
        )


def attempt_of(job: JobContext) -> Attempt:
    """Return the worker's own facts of a handler's job: for middleware of sqlq itself."""
    return job._attempt  # noqa: SLF001 - of this module


class JobContext:
    """The job that a handler runs, as `sqlq.current_job()` returns it and middleware gets it.

    `id` can serve as an idempotency key of external effects. `lease_token` rises with every claim and can
    fence them.
    """

    _warned = False

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        claimed = attempt.claimed
        self.id, self.queue = claimed.id, claimed.queue
        self.max_attempts, self.lease_token = claimed.max_attempts, claimed.lease_token
        self._steps: dict[str, Step] = {}
        self._saving = Lock()

    @property
    def task(self) -> str:
        """The name of the task."""
        return self._attempt.claimed.task

    @property
    def attempt(self) -> int:
        """The number of this attempt; 1 in the first one."""
        return self._attempt.claimed.attempts

    @property
    def releases(self) -> int:
        """How often the job was released or snoozed, which `attempt` does not count. A checkpoint, or
        `sqlq retry`, begins the number anew."""
        return self._attempt.claimed.releases

    @property
    def worker(self) -> str | None:
        """The id of the worker in `app.workers.list()`; None where no worker runs the job, as in tests."""
        return self._attempt.worker

    @property
    def lifespan(self) -> Any:
        """The value that the App's lifespan yielded in this process; None for an App without one."""
        return self._attempt.lifespan

    @property
    def app(self) -> AnyApp:
        """The App of the job, for a handler that enqueues more jobs."""
        task = self._attempt.registered
        if task is None or task._app is None:
            raise ConfigurationError(f"job {self.id} has no App: its task is not registered with one")
        app: AnyApp = task._app
        return app

    @property
    def schedule(self) -> str | None:
        """The name of the schedule that enqueued the job; None for one that was enqueued otherwise."""
        return self._attempt.claimed.schedule

    @property
    def scheduled_for(self) -> datetime | None:
        """The time of its schedule for which the job was enqueued, in UTC; None for a job of no schedule.

        It is the planned time, whenever the job runs: late, a second time, or a day after an outage.
        """
        ms = self._attempt.claimed.scheduled_ms
        return None if ms is None else datetime.fromtimestamp(ms / 1000, UTC)

    @property
    def label(self) -> str | None:
        """The label that the job was enqueued with."""
        return self._attempt.label

    @cached_property
    def headers(self) -> Mapping[str, Any]:
        """The headers of the job, or else of its task, without sqlq's own; read-only. Raises `ArgumentsError`
        for malformed headers that SQL has inserted; the attempt then fails before it begins."""
        text, task = self._attempt.claimed.headers, self._attempt.registered
        if text is None:
            return headings.NO_HEADERS if task is None else task.headers
        return headings.shown(text)

    @property
    def trace_id(self) -> str | None:
        """The trace of this attempt, as hexadecimal text. Tracing middleware sets it, for log lines."""
        return self._attempt.trace_id

    @trace_id.setter
    def trace_id(self, trace_id: str | None) -> None:
        self._attempt.trace_id = trace_id

    @property
    def span_id(self) -> str | None:
        """The span of this attempt in its trace."""
        return self._attempt.span_id

    @span_id.setter
    def span_id(self, span_id: str | None) -> None:
        self._attempt.span_id = span_id

    def should_stop(self) -> bool:
        """Whether the handler should stop.

        True when its timeout has passed, its lease was lost, or an operator cancelled the job. True also when
        the worker stops and its grace time is over.

        A `def` handler that runs long should check this now and then, and return when it is true. Such a
        return does not finish the job: it is released (or cancelled, or timed out). An `async def` handler is
        cancelled. A handler in a subprocess gets this request, and then its process is killed.
        """
        if self._attempt.stop_requested:
            self._attempt.stop_noticed = True
        return self._attempt.stop_noticed

    def progress(self, done: float, of: float | None = None, note: str | None = None) -> None:
        """Report how far the job has come: `done`, `of` so much in all, and a `note` of up to 255 characters.

        The call costs next to nothing and never blocks, also on an event loop. A thread writes the last
        report at most once a second, and when the job ends. The call never makes the job fail: a value that
        is no number is left out, with a warning in the log. Shown by `app.jobs.get(id).progress`,
        `job_states`, `sqlq show` and `sqlq jobs`.

        >>> for i, row in enumerate(rows):  # doctest: +SKIP
        ...     sqlq.current_job().progress(i, of=len(rows))
        """
        try:
            done, of = float(done), None if of is None else float(of)
            if not math.isfinite(done + (of or 0.0)):
                raise ValueError(f"{done} of {of} are no numbers")
            if note is not None:
                note = scrubbed(str(note)[:NOTE_CHARACTERS], 4 * NOTE_CHARACTERS)
        except Exception as error:
            if not self._warned:
                self._warned = True
                self._attempt.log_warning(
                    "progress_dropped", "its progress cannot be shown: %s", scrubbed(str(error), 200)
                )
            return
        self._attempt.report_progress(Progress(done, of, note))

    # -- its signal ------------------------------------------------------------------------------------------

    @cached_property
    def _wait(self) -> Any:
        if (open_database := self._attempt.target.open_database) is None:
            return self._attempt.wait
        with open_database().read() as conn:
            return waits.of(conn, self.id)

    @property
    def waited_for(self) -> str | None:
        """The signal for which the job has waited last, by `sqlq.WaitFor`; None before the first wait. The
        first use queries the database."""
        return None if self._wait is None else str(self._wait.name)

    @property
    def signal(self) -> Any:
        """The value of that signal; None before the first wait, too. Raises `sqlq.JobTimeoutError` where its
        timeout came first, and `PayloadKeyError` for a value that cannot be opened.

        >>> sqlq.current_job().signal  # doctest: +SKIP
        {'by': 'ada'}
        """
        wait = self._wait
        if wait is not None and wait.outcome == "timeout":
            raise JobTimeoutError(f"no signal {wait.name} came in time")
        if wait is None or wait.value is None:
            return None
        return json.loads(waits.opened(self._attempt.target.encryption, wait.value))

    # -- its flow --------------------------------------------------------------------------------------------

    @property
    def flow_id(self) -> int | None:
        """The flow of which it is a step; None for a job that is in none."""
        return self._attempt.claimed.flow_id

    @property
    def flow(self) -> Growth:
        """The flow of which it is a step.

        Steps added to it are written in the transaction in which this job completes itself (`completing`,
        `complete`). So a flow grows exactly once.

        They wait for this job, and may take its result: `flow.step.result`. A handler that adds steps and
        does not complete its job has failed, and is tried again. Raises `ConfigurationError` for a job that
        is in no flow.

        >>> job = sqlq.current_job()  # doctest: +SKIP
        >>> with job.completing(engine) as session:  # doctest: +SKIP
        ...     job.flow.add(index.map(pages_of(session)))
        """
        attempt, claimed = self._attempt, self._attempt.claimed
        if claimed.flow_id is None:
            raise ConfigurationError(
                f"job {self.id} is a step of no flow: enqueue jobs with app.enqueue, or a flow of their own"
            )
        if attempt.growth is None:
            attempt.growth = Growth(
                claimed.flow_id, NewJob(self.task, claimed.payload, self.queue, self.max_attempts)
            )
        return attempt.growth

    @cached_property
    def results(self) -> list[Any]:
        """The results of the steps before this one, in the order in which they were named. They have the
        types of the return annotations, where this App knows the tasks. A step without a result, as one that
        failed, has None.

        The first use queries the database. Raises `ConfigurationError` for a job that is in no flow, and
        `PayloadKeyError` for a result that cannot be decrypted.

        >>> sqlq.current_job().results  # doctest: +SKIP
        [Receipt(number=12), 3]
        """
        if self._attempt.claimed.flow_id is None:
            raise ConfigurationError(f"job {self.id} is a step of no flow, and comes after no other")
        before, target = self._attempt.before, self._attempt.target
        if before is None:
            assert target.open_database is not None
            with target.open_database().read() as conn:
                before = flows.before(conn, {self.id: self.queue}).get(self.id, [])
        return [self._result_of(step) for step in before]

    def _result_of(self, step: Before) -> Any:
        if step.unopened is not None:  # guard: unopened-step-result-raises
            raise PayloadKeyError(f"the result {step.why}")
        if step.result is None:
            return None
        task = None if step.task is None else self._attempt.target.tasks.get(step.task)
        form = json.loads(step.result)
        if task is None or (conversion := task._interface.result_conversion) is None:
            return form
        return conversion.decode(form, f"the result of job {step.id}")

    # -- exactly-once effects --------------------------------------------------------------------------------

    def complete(self, session: SyncSession, result: Any = None) -> None:
        """Complete this job in the handler's own transaction: its writes and the completion commit together.

        The job is finished exactly when that transaction commits, even if this process dies or the reply to
        its COMMIT is lost. No other attempt can commit as well. Best the last write before the commit, since
        the job's row is locked from here on. The handler's return value does not count; `result` is stored
        instead, by the same rules.

        Raises `LeaseLostError` when the job belongs to another owner by now: let it through, so that the
        transaction rolls back. Raises `ConfigurationError` in a transaction stricter than READ COMMITTED,
        where a heartbeat since its snapshot would make it fail. A handler that completes and does not commit
        has failed, and is tried again.

        >>> with Session(engine) as session, session.begin():  # doctest: +SKIP
        ...     session.add(Payment(order_id=order_id))
        ...     sqlq.current_job().complete(session)
        """
        own_row.complete(self._attempt, session, result)

    async def acomplete(self, session: AnyAsyncSession, result: Any = None) -> None:
        """`complete` with an AsyncSession, an AsyncConnection or an asynchronous driver's connection."""
        await asynchronous(session).run_sync(lambda sync: self.complete(sync, result))

    @overload
    def completing(
        self, sessions: Engine | sessionmaker[Session], result: Any = None
    ) -> AbstractContextManager[Session]: ...

    @overload
    def completing(self, sessions: D, result: Any = None) -> AbstractContextManager[D]: ...

    @contextmanager
    def completing(self, sessions: Any, result: Any = None) -> Iterator[Any]:
        """Open a session, run the block in its transaction, complete the job and commit; an exception rolls
        all of it back. With a driver's connection, in a transaction of its own on that.

        >>> with sqlq.current_job().completing(engine) as session:  # doctest: +SKIP
        ...     session.add(Payment(order_id=order_id))
        """
        before = self._attempt.completed
        with transaction_in(sessions) as session:
            yield session
            self._refuse_completed(before)
            self.complete(session, result)

    @overload
    def acompleting(
        self, sessions: AsyncEngine | async_sessionmaker[AsyncSession], result: Any = None
    ) -> AbstractAsyncContextManager[AsyncSession]: ...

    @overload
    def acompleting(self, sessions: AD, result: Any = None) -> AbstractAsyncContextManager[AD]: ...

    @asynccontextmanager
    async def acompleting(self, sessions: Any, result: Any = None) -> AsyncIterator[Any]:
        """`completing` with an AsyncEngine, async_sessionmaker or asynchronous driver's connection."""
        before = self._attempt.completed
        async with atransaction_in(sessions) as session:
            yield session
            self._refuse_completed(before)
            await self.acomplete(session, result)

    def _refuse_completed(self, before: bool) -> None:
        """Raise `ConfigurationError` where the job was completed in a block that does so at its end."""
        if self._attempt.completed and not before:  # guard: completed-once-in-a-block
            raise ConfigurationError(
                f"job {self.id} was completed in a block of completing(), which completes it at its end: "
                "leave complete() out of it"
            )

    # -- slices and steps ------------------------------------------------------------------------------------

    @property
    def cursor(self) -> Any:
        """The cursor of the last checkpoint, of this attempt or an earlier one; None before the first. In a
        job with steps, the state of these."""
        return decode_cursor(self._attempt.claimed.cursor)

    def checkpoint(self, session: SyncSession, cursor: Any) -> None:
        """Save the cursor of this job in the transaction of a slice of its work.

        The slice's writes and the cursor commit together, or neither does. The next attempt, however this one
        ends, reads it as `cursor` and goes on there. So each slice has its effects once.

        `cursor` is JSON of at most 64 KiB: where the next slice begins. `session` is anything `complete`
        takes. Best the last write before the commit, since the job's row is locked from here on. It shows
        that the job gets on: an attempt that ends with `sqlq.Snooze` after it does not count, however many
        there are. A handler in a thread that an operator wants to end sees that here (`cancelled`).

        Raises `LeaseLostError` when the job belongs to another owner by now. Raises `ExecutionError` when the
        transaction of an earlier checkpoint was rolled back, so that a slice would be left out. Let both
        through, so that this transaction rolls back, too. Raises `ArgumentsError` for a cursor that is not
        JSON, and `EnqueueError` for a connection that has no transaction. Raises `ConfigurationError` after
        `complete`, in a job with steps, and in a transaction stricter than READ COMMITTED.

        >>> job = sqlq.current_job()  # doctest: +SKIP
        >>> while ids := next_merchants(after=job.cursor or 0):  # doctest: +SKIP
        ...     with Session(engine) as session, session.begin():
        ...         session.add_all(Coupon(merchant_id=id) for id in ids)
        ...         job.checkpoint(session, ids[-1])
        """
        text = encode_cursor(cursor)
        if steps_in(self._attempt.claimed.cursor):
            raise ConfigurationError(
                f"job {self.id} has steps: write step.checkpoint(session, cursor) in one of them"
            )
        own_row.save(self._attempt, session, text)

    async def acheckpoint(self, session: AnyAsyncSession, cursor: Any) -> None:
        """`checkpoint` with an AsyncSession, an AsyncConnection or an asynchronous driver's connection."""
        await asynchronous(session).run_sync(lambda sync: self.checkpoint(sync, cursor))

    def step(self, name: str) -> Step:
        """Return a part of this job by its name. It is done once, however many attempts the job takes.

        `step.once(call)` calls a function and remembers its value; with an engine, the writes of the call
        commit together with it. A long step saves its cursor by `step.checkpoint(session, cursor)`. Steps are
        known by their names alone, so their order may change between deploys. Raises `ConfigurationError` for
        a second step of the name in this attempt, and for a job with checkpoints of its own.

        >>> text = sqlq.current_job().step("ask").once(lambda: client.ask(prompt))  # doctest: +SKIP
        """
        step = Step(self._attempt, name, self._saving)
        if self._steps.setdefault(step.name, step) is not step:  # guard: a-name-is-of-one-step
            raise ConfigurationError(
                f"job {self.id} has two steps named {name!r} in this attempt, which would share one value: "
                'give each a name of its own, as in f"page {number}"'
            )
        return step
