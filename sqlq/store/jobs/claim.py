"""Claims jobs, and puts them into the order in which they start."""

from __future__ import annotations

from itertools import groupby, zip_longest
from operator import attrgetter

from sqlq.database.dialect import Dialect
from sqlq.database.values import Ask, Claimant, ClaimRequest
from sqlq.model.job import ClaimedJob


def claim(ask: Ask, dialect: Dialect, wanted: ClaimRequest, by: Claimant) -> list[ClaimedJob]:
    """Claim jobs, and return them in their starting order: queue by queue, or with "evenly" one job of each
    queue in turn."""
    names, limit, order, _ = wanted
    claimed = [ClaimedJob._make(row) for row in dialect.sql.claim(ask, wanted, by)]
    if len(claimed) > limit:  # guard: claim-respects-its-limit
        raise AssertionError(f"claimed {len(claimed)} jobs instead of at most {limit}")
    place = {name: i for i, name in enumerate(names)}
    sign = -1 if order == "newest" else 1
    claimed.sort(key=lambda job: (place[job.queue], -job.priority, sign * job.due_ms, sign * job.id))
    if order == "evenly" and claimed and claimed[0].queue != claimed[-1].queue:
        queues = [list(group) for _, group in groupby(claimed, attrgetter("queue"))]
        claimed = [job for turn in zip_longest(*queues) for job in turn if job is not None]
    return claimed
