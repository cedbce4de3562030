"""Puts claimed jobs into the order in which they start."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby, zip_longest
from operator import attrgetter
from typing import Any

from sqlq.database.values import ClaimOrder
from sqlq.model.job import ClaimedJob


def claimed(
    rows: Iterable[Sequence[Any]], names: Sequence[str], limit: int, order: ClaimOrder
) -> list[ClaimedJob]:
    """Return the jobs of a claim in their starting order: queue by queue, or with "evenly" one job of each
    queue in turn."""
    claimed = [ClaimedJob._make(row) for row in rows]
    if len(claimed) > limit:  # guard: no-more-than-asked-for
        raise AssertionError(f"claimed {len(claimed)} jobs instead of at most {limit}")
    place = {name: i for i, name in enumerate(names)}
    sign = -1 if order == "newest" else 1
    claimed.sort(key=lambda job: (place[job.queue], -job.priority, sign * job.due_ms, sign * job.id))
    if order == "evenly" and claimed and claimed[0].queue != claimed[-1].queue:
        queues = [list(group) for _, group in groupby(claimed, attrgetter("queue"))]
        claimed = [job for turn in zip_longest(*queues) for job in turn if job is not None]
    return claimed
