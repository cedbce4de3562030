"""A job while a handler runs it, and how the handler finds it."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
)
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, overload

from sqlq import headers
from sqlq.endings import follow_up
from sqlq.errors import ConfigurationError, LeaseLostError
from sqlq.job import ClaimedJob, Completed, Progress
from sqlq.retry import scrubbed
from sqlq.schema.tables import TOKEN_SCHEMA
from sqlq.session import (
    AnyAsyncDriverConnection,
    AnyAsyncSession,
    AnyDriverConnection,
    SyncSession,
    asynchronous,
    connection_to_complete,
    driver_of,
    note_write,
    transaction_of,
)
from sqlq.settings import NOTE_CHARACTERS, RESULT_BYTES
from sqlq.store import endings, jobs, progress
from sqlq.store.dialect import Right
from sqlq.store.progress import Note

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker
    from sqlalchemy.orm import Session, sessionmaker

    from sqlq.annotations import Arguments
    from sqlq.app import App
    from sqlq.task import Task

D = TypeVar("D", bound=AnyDriverConnection)
AD = TypeVar("AD", bound=AnyAsyncDriverConnection)
log = logging.getLogger("sqlq.worker")

_current: ContextVar[RunningJob | None] = ContextVar("sqlq_current_job", default=None)


def current_job() -> RunningJob:
    """Return the job that the calling handler runs.

    Works in `def` and `async def` handlers and in what they call, also through `asyncio.to_thread`; not in
    threads a handler starts by itself. Raises `ConfigurationError` outside a handler.

    >>> sqlq.current_job().id  # doctest: +SKIP
    42
    """
    job = _current.get()
    if job is None:
        raise ConfigurationError("current_job() was called outside a handler: there is no job here")
    return job


def running_here() -> RunningJob | None:
    """Return the job that the calling handler runs, None outside a handler."""
    return _current.get()


@dataclass(frozen=True, slots=True)
class CompletionTarget:
    """What completing a job needs to know of the place it lives in: the schema, and whether finished jobs are
    kept."""

    schema: str | None
    keep_finished: bool


class RunningJob:
    """The job a handler runs.

    `id`, `task`, `queue`, `attempts` (1 in the first attempt) and `max_attempts` say what it is.
    `lease_token` rises with every claim and can fence external effects; `id` can serve as their idempotency
    key. `label` and `headers` (read-only) are what was set where it was enqueued. `lifespan` is what
    `App.lifespan` has yielded in this process.
    """

    # Class attributes, not instance ones: a worker makes ten thousands of jobs a second.
    lifespan: Any = None
    """What the App's lifespan has yielded in this process; None for an App without one."""
    started: float | None = None
    deadline: float | None = None
    timed_out = False
    cancelled_at: float | None = None
    arguments: Arguments
    """What the handler is called with."""
    heeded = False
    """Whether the handler has seen that it should stop."""
    completed = False
    """Whether the handler called `complete()`."""
    error: BaseException | None = None
    """What the handler raised, or the timeout it met; None where that happened in another process."""
    ended = False
    """Whether the handler has ended, and its outcome is known."""
    given_up = False
    """Whether the worker has settled this attempt without waiting for its handler."""
    told_lost = False
    """Whether listeners know that the job has another owner."""
    on_start: Callable[[RunningJob], None] | None = None
    """Told when the handler is about to run, here or in a process of its own."""
    kill: Callable[[], None] | None = None
    """Ends the process the handler runs in, where it has one of its own."""
    _stop: Callable[[], object] | None = None
    said: Progress | None = None
    """How far the handler has come, by its own word."""
    said_written: Progress | None = None
    """What of that is in the job's row."""
    keeps_noted = False
    """Whether the job's row says how long it is kept, where its task does."""
    _warned = False
    on_progress: Callable[[RunningJob], None] | None = None
    """Told when there is something new to write."""

    def __init__(
        self,
        claimed: ClaimedJob,
        task: Task[..., Any] | None,
        trusted_until: float,
        target: CompletionTarget | None = None,
        *,
        isolated: bool = False,
    ) -> None:
        self.claimed = claimed
        self.right: Right = (claimed.id, claimed.lease_token)
        """Id and lease token: what entitles to write to this job's row."""
        if task is not None and task.elsewhere:
            task = task.for_queue(claimed.queue)
        self.task_found = task
        self.trusted_until = trusted_until
        """Until when, by this machine's monotonic clock, the lease is certainly ours."""
        self.target = target
        """None where there is no row to complete: in `sqlq.testing.inline`."""
        self.isolated = isolated
        """Whether the handler runs in a process of its own."""
        self.is_async = task is not None and task.is_async and not isolated
        """Whether it runs on this process's event loop."""
        timeout_ms = claimed.timeout_ms
        if timeout_ms is None and task is not None:
            timeout_ms = task.timeout_ms
        self.timeout_ms: int | None = timeout_ms or None
        """How long an attempt may take: what the row says, in which 0 is no limit, or else what the task
        says."""
        self.claimed_at = time.monotonic()
        self.cancel_requested = claimed.cancel_requested_at is not None
        """Whether an operator asked for the job's end."""

    @property
    def app(self) -> App:
        """The App whose job it is, for a handler that enqueues more jobs."""
        if self.task_found is None or self.task_found.app is None:
            raise ConfigurationError(f"job {self.id} has no App: its task is not registered with one")
        app: App = self.task_found.app
        return app

    @property
    def id(self) -> int:
        return self.claimed.id

    @property
    def task(self) -> str:
        return self.claimed.task

    @property
    def queue(self) -> str:
        return self.claimed.queue

    @property
    def attempts(self) -> int:
        return self.claimed.attempts

    @property
    def max_attempts(self) -> int:
        return self.claimed.max_attempts

    @property
    def lease_token(self) -> int:
        return self.claimed.lease_token

    @property
    def label(self) -> str | None:
        # SQLite lets in bytes, which the log could not say
        return None if self.claimed.label is None else str(self.claimed.label)  # guard: labels-are-text

    @cached_property
    def headers(self) -> Mapping[str, Any]:
        """What the job's row says, or else its task, without sqlq's own. Raises `ArgumentsError` for headers
        that SQL has inserted and that are none, so that the attempt fails before it begins."""
        if self.claimed.headers is None:
            return headers.NO_HEADERS if self.task_found is None else self.task_found.headers
        return headers.shown(self.claimed.headers)

    def note(self) -> Note:
        """Return what is to be written of the job beside its lease."""
        if self.said is None:
            return Note(*self.right, None, None, None, self.keeps_ms)
        return Note(*self.right, self.said.done, self.said.of, self.said.note, self.keeps_ms)

    @property
    def keeps_ms(self) -> int | None:
        """How long the job is kept after its end, where its task says it and its row does not."""
        if self.claimed.retention_ms is not None or self.task_found is None:
            return None
        return self.task_found.retention_ms

    @property
    def says_retention(self) -> bool:
        """Whether its row, or its task, says how long it is kept: also where finished jobs are not."""
        return self.claimed.retention_ms is not None or self.keeps_ms is not None

    @property
    def carried(self) -> Mapping[str, Any]:
        """The values of context variables that came with the job."""
        return headers.carried(self.claimed.headers)

    @property
    def cancelled(self) -> bool:
        """Whether the handler should stop: its timeout has passed, its lease was lost, an operator cancelled
        the job, or the worker is shutting down and the grace time is over. A `def` handler that runs long
        should look now and then, and return when it is so: having seen this, it has not finished by
        returning, but is given back (or cancelled, or timed out). An `async def` handler is cancelled, and
        one in a process of its own is asked, and then killed."""
        if self.asked_to_stop:
            self.heeded = True
        return self.heeded

    @property
    def asked_to_stop(self) -> bool:
        return self.cancelled_at is not None

    def progress(self, done: float, of: float | None = None, note: str | None = None) -> None:
        """Say how far the job has come, for those who look: `done`, `of` so much in all, and a `note` of up
        to 255 characters.

        Costs next to nothing and waits for nothing, also on an event loop: what was said last is written at
        most once a second, and when the job ends. It never makes the job fail; what is no number is left out,
        with a warning in the log. Seen in `app.get(id).progress`, `job_states`, `sqlq show` and `sqlq jobs`.

        >>> for i, row in enumerate(rows):  # doctest: +SKIP
        ...     sqlq.current_job().progress(i, of=len(rows))
        """
        try:
            said = _progress(done, of, note)
        except Exception as error:
            if not self._warned:
                self._warned = True
                log.warning(
                    "job %d: its progress cannot be shown: %s",
                    *(self.id, scrubbed(str(error), 200)),
                    extra=self.fields("progress_dropped"),
                )
            return
        self.has_said(said)

    def has_said(self, said: Progress) -> None:
        """Take note of how far the handler has come, here or in a process of its own."""
        self.said = said
        if self.on_progress is not None:
            self.on_progress(self)

    # -- exactly-once effects --------------------------------------------------------------------------------

    def complete(self, session: SyncSession, result: Any = None) -> None:
        """Complete this job in the handler's own transaction, so that its writes and the completion commit
        together.

        The job then is finished exactly when that transaction commits, whatever becomes of this process or of
        the reply to its COMMIT: no other attempt can commit as well. Best the last write before the commit,
        since the job's row is locked from here on. What the handler returns afterwards does not count;
        `result` is stored instead, by the same rules.

        Raises `LeaseLostError` when the job belongs to another owner by now: let it through, so that the
        transaction rolls back. Raises `ConfigurationError` in a transaction stricter than READ COMMITTED,
        where a heartbeat since its snapshot would make it fail. A handler that completes and does not commit
        has failed, and is tried again.

        >>> with Session(engine) as session, session.begin():  # doctest: +SKIP
        ...     session.add(Payment(order_id=order_id))
        ...     sqlq.current_job().complete(session)
        """
        conn = connection_to_complete(session)
        done = completion(result, self.claimed, self.task_found)
        if self.target is None:
            self.completed = True
            note_write(session)
            return
        level = jobs.stricter_isolation(conn)
        if level is not None:  # guard: complete-read-committed
            raise ConfigurationError(
                f"complete() was called in a transaction at {level}, where the heartbeats of this job make "
                "the commit fail: "
                "use READ COMMITTED for it, as in session.connection(execution_options={'isolation_level': "
                "'READ COMMITTED'})"
            )
        self.completed = True
        if self.said is not None or self.keeps_ms is not None:
            notes = [self.note()]
            progress.write(
                conn,
                notes,
                skip_locked=False,
                options={"schema_translate_map": {TOKEN_SCHEMA: self.target.schema}},
            )
        # guard: complete-by-the-owner
        if not endings.complete(
            conn,
            self.right,
            done,
            schema=self.target.schema,
            keep_finished=self.target.keep_finished or self.says_retention,
            follow_up=follow_up(self.claimed, done),
        ):
            raise LeaseLostError(
                f"job {self.id} belongs to another owner by now: this attempt came too late, and its "
                "transaction must roll back"
            )
        note_write(session)

    async def acomplete(self, session: AnyAsyncSession, result: Any = None) -> None:
        """`complete` with an AsyncSession, an AsyncConnection or an asynchronous driver's connection."""
        target: Any = session
        if driver_of(target) is None and not any(hasattr(target, name) for name in ("run_sync", "registry")):
            raise ConfigurationError(
                f"acomplete takes an AsyncSession or AsyncConnection, not a {type(target).__name__}: use "
                "complete for that"
            )
        await asynchronous(target).run_sync(lambda sync: self.complete(sync, result))

    @overload
    def completing(
        self, sessions: Engine | sessionmaker[Session], result: Any = None
    ) -> AbstractContextManager[Session]: ...

    @overload
    def completing(self, sessions: D, result: Any = None) -> AbstractContextManager[D]: ...

    def completing(self, sessions: Any, result: Any = None) -> AbstractContextManager[Any]:
        """Open a session, run the block in its transaction, complete the job and commit; an exception rolls
        all of it back. With a driver's connection, in a transaction of its own on that.

        >>> with sqlq.current_job().completing(engine) as session:  # doctest: +SKIP
        ...     session.add(Payment(order_id=order_id))
        """
        return self._completing(sessions, result)

    @contextmanager
    def _completing(self, sessions: Any, result: Any) -> Iterator[Any]:
        from sqlalchemy.orm import Session

        if (driver := driver_of(sessions)) is not None:
            with transaction_of(driver):
                yield sessions
                self.complete(sessions, result)
            return
        with Session(sessions) if not callable(sessions) else sessions() as session, session.begin():
            yield session
            self.complete(session, result)

    @overload
    def acompleting(
        self, sessions: AsyncEngine | async_sessionmaker[AsyncSession], result: Any = None
    ) -> AbstractAsyncContextManager[AsyncSession]: ...

    @overload
    def acompleting(self, sessions: AD, result: Any = None) -> AbstractAsyncContextManager[AD]: ...

    def acompleting(self, sessions: Any, result: Any = None) -> AbstractAsyncContextManager[Any]:
        """`completing` with an AsyncEngine, async_sessionmaker or asynchronous driver's connection."""
        return self._acompleting(sessions, result)

    @asynccontextmanager
    async def _acompleting(self, sessions: Any, result: Any) -> AsyncIterator[Any]:
        from sqlalchemy.ext.asyncio import AsyncSession

        if (driver := driver_of(sessions)) is not None:
            async with transaction_of(driver):
                yield sessions
                await self.acomplete(sessions, result)
            return
        async with (
            AsyncSession(sessions) if not callable(sessions) else sessions() as session,
            session.begin(),
        ):
            yield session
            await self.acomplete(session, result)

    # -- for the worker --------------------------------------------------------------------------------------

    def on_cancel(self, stop: Callable[[], object] | None) -> None:
        """Say what makes the handler stop; called at once where that was asked for already."""
        self._stop = stop
        if stop is not None and self.asked_to_stop:
            stop()

    def cancel(self) -> None:
        """Ask the handler to stop. A thread cannot be made to; a coroutine is, and a process."""
        if self.cancelled_at is None:
            self.cancelled_at = time.monotonic()
        if self._stop is not None:
            self._stop()

    def is_trusted(self) -> bool:
        return time.monotonic() < self.trusted_until

    def begin(self) -> None:
        """Mark the start of the attempt, in the thread or asyncio task that runs it."""
        self.mark_started()
        _current.set(self)
        if log.isEnabledFor(logging.DEBUG):
            log.debug(
                "job %d %s (queue %s, attempt %d of %d) starts",
                *(self.id, self.task, self.queue, self.attempts, self.max_attempts),
                extra=self.fields("begun"),
            )

    def leave(self) -> None:
        """Mark the end of the attempt there: what this thread does next is of no job."""
        _current.set(None)

    def mark_started(self) -> None:
        self.started = time.monotonic()
        if self.timeout_ms is not None:
            self.deadline = self.started + self.timeout_ms / 1000
        if self.on_start is not None:
            self.on_start(self)

    def seconds(self) -> float:
        return 0.0 if self.started is None else time.monotonic() - self.started

    def labels(self) -> dict[str, object]:
        """What names this job and attempt in a log line."""
        names = {"job_id": self.id, "task": self.task, "queue": self.queue, "attempt": self.attempts}
        return names if self.claimed.label is None else {**names, "label": self.label}

    def fields(self, event: str) -> dict[str, object]:
        """What a log line about this job carries."""
        return {**self.labels(), "event": event}


def _progress(done: Any, of: Any, note: Any) -> Progress:
    numbers = [float(done), *([] if of is None else [float(of)])]
    if not all(map(math.isfinite, numbers)):
        raise ValueError(f"{done!r} of {of!r} are no numbers")
    text = None if note is None else scrubbed(str(note)[:NOTE_CHARACTERS], 4 * NOTE_CHARACTERS)
    return Progress(numbers[0], None if of is None else numbers[1], text)


def completion(result: Any, job: ClaimedJob, task: Task[..., Any] | None) -> Completed:
    """Return the outcome of a handler that returned `result`, as JSON: as its return annotation says, if it
    says something.

    The job is done whatever it returned: of a result that is not JSON, or too large, null is stored with a
    note that says why, which the row and the log keep.
    """
    if result is None:
        return Completed()
    try:
        if task is not None and (conversion := task.result_conversion) is not None:
            result = conversion.shown(result)
        text = json.dumps(result, ensure_ascii=False, allow_nan=False)
        if "\\u0000" in text or any("\ud800" <= c <= "\udfff" for c in text):
            text = json.dumps(_storable(result), ensure_ascii=False, allow_nan=False)
    except Exception as error:
        why = f"is not JSON ({scrubbed(str(error), 200)})"
    else:
        size = len(text.encode())
        if size <= RESULT_BYTES:
            return Completed(text)
        why = f"takes {size:,} bytes as JSON, more than {RESULT_BYTES:,}"
    log.warning(
        "job %d: %s finished, but its result %s; null is stored",
        *(job.id, job.task, why),
        extra={
            "job_id": job.id,
            "task": job.task,
            "queue": job.queue,
            "attempt": job.attempts,
            "event": "result_dropped",
        },
    )
    return Completed(None, f"its result {why}; null is stored")


def _storable(value: Any) -> Any:
    match value:
        case str():
            return scrubbed(value, max(len(value) * 4, 64))
        case dict():
            return {(_storable(k) if isinstance(k, str) else k): _storable(v) for k, v in value.items()}
        case list() | tuple():
            return [_storable(v) for v in value]
        case _:
            return value
