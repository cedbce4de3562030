"""Claims on MariaDB: one statement locks due jobs, another reserves them."""

from __future__ import annotations

import json
from datetime import datetime, timedelta

from sqlq.database.mariadb import statements
from sqlq.database.sql import listed
from sqlq.database.values import CLAIMED, Ask, Claimant, RawRows

PLACE = {column.name: place for place, column in enumerate(CLAIMED)}


def reserved(ask: Ask, due: RawRows, by: Claimant) -> RawRows:
    """Reserve locked jobs, and return them. Rows without attempts of their own get those of their tasks."""
    if not due:
        return []
    claimed = [list(row[:-1]) for row in due]
    allowed: dict[str, int] = json.loads(by.max_attempts)
    missing: dict[int, list[int]] = {}
    for row, own in zip(claimed, due, strict=True):
        most = allowed.get(row[PLACE["task"]])
        if own[-1] is None and most is not None:
            row[PLACE["max_attempts"]] = most
            missing.setdefault(most, []).append(row[0])
    cases = " ".join(f"WHEN id IN ({listed(ids)}) THEN %s" for ids in missing.values())
    ask(statements.reserve(listed(row[0] for row in due), cases), (by.owner, by.lease_ms, *missing))
    return [tuple(row) for row in claimed]


def time_of(us: int) -> datetime:
    return datetime(1970, 1, 1) + timedelta(microseconds=us)  # noqa: DTZ001 - as the columns have it
