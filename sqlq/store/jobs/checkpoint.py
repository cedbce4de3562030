"""Saves the cursor of a job in its row, in the transaction of its handler."""

from __future__ import annotations

from functools import cache
from typing import Any

from sqlalchemy import CTE, Connection, Text, case, select

from sqlq.database.batch import Batch, Change, Right
from sqlq.database.dialect import Dialect, held
from sqlq.database.dialects import dialect_of
from sqlq.schema.tables import jobs

_CHECKPOINT = Batch.of_claims(before=Text, after=Text)


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
    parameters = dialect.batch_parameters(_CHECKPOINT, [(*right, before, after)])
    rows = dialect.change(conn, _save(dialect), parameters)
    return rows[0][0] is not None if rows else None


def is_held(conn: Connection, right: Right) -> bool:
    """Whether a right to a job is valid in the snapshot of this transaction."""
    id, token = right
    query = select(jobs.c.id).where(
        jobs.c.id == id, jobs.c.lease_token == token, jobs.c.reserved_at.is_not(None)
    )
    return conn.execute(query).one_or_none() is not None


@cache
def _save(dialect: Dialect) -> Change:
    # guard: checkpoints-follow-each-other
    return Change(
        jobs,
        held(dialect, _CHECKPOINT),
        _saved,
        returning=(jobs.c.cancel_requested_at,),
        where=lambda mine: jobs.c.cursor.is_not_distinct_from(mine.c.before),
        waits=True,  # guard: checkpoint-waits
    )


def _saved(mine: CTE) -> dict[str, Any]:
    moves_on = jobs.c.cursor.is_distinct_from(mine.c.after)  # guard: only-who-gets-on-is-patient
    # one loss stays, so that the job goes on in a subprocess
    fewer = case((moves_on & (jobs.c.losses > 1), 1), else_=jobs.c.losses)
    return {"cursor": mine.c.after, "releases": case((moves_on, 0), else_=jobs.c.releases), "losses": fewer}
