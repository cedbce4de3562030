"""Writes many rows as one, without the few that the database refuses.

It refuses a row for want of a right, by a rule of the host, or for a duplicate id. A driver refuses a value
that it cannot send."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from sqlalchemy import BindParameter, Connection, Engine, bindparam
from sqlalchemy.exc import StatementError

from sqlq.database.dialect import Dialect
from sqlq.database.dialects import refusal

log = logging.getLogger("sqlq.worker")

REFUSALS: tuple[type[Exception], ...] = (StatementError, ValueError, OverflowError)
"""Errors of the database, and of drivers that cannot send a value: text that the connection's encoding cannot
hold, or too large a number."""
REFUSED: BindParameter[Any] = bindparam("refused", [], expanding=True)
LATELY_SECONDS = 300.0
REMEMBERED_ROWS = 10_000
T = TypeVar("T")


def apart(
    items: Sequence[T],
    write: Callable[[Sequence[T]], object],
    refused: Callable[[T, Exception], object],
    dialect: Dialect,
    *,
    within: Connection | None = None,
    kinds: tuple[type[Exception], ...] = REFUSALS,
) -> list[T]:
    """Write items together; where something is refused, write them in halves, down to single ones. Return
    those that are written.

    `refused` is called with each single item that is refused. It makes the item leave the query that finds
    it. With `within`, each write is a savepoint of the open transaction there. Else `write` is a transaction
    of its own.

    The order of recovery: an outage is raised, and the caller waits. The rollback of the open transaction is
    raised, and the caller begins it again. Any other error of these `kinds` is a refusal. So is the rollback
    of a transaction of its own that `write` has tried again: smaller ones may pass.
    """
    if not items:
        return []
    try:
        # guard: refused-part-rolls-back-to-a-savepoint
        with nullcontext() if within is None else within.begin_nested():
            write(items)
        return [*items]
    except kinds as error:
        problem = dialect.driver.problem(error)
        # guard: an-undone-transaction-is-begun-again
        if problem.is_away or (problem.rolled_back and within is not None):
            raise
        if len(items) == 1:
            refused(items[0], error)
            return []
    # outside of the except, which would keep each error, and its frames, as the context of the next
    done: list[T] = []
    for half in (items[: len(items) // 2], items[len(items) // 2 :]):
        done += apart(half, write, refused, dialect, within=within, kinds=kinds)
    return done


_refused: WeakKeyDictionary[Engine, dict[tuple[str, Any], float]] = WeakKeyDictionary()
"""For each database the rows that it refused, and until when this process leaves them out. A mark in the row
might be refused, too."""


def noted(conn: Connection | Engine, why: str) -> Callable[[Any, Exception], None]:
    """Return the `refused` for `apart` that logs a refusal once, and has `lately` leave the row out. An
    item begins with the id of a job. `why` ends the sentence "job 7 …", as in "has lost its worker"."""
    rows = _refused.setdefault(conn.engine, {})

    def note(item: Any, error: Exception) -> None:
        if (why, item[0]) not in rows:  # guard: a-refusal-is-logged-once
            log.error(
                "job %s %s, but the database refuses to store that: %s",
                item[0],
                why,
                refusal(error),
                extra={"job_id": item[0], "event": "unstorable"},
            )
        rows[why, item[0]] = time.monotonic() + LATELY_SECONDS
        if len(rows) > REMEMBERED_ROWS:
            del rows[next(iter(rows))]

    return note


def lately(conn: Connection, why: str) -> dict[str, list[Any]]:
    """Return the parameter of `REFUSED`, by which a query leaves out rows that were refused within the last
    minutes. So no batch is full of them."""
    now, rows = time.monotonic(), _refused.get(conn.engine, {})
    return {"refused": [id for (kind, id), until in list(rows.items()) if kind == why and until > now]}
