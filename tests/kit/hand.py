"""Do by hand what a worker does: claim jobs, renew their leases and settle them, without running anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Engine, text

import sqlq
from sqlq.database.dialects import dialect_of
from sqlq.database.schemas import execute_on
from sqlq.database.values import Claimant, ClaimOrder, ClaimRequest
from sqlq.model.job import ClaimedJob
from sqlq.model.outcome import Outcome, Settlement
from sqlq.store.jobs import lease
from sqlq.store.jobs import settle as settling
from sqlq.store.jobs.lease import LeaseState


def claim_on(
    conn: Connection,
    names: Sequence[str],
    *,
    limit: int,
    owner: str,
    lease_ms: int,
    max_attempts: str = "{}",
    order: ClaimOrder = "oldest",
) -> list[ClaimedJob]:
    """Claim at most `limit` due jobs of these queues for `owner`, and return them in the order they should
    start.

    Counts the attempt and raises the token. Commit before any handler runs. `max_attempts` is JSON with
    those of each task, for rows that have none of their own.
    """
    by = Claimant(owner, lease_ms, max_attempts)
    return lease.claim(execute_on(conn), dialect_of(conn), ClaimRequest(names, limit, order), by)


def claim(app: sqlq.App, lease_ms: int = 30_000, owner: str = "me", limit: int = 10) -> list[Any]:
    with app.database.begin() as conn:
        return claim_on(conn, ["default"], limit=limit, owner=owner, lease_ms=lease_ms)


def ids(rights: set[tuple[int, int]]) -> set[int]:
    return {id for id, _ in rights}


def settle(app: sqlq.App, job: Any, outcome: Outcome) -> set[int]:
    with app.database.begin() as conn:
        return ids(settling.settle(conn, [Settlement(job.id, job.lease_token, job.attempts, outcome)]))


def fate(app: sqlq.App, job: Any) -> LeaseState:
    with app.database.read() as conn:
        return lease.states_of(conn, [(job.id, job.lease_token)])[job.id, job.lease_token]


def expire(engine: Engine) -> None:
    with engine.begin() as conn:
        conn.execute(text("UPDATE jobs SET lease_expires_at = reserved_at WHERE reserved_at IS NOT NULL"))


def rescue(app: sqlq.App) -> list[settling.Rescued]:
    with app.database.begin() as conn:
        return settling.rescue(conn)
