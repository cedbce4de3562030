"""The values that columns may hold: domains, their types on PostgreSQL, and the same rules as CHECKs on
SQLite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import CheckConstraint, Column, String

from sqlq.config.durations import LONGEST_MS

LONGEST_NAME = 255
"""Characters in the name of a queue or task, or in a unique key."""

MOST_COUNTED = 1_000_000_000
LARGEST_TOKEN = 4_000_000_000_000_000_000

UNIQUE_UNTIL = ("finish", "start", "pruned")
FAILURE_REASONS = ("error", "timeout", "worker_lost", "unknown_task", "bad_payload", "bad_signature")
OUTCOMES = ("completed", "cancelled")
BLOCKED_BY = ("flow", "limit", "pause")
ON_OUTCOMES = ("success", "failure", "ended")


def named(*, nullable: bool = False, **kw: Any) -> dict[str, Any]:
    """Return the options of a column of names."""
    return {"type_": String(LONGEST_NAME), "nullable": nullable, **kw}


def one_of(column: str, values: tuple[str, ...]) -> str:
    """Return the rule that a column holds one of some words."""
    return f"{column} IN ({', '.join(repr(v) for v in values)})"


DOMAINS = {
    "moment": (
        "TIMESTAMP WITH TIME ZONE",
        "VALUE >= '1970-01-01 00:00:00+00' AND VALUE < '9999-01-01 00:00:00+00'",
    ),
    "priority": ("SMALLINT", "VALUE BETWEEN -100 AND 100"),
    "count": ("INTEGER", f"VALUE BETWEEN 0 AND {MOST_COUNTED}"),
    "most": ("INTEGER", f"VALUE BETWEEN 1 AND {MOST_COUNTED}"),
    "token": ("BIGINT", f"VALUE BETWEEN 0 AND {LARGEST_TOKEN}"),
    "timeout": ("BIGINT", f"VALUE BETWEEN 0 AND {LONGEST_MS}"),
    "errors": ("TEXT", "length(VALUE) >= 2"),
    "until": ("VARCHAR(6)", one_of("VALUE", UNIQUE_UNTIL)),
    "outcome": ("VARCHAR(9)", one_of("VALUE", OUTCOMES)),
    "reason": ("VARCHAR(13)", one_of("VALUE", FAILURE_REASONS)),
    "blocked": ("VARCHAR(5)", one_of("VALUE", BLOCKED_BY)),
    "on_outcome": ("VARCHAR(7)", one_of("VALUE", ON_OUTCOMES)),
}
"""The types of columns that have a rule, each a domain `sqlq_…` on PostgreSQL.

As CHECKs of the tables the same rules cost two fifths of a single INSERT. PostgreSQL parses a CHECK anew for
each statement, but caches that of a domain. On SQLite they are CHECKs.
"""


def in_domain(name: str) -> dict[str, Any]:
    """Mark a column as one of a domain. Statements use its plain type; timestamps have their domain without a
    mark."""
    return {"info": {"domain": name}}


def on_sqlite(rule: str, name: str) -> CheckConstraint:
    """Return a CHECK for SQLite alone, where there are no domains."""
    return CheckConstraint(rule, name=name).ddl_if(dialect="sqlite")


def _of_type(column: str, kind: str) -> str:
    """This form takes half the time of `typeof(…) IN ('integer', 'null')`, for each column of each row."""
    return f"({column} IS NULL OR typeof({column}) = '{kind}')"


def of_their_types(
    table: str, moments: Sequence[Column[Any]], numbers: str, texts: str
) -> list[CheckConstraint]:
    """Return the CHECKs of the types of a table's timestamps and named columns, for SQLite, where any column
    takes any type.

    A date as text compares greater than every integer, so it would never be due. Text counts as larger than
    any limit, and bytes among texts could not be shown. A time that Python cannot read back would stop every
    claim of its queue, or every listing. NULL passes, where the column takes it.
    """
    in_range = " AND ".join(f"{c.name} >= 0 AND {c.name} < 253370764800000" for c in moments)
    found = [on_sqlite(in_range, f"{table}_moments_in_range")] if moments else []
    stored = [c.name for c in moments if c.computed is None]
    for columns, kind, name in (
        (stored, "integer", "times_are_integers"),
        (numbers.split(), "integer", "numbers_are_integers"),
        (texts.split(), "text", "texts_are_text"),
    ):
        if columns:
            rule = " AND ".join(_of_type(column, kind) for column in columns)
            found.append(on_sqlite(rule, f"{table}_{name}"))
    return found
