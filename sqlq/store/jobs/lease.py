"""Renews leases, and finds out how a claim ended. Each write of an owner is fenced by id and token."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import Enum
from functools import cache

from sqlalchemy import BigInteger, Connection, bindparam, literal, select

from sqlq.database.batch import RIGHT, Batch, Change, Right
from sqlq.database.dialect import Dialect, held
from sqlq.database.dialects import dialect_of
from sqlq.schema.tables import finished_jobs, jobs
from sqlq.schema.types import after
from sqlq.store.jobs.rows import TABLES

HOLD = Batch.of_claims()
"""Rights, and nothing else."""


# -- extend --------------------------------------------------------------------------------------------------


def extend(conn: Connection, wanted: Iterable[Right], *, lease_ms: int) -> dict[Right, bool]:
    """Renew leases, counted from now. Return the renewed ones, with whether an operator has requested the
    job's cancel. A missing one is locked or lost; see `fates`."""
    dialect = dialect_of(conn)
    given = {**dialect.batch_parameters(HOLD, sorted(wanted)), "lease_ms": lease_ms}
    return {
        (id, token): cancel_requested_at is not None
        for id, token, cancel_requested_at in dialect.change(conn, _extend(dialect), given)
    }


# guard: renewal
_RENEWED = {"lease_expires_at": after(bindparam("lease_ms", type_=BigInteger))}


@cache
def _extend(dialect: Dialect) -> Change:
    return Change(jobs, held(dialect, HOLD), _RENEWED, returning=(*RIGHT, jobs.c.cancel_requested_at))


def owned(conn: Connection, owner: str) -> list[Right]:
    """Return the rights that an owner has, by id."""
    mine = (jobs.c.reserved_at.is_not(None), jobs.c.reserved_by == owner)
    return [(id, token) for id, token in conn.execute(select(*RIGHT).where(*mine).order_by(jobs.c.id))]


# -- looking -------------------------------------------------------------------------------------------------


class Fate(Enum):
    """The state of a right to a job after a settle or a heartbeat matched no row, or its reply was lost."""

    HELD = "held"
    SETTLED = "settled"
    LOST = "lost"


def fates(
    conn: Connection, wanted: Iterable[Right], *, completed: Collection[Right] = ()
) -> dict[Right, Fate]:
    """Look up each right: held, settled or lost. Still held means that a row lock was in the way; lost means
    to another owner.

    A missing row is lost, or settled if its handler called `complete()`: the job may have been pruned since.
    Raises on a standby, whose rows may be old.
    """
    dialect_of(conn).refuse_standby(conn)  # guard: standby-is-not-believed
    wanted = list(wanted)
    ids = [id for id, _ in wanted]
    found: dict[int, tuple[int, bool]] = {}
    for table, _ in TABLES:
        reserved = jobs.c.reserved_at.is_not(None) if table is jobs else literal(0)
        query = select(table.c.id, table.c.lease_token, reserved).where(table.c.id.in_(ids))
        found |= {id: (token, bool(is_reserved)) for id, token, is_reserved in conn.execute(query)}

    def fate(id: int, token: int) -> Fate:
        if id not in found:
            # guard: completed-and-pruned-is-settled
            return Fate.SETTLED if (id, token) in completed else Fate.LOST
        actual, is_reserved = found[id]
        if actual != token:  # guard: fate-by-token
            return Fate.LOST
        return Fate.HELD if is_reserved else Fate.SETTLED

    return {(id, token): fate(id, token) for id, token in wanted}


def cancelled(conn: Connection, id: int) -> bool:
    """Whether a job has ended as cancelled, as by an operator's force."""
    ended = (finished_jobs.c.id == id, finished_jobs.c.outcome == "cancelled")
    return conn.scalar(select(finished_jobs.c.id).where(*ended)) is not None


def still_holds(conn: Connection, id: str) -> bool:
    """Whether a worker has reserved any row, locked rows included."""
    return (
        conn.scalar(
            select(jobs.c.id).where(jobs.c.reserved_at.is_not(None), jobs.c.reserved_by == id).limit(1)
        )
        is not None
    )
