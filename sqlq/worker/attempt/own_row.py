"""What a handler writes of its own job in its own transactions: that it is complete, or how far it has come.

It commits with the other writes of the handler, or not at all.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar, overload

from sqlq.config.constants import RESULT_BYTES
from sqlq.database import dialects
from sqlq.database.caller.session import (
    AnyAsyncDriverConnection,
    AnyAsyncSession,
    AnyDriverConnection,
    SyncSession,
    atransaction_in,
    awaited,
    connection_to_complete,
    note_write,
    transaction_in,
)
from sqlq.database.dialect import Right
from sqlq.errors import ConfigurationError, ExecutionError, LeaseLostError
from sqlq.model.callbacks import follow_up
from sqlq.model.flow import Growth
from sqlq.model.history import Course
from sqlq.model.job import ClaimedJob, Progress
from sqlq.model.outcome import Completed
from sqlq.model.retry import scrubbed
from sqlq.payload.codec import as_text
from sqlq.payload.encryption import Seal
from sqlq.schema.qualify import qualifying
from sqlq.schema.tables import TOKEN_SCHEMA
from sqlq.store.flows import flows
from sqlq.store.jobs import checkpoint as checkpoints
from sqlq.store.jobs import progress, settle
from sqlq.store.jobs.progress import Note
from sqlq.worker.attempt import steps
from sqlq.worker.attempt.steps import Step

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker
    from sqlalchemy.orm import Session, sessionmaker

    from sqlq.app.app import App
    from sqlq.model.task import Task

D = TypeVar("D", bound=AnyDriverConnection)
AD = TypeVar("AD", bound=AnyAsyncDriverConnection)


@dataclass(frozen=True, slots=True)
class CompletionTarget:
    """What completing a job needs to know of the place it lives in: the schema, and whether finished jobs are
    kept."""

    schema: str | None
    keep_finished: bool


class Commits:
    """A job's row while a handler runs it, and what the handler writes of it in transactions."""

    completed = False
    """Whether the handler called `complete()`."""
    on_saved: Callable[[Connection, str], None] | None = None
    """Told of a new cursor, as JSON, and of the connection in whose transaction it counts."""
    cancelled_at: float | None = None

    claimed: ClaimedJob
    right: Right
    """Id and lease token: what entitles to write to this job's row."""
    task_found: Task[..., Any] | None
    target: CompletionTarget | None
    """None where there is no row to complete: in `sqlq.testing.inline`."""
    claimed_at: float
    started: float | None = None
    is_async: bool
    """Whether it runs on this process's event loop."""
    cancel_requested: bool
    """Whether an operator asked for the job's end."""
    said: Progress | None = None
    """How far the handler has come, by its own word."""
    growth: Growth | None = None
    """What its handler has added to its flow."""

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

    def is_kept(self, finished: bool) -> bool:
        """Whether its row is kept when it has finished: as `finished` jobs are, unless it or its task says
        for how long; a step's always, since others may still ask how it ended."""
        said_ms = self.claimed.retention_ms
        if said_ms is None and self.task_found is not None:
            said_ms = self.task_found.retention_ms
        # guard: steps-are-kept
        return self.claimed.flow_id is not None or (finished if said_ms is None else said_ms > 0)

    @property
    def _seal(self) -> Seal | None:
        """What its App seals with."""
        app = None if self.task_found is None else self.task_found.app
        return None if app is None else app.seal

    def _grow(self, conn: Any, schema: str | None) -> None:
        """Write what the handler has added to the flow."""
        if self.growth is not None and self.growth.steps:
            assert self.claimed.flow_id is not None
            grown = self.app._code.additions.to_flow(self.growth)
            if (seal := self._seal) is not None:
                grown = grown._replace(
                    jobs=[job.sealed_by(seal) for job in grown.jobs]
                )  # guard: growth-is-sealed
            # guard: growth-goes-with-the-ending
            flows.grow(conn, grown, schema, self.claimed.flow_id, self.id)

    def seconds(self) -> float:
        return 0.0 if self.started is None else time.monotonic() - self.started

    @property
    def is_first_claim(self) -> bool:
        """Whether no worker had claimed the job before: its history is this attempt."""
        return self.claimed.lease_token <= 1

    def moments(self, seconds: float) -> tuple[datetime, datetime | None, datetime]:
        """Return when the attempt was claimed, started and ended, of one that ran so many seconds; by this
        machine's clock, and in spite of its being set."""
        now, clock = datetime.now(UTC), time.monotonic()
        started = None if self.started is None else now - timedelta(seconds=clock - self.started)
        ended = now if started is None else started + timedelta(seconds=seconds)
        return now - timedelta(seconds=clock - self.claimed_at), started, ended

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
        done, seal = completion(result, self.claimed, self.task_found), self._seal
        if self.growth is not None:
            self.growth.is_closed = True
        if self.target is None:
            self.completed = True
            note_write(session)
            return
        with qualifying(conn):
            self._refuse_stricter(conn, "complete()")
            self.completed = True
            if self.said is not None or self.keeps_ms is not None:
                notes = [self.note()]
                progress.write(
                    conn,
                    notes,
                    skip_locked=False,
                    options={"schema_translate_map": {TOKEN_SCHEMA: self.target.schema}},
                )
            # guard: complete-seals
            stored = done if seal is None else done.sealed_by(seal, self.task, self.queue)
            # guard: complete-by-the-owner
            if not settle.complete(
                conn,
                self.right,
                stored,
                schema=self.target.schema,
                keep_finished=self.is_kept(self.target.keep_finished),
                follow_up=follow_up(self.claimed, done, seal),
                course=None if self.is_first_claim else Course(*self.moments(self.seconds())),
            ):
                raise self._lost()
            self._grow(conn, self.target.schema)
        note_write(session)

    async def acomplete(self, session: AnyAsyncSession, result: Any = None) -> None:
        """`complete` with an AsyncSession, an AsyncConnection or an asynchronous driver's connection."""
        await awaited(session, "acomplete", "complete").run_sync(lambda sync: self.complete(sync, result))

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
        before = self.completed
        with transaction_in(sessions, "completing", "complete") as session:
            yield session
            self._refuse_completed(before, "completing()", "complete()")
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
        before = self.completed
        async with atransaction_in(sessions, "completing", "complete") as session:
            yield session
            self._refuse_completed(before, "acompleting()", "acomplete()")
            await self.acomplete(session, result)

    def _refuse_completed(self, before: bool, block: str, call: str) -> None:
        """Raise `ConfigurationError` where the job was completed in a block that does so at its end."""
        if self.completed and not before:  # guard: completed-once-in-a-block
            raise ConfigurationError(
                f"job {self.id} was completed in the block of {block}, which completes it at its end: leave "
                f"{call} out of it"
            )

    # -- slices and steps ------------------------------------------------------------------------------------

    @property
    def cursor(self) -> Any:
        """What the last checkpoint has saved, of this attempt or an earlier one; None before the first. In a
        job with steps, what sqlq has saved of them."""
        return steps.decode(self.claimed.cursor)

    def checkpoint(self, session: SyncSession, cursor: Any) -> None:
        """Save how far this job has come, in the transaction of a slice of its work: the slice's writes and
        the cursor commit together, or neither does. The next attempt, whatever this one ends of, finds it as
        `cursor` and goes on there, so that each slice has its effects once.

        `cursor` is JSON of at most 64 KiB: where the next slice begins. `session` is anything `complete`
        takes. Best the last write before the commit, since the job's row is locked from here on. It shows
        that the job gets on: an attempt that ends with `sqlq.Snooze` after it does not count, however many
        there are. A handler in a thread that an operator wants to end sees that here (`cancelled`).

        Raises `LeaseLostError` when the job belongs to another owner by now, and `ExecutionError` when the
        transaction of an earlier checkpoint was rolled back, so that a slice would be left out: let both
        through, so that this transaction rolls back, too. Raises `ArgumentsError` for a cursor that is not
        JSON, `EnqueueError` for a connection that has no transaction, and `ConfigurationError` after
        `complete`, in a job with steps, and in a transaction stricter than READ COMMITTED.

        >>> job = sqlq.current_job()  # doctest: +SKIP
        >>> while ids := next_merchants(after=job.cursor or 0):  # doctest: +SKIP
        ...     with Session(engine) as session, session.begin():
        ...         session.add_all(Coupon(merchant_id=id) for id in ids)
        ...         job.checkpoint(session, ids[-1])
        """
        text = steps.encode(cursor)
        if self.claimed.cursor is not None and steps.steps_in(self.claimed.cursor) is not None:
            raise ConfigurationError(
                f"job {self.id} has steps: write step.checkpoint(session, cursor) in one of them"
            )
        self.save(session, text)

    async def acheckpoint(self, session: AnyAsyncSession, cursor: Any) -> None:
        """`checkpoint` with an AsyncSession, an AsyncConnection or an asynchronous driver's connection."""
        run = awaited(session, "acheckpoint", "checkpoint")
        await run.run_sync(lambda sync: self.checkpoint(sync, cursor))

    def step(self, name: str) -> Step:
        """Return a part of this job by its name, which is done once, whatever number of attempts the job
        takes: its effects and the word that it is done commit together, by `step.finish(session)` or
        `step.finishing(engine)`. A long one saves how far it has come by `step.checkpoint(session, cursor)`.
        A job has steps or checkpoints, not both; raises `ConfigurationError` for both.

        >>> bill = sqlq.current_job().step("bill")  # doctest: +SKIP
        >>> if not bill.done:  # doctest: +SKIP
        ...     with bill.finishing(engine) as session:
        ...         session.add(Bill(order_id=order_id))
        """
        return Step(self, name)

    def save(self, session: SyncSession, text: str) -> None:
        """Save a cursor, as JSON text, in the transaction of a session; see `checkpoint`."""
        if self.completed:  # guard: no-checkpoint-after-complete
            raise ConfigurationError(
                f"job {self.id} was completed in this attempt: a checkpoint comes before complete()"
            )
        conn = connection_to_complete(session, alone="its cursor would be saved", instead="")
        if self.target is not None:
            schema = self.target.schema
            with qualifying(conn):
                self._refuse_stricter(conn, "checkpoint()")
                # guard: checkpoint-by-the-owner
                found = checkpoints.save(conn, self.right, self.claimed.cursor, text, schema=schema)
                if found is None:
                    raise self._not_saved(conn, schema)
                if found:
                    self._found_cancelled()
        if text != self.claimed.cursor:
            self.claimed = self.claimed._replace(cursor=text, releases=0)  # guard: a-circle-is-bounded
        if self.on_saved is not None:
            self.on_saved(conn, text)
        note_write(session)

    def _not_saved(self, conn: Connection, schema: str | None) -> Exception:
        if not checkpoints.is_held(conn, self.right, schema=schema):
            return self._lost()
        return ExecutionError(
            f"the transaction of an earlier checkpoint of job {self.id} was rolled back, so that this one "
            "would leave a slice out: let this error through, and the next attempt goes on from what is saved"
        )

    def _lost(self) -> LeaseLostError:
        return LeaseLostError(
            f"job {self.id} belongs to another owner by now: this attempt came too late, and its transaction "
            "must roll back"
        )

    def _refuse_stricter(self, conn: Connection, call: str) -> None:
        level = dialects.stricter_isolation(conn)
        if level is not None:  # guard: complete-read-committed
            raise ConfigurationError(
                f"{call} was called in a transaction at {level}, where the heartbeats of this job make the "
                "commit fail: use READ COMMITTED for it, as in "
                "session.connection(execution_options={'isolation_level': 'READ COMMITTED'})"
            )

    def _found_cancelled(self) -> None:
        """Let a handler in a thread see at the end of its slice what the next heartbeat would tell it. A
        coroutine is left to that: to be cancelled now would undo the slice."""
        if self.cancelled_at is None and not self.is_async:
            self.cancel_requested = True  # guard: a-checkpoint-tells-of-a-cancel
            self.cancelled_at = time.monotonic()


log = logging.getLogger("sqlq.worker")


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
        text = json.dumps(result, ensure_ascii=False, allow_nan=False, default=as_text)
        if "\\u0000" in text or any("\ud800" <= c <= "\udfff" for c in text):
            text = json.dumps(_storable(result), ensure_ascii=False, allow_nan=False, default=as_text)
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
