"""The plans of PostgreSQL: which nodes a statement has, and how many pages it touches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sqlalchemy import Connection


def explained(conn: Connection, statement: str, parameters: Any = None) -> dict[str, Any]:
    """Run a statement, and return the root of its plan."""
    explain = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}"
    (plan,) = conn.exec_driver_sql(explain, parameters).scalar_one()
    root: dict[str, Any] = plan["Plan"]
    return root


def pages(plan: dict[str, Any]) -> int:
    """Return how many pages of the database it touched."""
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


def walk(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield all its nodes."""
    yield plan
    for child in plan.get("Plans", ()):
        yield from walk(child)


def scans(plan: dict[str, Any], *tables: str) -> list[dict[str, Any]]:
    """Return the nodes that read one of these tables from end to end, or any table."""
    whole = [node for node in walk(plan) if node["Node Type"] == "Seq Scan"]
    return [node for node in whole if not tables or node["Relation Name"] in tables]
