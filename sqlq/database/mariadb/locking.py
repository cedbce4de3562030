"""How rows are locked and changed on MariaDB: by their primary keys, in ascending order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from sqlalchemy import Select, Table, bindparam, delete, insert, select, update
from sqlalchemy.engine import result_tuple
from sqlalchemy.sql import visitors
from sqlalchemy.sql.elements import BindParameter
from sqlalchemy.sql.selectable import Subquery

from sqlq.database.batch import Batch, Change, first_column
from sqlq.database.sql import Sql, fenced
from sqlq.schema.tables import CARRIED, failed_jobs, finished_jobs, jobs


def note_conflict(key: str) -> str:
    """Note the key of a row that an insert meets, with the time of the statement. A later statement of the
    session may insert a row of this key, as a retry does."""
    return f"(@sqlq_met_{key} := {_conflict_now(key)})"


def is_conflict(key: str) -> str:
    """Whether the insert has met the row that it returns. Without an assignment in front of it, MariaDB would
    read the variable before it inserts, or take an unknown one for NULL."""
    return f"IF(`{key}` IS NULL, @sqlq_met_{key} := '', @sqlq_met_{key}) <=> {_conflict_now(key)}"


def _conflict_now(key: str) -> str:
    return f"CONCAT(`{key}`, ' ', UTC_TIMESTAMP(6))"  # guard: conflict-mark-holds-for-one-statement


@lru_cache(maxsize=512)
def locking(query: Select[Any], waits: bool) -> tuple[Select[Any] | None, Select[Any], int | None]:
    """Return the statements that lock the rows of a query, and the position of the key among its columns, if
    any. The first one selects their keys without a lock, if it has to look for them; the other one locks them
    by these keys."""
    key = first_column(query)
    table = key.table
    by_key = query.with_hint(table, "FORCE INDEX (PRIMARY)", "mariadb").with_for_update(skip_locked=not waits)
    if any(isinstance(source, Subquery) and source.name == "batch" for source in _parts(query)):
        # the rows of a batch are in the order of their ids, and find the table's by these
        return (None, by_key.order_by(None).prefix_with("STRAIGHT_JOIN"), None)
    if query._limit_clause is None and table not in _LARGE:  # noqa: SLF001 - SQLAlchemy has no other word
        return (None, by_key, None)
    ids = bindparam("sqlq_ids", expanding=True, type_=key.type)
    locks = by_key.limit(None).order_by(None).where(key.in_(ids)).order_by(key)
    names = [column.name for column in query.selected_columns]
    position = names.index(key.name) if key.name in names else None
    return (query.with_only_columns(key), locks, position)


def _parts(element: Any) -> Iterable[Any]:
    return visitors.iterate(element)


_LARGE = (jobs, finished_jobs, failed_jobs)


@dataclass
class Plan:
    """The statements of a `Change`. The rows are chosen and locked, then changed by their keys. They are read
    again if the change writes columns that it returns."""

    selection: Select[Any]
    waits: bool
    batch: Batch | None = None
    changes: Any = None
    takes: list[str] = field(default_factory=list)
    """The parameters of the changing statement, which takes no others."""
    returns: Any = None
    returned_from: int = 0
    row: Callable[[Any], Any] = tuple


@lru_cache(maxsize=512)
def plan_of(sql: Sql, change: Change) -> Plan:
    key, selection = change.key, change.selection
    table = key.table
    plan = Plan(selection, change.waits)
    ids = bindparam("sqlq_ids", expanding=True, type_=key.type)
    written: set[str] = set()
    if callable(change.values):
        plan.batch = Batch(**{column.name: type(column.type) for column in selection.selected_columns})
        rows = sql.batch_table(plan.batch)
        values = change.values(rows)
        written = set(values)
        plan.changes = update(table).where(key == rows.c[key.name]).values(values)
        plan.takes = ["batch"]
    elif change.values is not None:
        written = set(change.values)
        plan.changes = update(table).where(key.in_(ids)).values(change.values)
    plan.takes += [
        bound.key
        for bound in ([] if plan.changes is None else _parts(plan.changes))
        if isinstance(bound, BindParameter) and bound.required and bound.key != "batch"
    ]
    read = {c.name for each in change.returning for c in _parts(each) if getattr(c, "table", None) is table}
    if written & read:
        plan.returns = select(*change.returning).where(key.in_(ids)).order_by(key)
    else:
        plan.returned_from = len(selection.selected_columns)
        plan.selection = selection.add_columns(
            *(c.label(f"sqlq_{i}") for i, c in enumerate(change.returning))
        )
        plan.row = result_tuple([str(c.key) for c in change.returning])
    return plan


@lru_cache(maxsize=64)
def deletion(sql: Sql, column: Any) -> tuple[Batch, Any]:
    batch = Batch(**{column.name: type(column.type)})
    rows = sql.batch_table(batch)
    return batch, delete(column.table).where(column == rows.c[column.name])


@lru_cache(maxsize=64)
def copying(sql: Sql, batch: Batch, target: Table) -> tuple[Any, Select[Any]]:
    rows = sql.batch_table(batch)
    source = (
        select(*(jobs.c[name] for name in CARRIED), *batch.carried(rows))
        .join_from(rows, jobs, jobs.c.id == rows.c.id)
        .prefix_with("STRAIGHT_JOIN")
        .with_hint(jobs, "FORCE INDEX (PRIMARY)", "mariadb")
    )
    copy = insert(target).from_select([*CARRIED, *batch.extra], source)
    return copy, fenced(sql, batch, jobs.c.lease_token)
