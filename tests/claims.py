"""Claims jobs by hand, by the statements of a worker's claim."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection

from sqlq.database.dialects import dialect_of
from sqlq.database.schemas import execute_on
from sqlq.database.values import Claimant, ClaimOrder, ClaimRequest
from sqlq.model.job import ClaimedJob
from sqlq.store.jobs import lease as leases


def claim(
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
    return leases.claim(execute_on(conn), dialect_of(conn), ClaimRequest(names, limit, order), by)
