"""The claim of jobs, the writes of their owner before their end, each fenced by id and token, and how a claim
ended.

It renews leases, notes progress, and saves cursors in the transactions of handlers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum
from functools import cache
from itertools import groupby, zip_longest
from operator import attrgetter
from typing import Any, NamedTuple

from sqlalchemy import (
    CTE,
    DOUBLE_PRECISION,
    BigInteger,
    Connection,
    Text,
    bindparam,
    case,
    false,
    func,
    select,
)

from sqlq.database.batch import RIGHT, Batch, Change, Expression, Right, Values, rights
from sqlq.database.dialect import Dialect
from sqlq.database.dialects import dialect_of, refuse_standby
from sqlq.database.sql import fenced
from sqlq.database.values import Claimant, ClaimRequest, Execute
from sqlq.model.job import ClaimedJob
from sqlq.schema.tables import IS_RESERVED, jobs
from sqlq.schema.types import after
from sqlq.store.jobs.rows import in_all_tables

# -- claim ---------------------------------------------------------------------------------------------------


def claim(execute: Execute, dialect: Dialect, request: ClaimRequest, by: Claimant) -> list[ClaimedJob]:
    """Claim jobs, and return them in their starting order: queue by queue, or with "evenly" one job of each
    queue in turn."""
    names, limit, order, _ = request
    claimed = [ClaimedJob._make(row) for row in dialect.sql.claim(execute, request, by)]
    if len(claimed) > limit:  # guard: claim-respects-its-limit
        raise AssertionError(f"claimed {len(claimed)} jobs instead of at most {limit}")
    positions = {name: i for i, name in enumerate(names)}
    sign = -1 if order == "newest" else 1
    claimed.sort(key=lambda job: (positions[job.queue], -job.priority, sign * job.due_ms, sign * job.id))
    if order == "evenly" and claimed and claimed[0].queue != claimed[-1].queue:
        queues = [list(group) for _, group in groupby(claimed, attrgetter("queue"))]
        claimed = [job for turn in zip_longest(*queues) for job in turn if job is not None]
    return claimed


# -- extend --------------------------------------------------------------------------------------------------

HOLD = Batch.of_claims()
"""Rights, and nothing else."""
_RETURNED = (*RIGHT, jobs.c.cancel_requested_at)


def change_held(
    conn: Connection,
    batch: Batch,
    rows: Sequence[tuple[Any, ...]],
    values: Callable[[CTE], Values],
    *,
    returning: tuple[Expression, ...] = RIGHT,
    waits: bool = False,
    **parameters: Any,
) -> Sequence[Any]:
    """Change the jobs of a batch that their owner still holds. `values` is a function of a module, by which
    the statement is kept."""
    dialect = dialect_of(conn)
    parameters |= dialect.sql.batch_parameters(batch, rows)
    return dialect.sql.change(conn, _change_held(dialect, batch, values, returning, waits), parameters)


@cache
def _change_held(
    dialect: Dialect,
    batch: Batch,
    values: Callable[[CTE], Values],
    returning: tuple[Expression, ...],
    waits: bool,
) -> Change:
    return Change(fenced(dialect.sql, batch), values, returning=returning, waits=waits)


def extend(conn: Connection, claims: Iterable[Right], *, lease_ms: int) -> dict[Right, bool]:
    """Renew leases, counted from now. Return the renewed ones, with whether an operator has requested the
    job's cancel. A missing one is locked or lost; see `states_of`."""
    rows = change_held(conn, HOLD, sorted(claims), _renewed, returning=_RETURNED, lease_ms=lease_ms)
    return {(id, token): cancel_requested_at is not None for id, token, cancel_requested_at in rows}


def _renewed(_: CTE) -> Values:
    # guard: renewal
    return {"lease_expires_at": after(bindparam("lease_ms", type_=BigInteger))}


def owned(conn: Connection, owner: str) -> list[Right]:
    """Return the rights that an owner has, by id."""
    query = select(*RIGHT).where(IS_RESERVED, jobs.c.reserved_by == owner).order_by(jobs.c.id)
    return [(id, token) for id, token in conn.execute(query)]


# -- progress ------------------------------------------------------------------------------------------------


class Note(NamedTuple):
    """An update of one job: its progress, unless `progress` is None, and its retention where its row has
    none."""

    id: int
    token: int
    progress: float | None
    progress_of: float | None
    progress_note: str | None
    retention_ms: int | None


_NOTES = Batch.of_claims(
    progress=DOUBLE_PRECISION, progress_of=DOUBLE_PRECISION, progress_note=Text, retention_ms=BigInteger
)


def note(conn: Connection, notes: Sequence[Note], *, waits: bool = False) -> set[Right]:
    """Write notes in one statement, each fenced by itself; return the rights that their owner still had.

    A row that another transaction has locked is left out, or with `waits` waited for.
    """
    return rights(change_held(conn, _NOTES, sorted(notes), _noted, waits=waits))


def _noted(mine: CTE) -> Values:
    silent = mine.c.progress.is_(None)
    return {
        "progress": func.coalesce(mine.c.progress, jobs.c.progress),
        "progress_of": case((silent, jobs.c.progress_of), else_=mine.c.progress_of),
        "progress_note": case((silent, jobs.c.progress_note), else_=mine.c.progress_note),
        "retention_ms": func.coalesce(jobs.c.retention_ms, mine.c.retention_ms),
    }


# -- checkpoint, in the handler's own transaction ------------------------------------------------------------


def save(conn: Connection, right: Right, before: str | None, after: str) -> bool | None:
    """Save a cursor in the row of a job on a caller's connection; return whether an operator has requested
    its cancel. Return None, and write nothing, where the right to the job is gone or its cursor is not
    `before`.

    The right is the fence of every owner's write. The check of the cursor stops an attempt whose previous
    slice was rolled back. A row that a heartbeat has locked is waited for. A cursor that moves on resets the
    count of releases, and lowers that of losses to one. The job makes progress, so its next attempt need not
    wait long.
    """
    dialect = dialect_of(conn)
    parameters = dialect.sql.batch_parameters(_CHECKPOINT, [(*right, before, after)])
    rows = dialect.sql.change(conn, _save(dialect), parameters)
    return rows[0][-1] is not None if rows else None


_CHECKPOINT = Batch.of_claims(before=Text, after=Text)


@cache
def _save(dialect: Dialect) -> Change:
    mine = fenced(dialect.sql, _CHECKPOINT)
    # guard: checkpoints-follow-each-other
    mine = mine.where(jobs.c.cursor.is_not_distinct_from(mine.selected_columns.before))
    return Change(mine, _saved, returning=_RETURNED, waits=True)  # guard: checkpoint-waits


def _saved(mine: CTE) -> Values:
    moves_on = jobs.c.cursor.is_distinct_from(mine.c.after)  # guard: only-who-gets-on-is-patient
    # one loss stays, so that the job goes on in a subprocess
    fewer = case((moves_on & (jobs.c.losses > 1), 1), else_=jobs.c.losses)
    return {"cursor": mine.c.after, "releases": case((moves_on, 0), else_=jobs.c.releases), "losses": fewer}


# -- looking -------------------------------------------------------------------------------------------------


class LeaseState(Enum):
    """The state of a right to a job after a settle or a heartbeat matched no row, or its reply was lost."""

    HELD = "held"
    SETTLED = "settled"
    LOST = "lost"


def states_of(
    conn: Connection, claims: Iterable[Right], *, completed: Collection[Right] = ()
) -> dict[Right, LeaseState]:
    """Look up each right: held, settled or lost. Still held means that a row lock was in the way; lost means
    to another owner.

    A missing row is lost, or settled if its handler called `complete()`: the job may have been pruned since.
    Raises on a standby, whose rows may be old.
    """
    refuse_standby(conn)  # guard: standby-is-not-believed
    claims = list(claims)
    query = in_all_tables(
        lambda table, _: select(
            table.c.id, table.c.lease_token, IS_RESERVED if table is jobs else false()
        ).where(table.c.id.in_([id for id, _ in claims]))
    )
    rows = {id: (token, is_reserved) for id, token, is_reserved in conn.execute(query)}

    def state_of(id: int, token: int) -> LeaseState:
        if id not in rows:
            # guard: completed-and-pruned-is-settled
            return LeaseState.SETTLED if (id, token) in completed else LeaseState.LOST
        actual, is_reserved = rows[id]
        if actual != token:  # guard: lease-state-compares-the-token
            return LeaseState.LOST
        return LeaseState.HELD if is_reserved else LeaseState.SETTLED

    return {(id, token): state_of(id, token) for id, token in claims}


def is_valid(conn: Connection, right: Right) -> bool:
    """Whether a right to a job is valid in the snapshot of this transaction."""
    id, token = right
    query = select(jobs.c.id).where(jobs.c.id == id, jobs.c.lease_token == token, IS_RESERVED)
    return conn.scalar(query) is not None
