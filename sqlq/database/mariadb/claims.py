"""Claims on MariaDB: one statement locks due jobs, another reserves them."""

from __future__ import annotations

import json
import re
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any

from sqlalchemy.dialects.mysql.mariadb import MariaDBDialect

from sqlq.database.dialect import CLAIMED, listed
from sqlq.database.mariadb import sql
from sqlq.database.values import Ask, Claimant, RawRows
from sqlq.schema import qualify
from sqlq.schema.tables import TOKEN_SCHEMA

PLACE = {column.name: place for place, column in enumerate(CLAIMED)}
_AFTER_CLAIM = {"lease_token": sql.NEXT_TOKEN, "attempts": sql.ONE_MORE}


@lru_cache
def due_statement(*, given_level: bool = False, beyond: bool = False, newest_first: bool = False) -> str:
    """Return the statement that locks due jobs, with the columns of a claim as they are after it."""
    dialect: Any = qualify.qualified(MariaDBDialect())
    columns = [
        _AFTER_CLAIM.get(column.name)
        or re.sub(rf"`?{TOKEN_SCHEMA}`?\.", "", str(column.compile(dialect=dialect)))
        for column in CLAIMED
    ]
    said = ", ".join([*columns, "max_attempts"])
    return sql.due(said, given_level=given_level, beyond=beyond, newest_first=newest_first)


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
    ask(sql.reserve(listed(row[0] for row in due), cases), (by.owner, by.lease_ms, *missing))
    return [tuple(row) for row in claimed]


def time_of(us: int) -> datetime:
    return datetime(1970, 1, 1) + timedelta(microseconds=us)  # noqa: DTZ001 - as the columns have it
