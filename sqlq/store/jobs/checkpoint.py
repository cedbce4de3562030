"""How far a job has come, saved in its row in the transaction of its handler."""

from __future__ import annotations

from functools import cache
from typing import Any

from sqlalchemy import CTE, BigInteger, Connection, Text, case, select

from sqlq.database.dialect import Batch, Change, Dialect, Right, held
from sqlq.database.dialects import dialect_of
from sqlq.schema.tables import TOKEN_SCHEMA, jobs

_CHECKPOINT = Batch(id=BigInteger, token=BigInteger, before=Text, after=Text)


def save(
    conn: Connection, right: Right, before: str | None, after: str, *, schema: str | None
) -> bool | None:
    """Save a cursor in the row of a job on a caller's connection, and say whether an operator has asked for
    the job's end; None, and nothing is written, where the right to it is no good any more or its cursor is
    not `before`.

    The one is the fence of every owner's write. The other keeps an attempt from going on behind a slice of
    its own whose transaction was rolled back. A row that a heartbeat has locked is waited for. A cursor that
    moves on takes back the count of releases, and of losses all but one: a job that gets on does not circle,
    and its next attempt need not wait long.
    """
    dialect = dialect_of(conn)
    parameters = dialect.batch_parameters(_CHECKPOINT, [(*right, before, after)])
    options = {"schema_translate_map": {TOKEN_SCHEMA: schema}}
    rows = dialect.change(conn, _save(dialect), parameters, options=options)
    return rows[0][0] is not None if rows else None


def is_held(conn: Connection, right: Right, *, schema: str | None) -> bool:
    """Whether a right to a job is good, as this transaction sees it."""
    options = {"schema_translate_map": {TOKEN_SCHEMA: schema}}
    id, token = right
    query = select(jobs.c.id).where(
        jobs.c.id == id, jobs.c.lease_token == token, jobs.c.reserved_at.is_not(None)
    )
    return conn.execute(query, execution_options=options).one_or_none() is not None


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
    # after a loss it goes on in processes of its own
    fewer = case((moves_on & (jobs.c.losses > 1), 1), else_=jobs.c.losses)
    return {"cursor": mine.c.after, "releases": case((moves_on, 0), else_=jobs.c.releases), "losses": fewer}
