"""The writes of a handler to its own job's row: it is complete, or has come so far.

They commit with the other writes of the handler, or not at all. A job too long for one transaction is done in
slices. Each saves a cursor, as JSON in the job's row, and the next attempt begins there. In a job with steps
the cursor holds the cursor of each.
"""

from __future__ import annotations

import json
import re
from asyncio import to_thread
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar, overload

from sqlq.config.constants import CURSOR_BYTES, RESULT_BYTES, STEPS_BYTES
from sqlq.database.caller.session import (
    AnyAsyncDriverConnection,
    AnyAsyncSession,
    AnyDriverConnection,
    CallersTransaction,
    SyncSession,
    asynchronous,
    atransaction_in,
    note_write,
    transaction_in,
    transaction_to_complete,
)
from sqlq.database.dialects import dialect_of, refuses_newer_rows
from sqlq.database.schemas import in_schema
from sqlq.errors import ArgumentsError, ConfigurationError, ExecutionError, LeaseLostError
from sqlq.model.checks import checked_name
from sqlq.model.flow import Growth
from sqlq.model.history import AttemptTimes
from sqlq.model.job import ClaimedJob
from sqlq.model.outcome import NO_RESULT, Finished, follow_up
from sqlq.model.retry import scrubbed
from sqlq.payload.codec import as_text, check_json, json_within, read_json
from sqlq.payload.encryption import NO_KEYS
from sqlq.store.flows import flows
from sqlq.store.jobs import lease as leases
from sqlq.store.jobs import settle
from sqlq.worker.attempt.attempt import Attempt
from sqlq.worker.threads.log import log

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker
    from sqlalchemy.orm import Session, sessionmaker

    from sqlq.model.task import Task

T = TypeVar("T")
D = TypeVar("D", bound=AnyDriverConnection)
AD = TypeVar("AD", bound=AnyAsyncDriverConnection)

STEPS = "sqlq.steps"
"""The one name in the cursor of a job with steps. It maps the name of each step to its state. A done step has
its value, as `{"value": …}`, one under way a list of its cursor."""
_NULS = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")
"""A NUL in JSON, with the escaped backslashes before it."""


def encode_cursor(cursor: Any) -> str:
    """Return a cursor as JSON text. Raises `ArgumentsError` for a cursor that is not JSON, takes more than 64
    KiB or has a name that is sqlq's own."""
    check_json(cursor, "the cursor", "save its text, or what it is made of")
    if isinstance(cursor, dict) and STEPS in cursor:  # guard: steps-are-no-cursor
        raise ArgumentsError(f"the cursor has the name {STEPS!r}, which is sqlq's own: choose another")
    # guard: cursors-are-bounded
    return json_within(
        CURSOR_BYTES, cursor, "the cursor takes", "save where the next slice begins, and not what is done"
    )


def decode_cursor(text: Any) -> Any:
    """Return the cursor in a row. Raises `ArgumentsError` for text that is not JSON: SQL may have written
    it."""
    return None if text is None else read_json(text, "the cursor is")


def steps_in(text: str | None) -> dict[str, Any] | None:
    """Return the states of the steps of a job; None where its cursor is one of the handler's own."""
    cursor = decode_cursor(text)
    if cursor is None:
        return {}
    steps = cursor.get(STEPS) if isinstance(cursor, dict) else None
    return dict(steps) if isinstance(steps, dict) else None


def complete(attempt: Attempt, session: SyncSession, result: Any) -> None:
    """Complete the job in the transaction of a session; see `JobContext.complete`."""
    encryption = attempt.target.encryption
    joined = transaction_to_complete(session)
    done = completion(result, attempt.claimed, attempt.registered)
    attempt.has_result = result is not None
    if attempt.growth is not None:
        attempt.growth._is_closed = True
    if attempt.has_row:
        with _own_row(joined, attempt, "complete()") as conn:
            attempt.completed = True
            joined.dialect.sql.lock_key(conn, attempt.id)
            if attempt.progress is not None or attempt.keeps_ms is not None:
                leases.note(conn, [attempt.note()], waits=True)
            # guard: complete-encrypts
            stored = (
                done if encryption is None else done.protected_by(encryption, attempt.task, attempt.queue)
            )
            # guard: complete-by-the-owner
            if not settle.complete(
                conn,
                attempt.right,
                stored,
                follow_up=follow_up(attempt.claimed, done, encryption),
                course=None if attempt.is_first_claim else AttemptTimes(*attempt.times()),
            ):
                raise _lost(attempt)
            if attempt.growth is not None and attempt.growth.steps:
                _grow(conn, attempt, attempt.growth)
    attempt.completed = True
    note_write(joined.session)


def save(attempt: Attempt, session: SyncSession, text: str) -> None:
    """Save a cursor, as JSON, in the transaction of a session; see `JobContext.checkpoint`."""
    _refuse_completed(attempt)
    joined = transaction_to_complete(session)
    if attempt.has_row:
        with _own_row(joined, attempt, "checkpoint()") as conn:
            _write(conn, attempt, text)
    _note_saved(attempt, text, joined)
    note_write(joined.session)


def _refuse_completed(attempt: Attempt) -> None:
    if attempt.completed:  # guard: no-checkpoint-after-complete
        raise ConfigurationError(
            f"job {attempt.id} was completed in this attempt: a checkpoint comes before complete()"
        )


def _write(conn: Connection, attempt: Attempt, text: str) -> None:
    dialect_of(conn).sql.lock_key(conn, attempt.id)
    # guard: checkpoint-by-the-owner
    cancels = leases.save(conn, attempt.right, attempt.claimed.cursor, text)
    if cancels is None:
        if not leases.is_valid(conn, attempt.right):
            raise _lost(attempt)
        raise ExecutionError(
            f"the transaction of an earlier checkpoint of job {attempt.id} was rolled back, so that "
            "this one would leave a slice out: let this error through, and the next attempt goes on "
            "from what is saved"
        )
    # A handler in a thread sees at the end of its slice that an operator cancels the job. The next
    # heartbeat cancels a coroutine: a cancel now would undo the slice.
    if cancels and attempt.cancelled_at is None and not attempt.is_async:
        attempt.cancel_requested = True
        attempt.cancelled_at = monotonic()  # guard: a-checkpoint-tells-of-a-cancel


def _note_saved(attempt: Attempt, text: str, joined: CallersTransaction | None) -> None:
    if text != attempt.claimed.cursor:
        attempt.claimed = attempt.claimed._replace(cursor=text, releases=0)  # guard: cursor-resets-count
    if attempt.on_saved is not None:
        attempt.on_saved(joined, text)


@contextmanager
def _own_row(joined: CallersTransaction, attempt: Attempt, call: str) -> Iterator[Connection]:
    """Connect to the job's row for a write in the handler's transaction."""
    conn = joined.conn
    try:
        with in_schema(conn, attempt.target.schema):
            level = refuses_newer_rows(conn)
            if level is not None:  # guard: complete-read-committed
                raise ConfigurationError(
                    f"{call} was called in a transaction at {level}, where the heartbeats of this job make "
                    "the commit fail: use READ COMMITTED for it, as in "
                    "session.connection(execution_options={'isolation_level': 'READ COMMITTED'})"
                )
            yield conn
    except Exception as error:
        joined.refuse_if_lost(error)
        raise


def _grow(conn: Connection, attempt: Attempt, growth: Growth) -> None:
    """Write the steps that the handler has added to the flow."""
    assert attempt.claimed.flow_id is not None
    assert attempt.target.plan is not None
    grown = attempt.target.plan(growth)
    if (encryption := attempt.target.encryption) is not None:
        # guard: growth-is-protected
        grown = grown._replace(jobs=[job._protected_by(encryption) for job in grown.jobs])
    # guard: growth-goes-with-the-ending
    flows.insert_steps(conn, grown, attempt.claimed.flow_id, attempt.id)


def _lost(attempt: Attempt) -> LeaseLostError:
    return LeaseLostError(
        f"job {attempt.id} belongs to another owner by now: this attempt came too late, and its transaction "
        "must roll back"
    )


def completion(result: Any, job: ClaimedJob, task: Task[..., Any] | None) -> Finished:
    """Return the outcome of a handler that returned `result`. A return annotation, if any, defines its JSON.

    The job is finished whatever it returned. In place of a result that is not JSON, or too large, null is
    stored. The row and the log have a note with the reason.
    """
    if result is None:
        return NO_RESULT
    try:
        if task is not None and (conversion := task._interface.result_conversion) is not None:
            result = conversion.shown(result)
        text = json.dumps(result, ensure_ascii=False, allow_nan=False, default=as_text)
        if "\\u0000" in text:
            text = _NULS.sub("\\1\u2400", text)
        text = scrubbed(text, 4 * len(text))
    except Exception as error:
        why = f"is not JSON ({scrubbed(str(error), 200)})"
    else:
        size = len(text.encode())
        if size <= RESULT_BYTES:
            return Finished(text)
        why = f"takes {size:,} bytes as JSON, more than {RESULT_BYTES:,}"
    log.warning(
        "job %d: %s finished, but its result %s; null is stored",
        job.id,
        job.task,
        why,
        job_id=job.id,
        task=job.task,
        queue=job.queue,
        attempt=job.attempts,
        event="result_dropped",
    )
    return Finished(None, f"its result {why}; null is stored")


class Step:
    """A part of a job that is done once: made by `current_job().step(name)`.

    `cursor` is the cursor of its last checkpoint, None before the first.
    """

    def __init__(self, attempt: Attempt, name: str, saving: Lock) -> None:
        self._attempt, self._saving = attempt, saving
        self.name = checked_name(name, "the name of a step")
        _refuse_completed(attempt)
        self._states()

    def _states(self) -> dict[str, Any]:
        steps = steps_in(self._attempt.claimed.cursor)
        if steps is None:  # guard: a-cursor-is-no-step
            raise ConfigurationError(
                f"job {self._attempt.id} has a cursor of its own: a job has checkpoints or steps, not both"
            )
        return steps

    @property
    def cursor(self) -> Any:
        state = self._states().get(self.name)
        return state[0] if isinstance(state, list) and state else None

    def checkpoint(self, session: SyncSession, cursor: Any) -> None:
        """Save the cursor of the step in the transaction of a slice. As `JobContext.checkpoint`."""
        encode_cursor(cursor)
        save(self._attempt, session, self._text([cursor]))

    async def acheckpoint(self, session: AnyAsyncSession, cursor: Any) -> None:
        """`checkpoint` with an AsyncSession, an AsyncConnection or an asynchronous driver's connection."""
        await asynchronous(session).run_sync(lambda sync: self.checkpoint(sync, cursor))

    def _text(self, state: Any) -> str:
        """Return the states of all steps, as JSON, with this one's."""
        # guard: steps-are-bounded
        return json_within(
            STEPS_BYTES,
            {STEPS: {**self._states(), self.name: state}},
            f"the steps of job {self._attempt.id} take",
            "store large values elsewhere, and let the steps return their keys",
        )

    @overload
    def once(self, call: Callable[[], T]) -> T: ...

    @overload
    def once(self, call: Callable[[Session], T], sessions: Engine | sessionmaker[Session]) -> T: ...

    @overload
    def once(self, call: Callable[[D], T], sessions: D) -> T: ...

    def once(self, call: Callable[..., Any], sessions: Any = None) -> Any:
        """Call a function, save its value and return it. Once that has succeeded, each later attempt of the
        job returns the saved value, and calls nothing.

        The value is saved in a transaction of its own, right after the call. A process that dies between the
        two calls again in the next attempt: give another service an idempotency key, such as
        `f"{job.id} {step.name}"`. `sessions` is an engine, a `sessionmaker` or a driver's connection. The
        call then gets a session, and its writes commit together with the value, exactly once.

        The value is JSON of at most 1 MiB, and is returned as JSON has it: a tuple is a list. It is signed or
        encrypted as results are. An exception of the call saves nothing.

        Raises `ArgumentsError` for a value that is not JSON or too large, and `LeaseLostError` when the job
        belongs to another owner by now. Raises `PayloadKeyError` for a saved value that cannot be decrypted.

        >>> text = job.step("ask").once(lambda: client.ask(prompt))  # doctest: +SKIP
        >>> job.step("bill").once(lambda session: session.add(Bill(text)), engine)  # doctest: +SKIP
        """
        if self._is_done():  # guard: a-done-step-calls-nothing
            return self._value()
        if sessions is None:
            self._remember(call())
        else:
            with transaction_in(sessions) as session:
                save(self._attempt, session, self._done(call(session)))
        return self._value()

    @overload
    async def once_async(self, call: Callable[[], Awaitable[T]]) -> T: ...

    @overload
    async def once_async(
        self,
        call: Callable[[AsyncSession], Awaitable[T]],
        sessions: AsyncEngine | async_sessionmaker[AsyncSession],
    ) -> T: ...

    @overload
    async def once_async(self, call: Callable[[AD], Awaitable[T]], sessions: AD) -> T: ...

    async def once_async(self, call: Callable[..., Awaitable[Any]], sessions: Any = None) -> Any:
        """`once` for a call that is awaited. `sessions` is then an AsyncEngine, an async_sessionmaker or an
        asynchronous driver's connection. Steps without sessions may run side by side.

        >>> text = await job.step("ask").once_async(lambda: client.ask(prompt))  # doctest: +SKIP
        """
        if self._is_done():
            return self._value()
        if sessions is None:
            await to_thread(self._remember, await call())
        else:
            async with atransaction_in(sessions) as session:
                value = await call(session)
                await asynchronous(session).run_sync(
                    lambda sync: save(self._attempt, sync, self._done(value))
                )
        return self._value()

    def _is_done(self) -> bool:
        return isinstance(self._states().get(self.name), dict)

    def _value(self) -> Any:
        attempt, value = self._attempt, self._states()[self.name]["value"]
        text = json.dumps(value, ensure_ascii=False)
        encryption = attempt.target.encryption or NO_KEYS
        return json.loads(encryption.opened("result", attempt.task, attempt.queue, text))

    def _done(self, value: Any) -> str:
        """Return the states of all steps, as JSON, with the value of this one."""
        attempt, subject = self._attempt, f"the value of the step {self.name!r}"
        check_json(value, subject, "return text, numbers, lists or dicts; once_async awaits a coroutine")
        # guard: values-of-steps-are-bounded
        text = json_within(RESULT_BYTES, value, f"{subject} takes", "store it elsewhere, and return its key")
        encryption = attempt.target.encryption or NO_KEYS
        # guard: values-of-steps-are-protected
        text = encryption.protect("result", attempt.task, attempt.queue, text)
        return self._text({"value": json.loads(text)})

    def _remember(self, value: Any) -> None:
        """Save the value of this step in a transaction of its own."""
        attempt = self._attempt
        with self._saving:  # each adds to what the one before has saved; guard: steps-side-by-side-are-saved
            text = self._done(value)
            if attempt.target.open_database is not None:
                attempt.target.open_database().run(lambda conn: _write(conn, attempt, text), tries=10)
            _note_saved(attempt, text, None)
