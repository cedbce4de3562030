"""Batches of rows that are parameters of one statement, and changes of chosen rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

from sqlalchemy import (
    CTE,
    BigInteger,
    ColumnElement,
    Connection,
    Select,
    Table,
    TextClause,
    delete,
    insert,
    literal,
    select,
    update,
)
from sqlalchemy.sql.selectable import FromClause
from sqlalchemy.types import TypeEngine

from sqlq.schema.tables import jobs

Expression = ColumnElement[Any]
Condition = ColumnElement[bool]
Values = Mapping[str, Any]
"""The values of columns, by their names."""
Right = tuple[int, int]
"""A job's id and the lease token under which a worker holds it."""


def rights(rows: Iterable[Any]) -> set[Right]:
    """Return the rights in rows of id and lease token."""
    return {(id, token) for id, token in rows}


class Batch:
    """The shape of a batch of rows given as parameters, with the constants of all rows."""

    def __init__(
        self, constants: Mapping[str, str] | None = None, /, **columns: type[TypeEngine[Any]]
    ) -> None:
        self.columns = columns
        self.constants = constants or {}
        self.own = tuple(name for name in columns if name not in ("id", "token"))
        self.extra = (*self.own, *self.constants)
        """The columns of a statement beside the right to the job."""

    @classmethod
    def of_claims(
        cls, constants: Mapping[str, str] | None = None, /, **columns: type[TypeEngine[Any]]
    ) -> Batch:
        """Return the shape of rows that begin with the right to a job."""
        return cls(constants, id=BigInteger, token=BigInteger, **columns)

    def carried(self, source: FromClause) -> Iterator[Expression]:
        """Yield the columns of a statement, from a source with the given ones."""
        yield from (source.c[name] for name in self.own)
        yield from (literal(value).label(name) for name, value in self.constants.items())


NO_VALUES: Values = MappingProxyType({})


RIGHT: tuple[ColumnElement[Any], ...] = (jobs.c.id, jobs.c.lease_token)


def insert_returning(
    table: Table, values: Values, *returning: Expression, order_by: Expression | None = None
) -> Any:
    """Return an insert of one row, whose other values are parameters. With `order_by` return an insert of all
    rows of the table that the values are computed from, in this order."""
    if order_by is None:
        return insert(table).values(**values).returning(*returning)
    source = select(*values.values()).order_by(order_by)
    return insert(table).from_select([*values], source).returning(*returning)


def with_returning(statement: Any, *columns: Expression) -> Any:
    """Return an insert that returns these columns, and not what it met."""
    return statement.returning(*columns)


class Key(NamedTuple):
    """The columns of a unique index, and the predicate of a partial one, by which the database finds it."""

    columns: tuple[str, ...]
    where: Condition | TextClause | None = None


NEW, CHANGED, LEFT = 0, 1, 2
"""The column that an `upsert` met: none, one that it changed, or one that it left as it is."""


def inserted(conn: Connection, upsert: Any, parameters: Any = None) -> list[Any]:
    """Run an upsert, and return the rows that it has inserted or changed."""
    return [row[1:] for row in conn.execute(upsert, parameters) if row[0] != LEFT]


@dataclass(eq=False)
class Change:
    """An UPDATE of the rows that a query chooses, or without `values` a DELETE of them.

    The query returns the table's key first, in the order in which the rows are locked. A row that another
    transaction has locked is skipped, or with `waits` waited for. `values` may be a function that returns the
    new values from the chosen rows.
    """

    selection: Select[Any]
    values: Values | Callable[[Any], Values] | None = None
    returning: Sequence[Expression] = field(kw_only=True)
    waits: bool = field(default=False, kw_only=True)

    @property
    def key(self) -> Any:
        return first_column(self.selection)

    @cached_property
    def statement(self) -> Any:
        """One statement that chooses, locks, changes and returns."""
        rows = locked(self.selection, waits=self.waits)
        key, own_key = self.key, rows.c[self.key.name]
        if self.values is None:
            return delete(key.table).where(key.in_(select(own_key))).returning(*self.returning)
        values = self.values(rows) if callable(self.values) else self.values
        return update(key.table).where(key == own_key).values(values).returning(*self.returning)


def first_column(query: Select[Any]) -> Any:
    return next(iter(query.selected_columns))


def locked(selection: Select[Any], *, waits: bool = False) -> CTE:
    """Return the rows that a query chooses, locked. MATERIALIZED locks the rows once, whatever plan the rest
    gets."""
    return locking(selection, waits=waits).cte("held").prefix_with("MATERIALIZED")


def locking(selection: Select[Any], *, waits: bool) -> Select[Any]:
    """Return a query that locks the rows of its first column's table.

    A row locked by another transaction is skipped, so that one locked row (by an open `complete()`, for
    example) never blocks another. Skipped means not known, never lost.
    """
    # guard: locked-rows-are-skipped
    return selection.with_for_update(of=first_column(selection).table, skip_locked=not waits)
