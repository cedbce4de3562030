"""A job too long for one transaction: its cursor, and its steps.

A handler does its work in slices, each in a transaction of its own, and saves with each how far it has come.
The next attempt, whatever became of this one, begins there. The cursor is JSON in the job's row; of a job
with steps it holds what each of them has saved.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
)
from typing import TYPE_CHECKING, Any, TypeVar, overload

from sqlq.config.constants import CURSOR_BYTES
from sqlq.database.caller.session import (
    AnyAsyncDriverConnection,
    AnyAsyncSession,
    AnyDriverConnection,
    SyncSession,
    atransaction_in,
    awaited,
    transaction_in,
)
from sqlq.errors import ArgumentsError, ConfigurationError
from sqlq.model.checks import checked_name
from sqlq.payload.codec import as_text, check_json

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker
    from sqlalchemy.orm import Session, sessionmaker

    from sqlq.worker.attempt.own_row import OwnRow

D = TypeVar("D", bound=AnyDriverConnection)
AD = TypeVar("AD", bound=AnyAsyncDriverConnection)

STEPS = "sqlq.steps"
"""The one name in the cursor of a job with steps. It maps names of steps to true for one that is done, and
for one that is under way to a list of its cursor."""


_DONE = True


def encode(cursor: Any) -> str:
    """Return a cursor as JSON text. Raises `ArgumentsError` for what is not JSON, takes more than 64 KiB or
    has a name that is sqlq's own."""
    check_json(cursor, "the cursor", "save its text, or what it is made of")
    if isinstance(cursor, dict) and STEPS in cursor:  # guard: steps-are-no-cursor
        raise ArgumentsError(f"the cursor has the name {STEPS!r}, which is sqlq's own: choose another")
    return _text(cursor)


def _text(cursor: Any) -> str:
    text = json.dumps(cursor, ensure_ascii=False, default=as_text)
    size = len(text) if text.isascii() else len(text.encode())
    if size > CURSOR_BYTES:  # guard: cursors-are-bounded
        raise ArgumentsError(
            f"the cursor takes {size:,} bytes as JSON, more than the {CURSOR_BYTES:,} allowed: save where "
            "the next slice begins, and not what is done"
        )
    return text


def decode(text: Any) -> Any:
    """Return the cursor in a row. Raises `ArgumentsError` for what is not JSON: SQL may have written it."""
    try:
        return None if text is None else json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise ArgumentsError(f"the cursor is not JSON: {error}") from None


def steps_in(text: str | None) -> dict[str, Any] | None:
    """Return what the steps of a job have saved; None where its cursor is one of the handler's own."""
    cursor = decode(text)
    if cursor is None:
        return {}
    found = cursor.get(STEPS) if isinstance(cursor, dict) else None
    return dict(found) if isinstance(found, dict) else None


class Step:
    """A part of a job that is done once: made by `current_job().step(name)`.

    `done` says whether it has been finished, in this attempt or an earlier one; `cursor` is what its last
    checkpoint has saved, None before the first.
    """

    def __init__(self, row: OwnRow, name: str) -> None:
        self._row = row
        self.name = checked_name(name, "the name of a step", ConfigurationError)
        self._said()

    def _said(self) -> dict[str, Any]:
        steps = steps_in(self._row.cursor)
        if steps is None:  # guard: a-cursor-is-no-step
            raise ConfigurationError(
                f"job {self._row.attempt.id} has a cursor of its own: a job has checkpoints or steps, not "
                "both"
            )
        return steps

    @property
    def done(self) -> bool:
        return self._said().get(self.name) is _DONE

    @property
    def cursor(self) -> Any:
        found = self._said().get(self.name)
        return found[0] if isinstance(found, list) and found else None

    def checkpoint(self, session: SyncSession, cursor: Any) -> None:
        """Save how far the step has come, in the transaction of a slice. As `JobContext.checkpoint`."""
        encode(cursor)
        self._save(session, [cursor])

    async def acheckpoint(self, session: AnyAsyncSession, cursor: Any) -> None:
        """`checkpoint` with an AsyncSession, an AsyncConnection or an asynchronous driver's connection."""
        run = awaited(session, "acheckpoint", "checkpoint")
        await run.run_sync(lambda sync: self.checkpoint(sync, cursor))

    def finish(self, session: SyncSession) -> None:
        """Say in the transaction of its last write that the step is done: it is when that commits, for every
        attempt of the job. As `JobContext.checkpoint`."""
        self._save(session, _DONE)

    async def afinish(self, session: AnyAsyncSession) -> None:
        """`finish` with an AsyncSession, an AsyncConnection or an asynchronous driver's connection."""
        await awaited(session, "afinish", "finish").run_sync(self.finish)

    def _save(self, session: SyncSession, said: Any) -> None:
        steps = self._said()
        if steps.get(self.name) is _DONE:  # guard: a-step-is-finished-once
            raise ConfigurationError(
                f"the step {self.name!r} of job {self._row.attempt.id} is done: ask step.done before its work"
            )
        self._row.save(session, _text({STEPS: {**steps, self.name: said}}))

    @overload
    def finishing(self, sessions: Engine | sessionmaker[Session]) -> AbstractContextManager[Session]: ...

    @overload
    def finishing(self, sessions: D) -> AbstractContextManager[D]: ...

    @contextmanager
    def finishing(self, sessions: Any) -> Iterator[Any]:
        """Open a session, run the block in its transaction, finish the step and commit; an exception rolls
        all of it back. With a driver's connection, in a transaction of its own on that.

        >>> step = sqlq.current_job().step("bill")  # doctest: +SKIP
        >>> if not step.done:  # doctest: +SKIP
        ...     with step.finishing(engine) as session:
        ...         session.add(Bill(order_id=order_id))
        """
        with transaction_in(sessions, "finishing", "finish") as session:
            yield session
            self.finish(session)

    @overload
    def afinishing(
        self, sessions: AsyncEngine | async_sessionmaker[AsyncSession]
    ) -> AbstractAsyncContextManager[AsyncSession]: ...

    @overload
    def afinishing(self, sessions: AD) -> AbstractAsyncContextManager[AD]: ...

    @asynccontextmanager
    async def afinishing(self, sessions: Any) -> AsyncIterator[Any]:
        """`finishing` with an AsyncEngine, async_sessionmaker or asynchronous driver's connection."""
        async with atransaction_in(sessions, "finishing", "finish") as session:
            yield session
            await self.afinish(session)
