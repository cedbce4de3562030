"""MariaDB: two statements where PostgreSQL needs one, and every row found by its primary key.

InnoDB locks each row that a statement reads, not only those that it returns. So a statement that locks reads
no other rows, whatever the size of the table is. It reads an index that holds only these, or finds them by
their ids in ascending order. The statements name the index, since for a small table the planner prefers to
read all of it.

Below them stand the locks of migrations on MariaDB, where each statement that changes a table commits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Select,
    Table,
    bindparam,
    delete,
    func,
    insert,
    literal_column,
    select,
    text,
    update,
)
from sqlalchemy.dialects import mysql
from sqlalchemy.engine import result_tuple
from sqlalchemy.sql import visitors
from sqlalchemy.sql.elements import BindParameter
from sqlalchemy.sql.selectable import FromClause, Subquery
from sqlalchemy.types import Boolean, Double, Integer, Text

from sqlq.database.batch import (
    CHANGED,
    LEFT,
    NEW,
    NO_VALUES,
    Batch,
    Change,
    Condition,
    Expression,
    Key,
    Right,
    Values,
    first_column,
)
from sqlq.database.dialect import Dialect, Migrations
from sqlq.database.mariadb import health, statements
from sqlq.database.mariadb.driver import OLDEST, REFUSE_STANDBY, MariaDBDriver
from sqlq.database.schemas import execute_on
from sqlq.database.sql import Sql, fenced, listed
from sqlq.database.values import (
    CLAIMED,
    LARGEST_WINDOW,
    Claimant,
    ClaimRequest,
    Execute,
    LookRequest,
    RawRows,
)
from sqlq.schema.tables import CARRIED, failed_jobs, finished_jobs, jobs
from sqlq.schema.types import Moment, naive

MAX_CHARACTERS = 3_500_000
"""The most that the texts of one statement may have. Each takes at most four bytes there, and a packet has
16 MiB."""

_TEXT = "LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin"

_POSITION = {column.name: position for position, column in enumerate(CLAIMED)}


class MariaDBSql(Sql):
    _time_in_json = staticmethod(lambda time: str(naive(time)))
    max_characters = MAX_CHARACTERS
    claims_queues_apart = True
    scans_loosely = True
    levels, lines = statements.LEVELS, statements.LINES

    # -- writing ---------------------------------------------------------------------------------------------

    def upsert(
        self,
        table: Table,
        key: Key,
        values: Values = NO_VALUES,
        changes: Callable[[Any], Values] | None = None,
        *,
        where: Condition | None = None,
        returning: Sequence[Expression] = (),
    ) -> Any:
        statement = mysql.insert(table).values(**values)
        new, changed_it, left = (literal_column(str(state), Integer) for state in (NEW, CHANGED, LEFT))
        # the exclusive locks of ON DUPLICATE KEY reach the next key
        if changes is None and returning:  # guard: insert-locks-conflicts-shared
            return statement.prefix_with("IGNORE").returning(new, *returning)
        (row,) = table.primary_key
        changed = {} if changes is None else dict(changes(statement.inserted))
        if where is not None:
            changed = {name: func.if_(where, value, table.c[name]) for name, value in changed.items()}
        same = next(column for column in table.c if column is not row and column.name not in changed)
        if not returning:
            return statement.on_duplicate_key_update({same.name: same, **changed})
        changed[same.name] = func.if_(literal_column(_note_conflict(row.name), Text).is_(None), same, same)
        state: Any = changed_it if where is None else func.if_(where, changed_it, left)
        state = func.if_(literal_column(_is_conflict(row.name), Boolean), state, new)
        return statement.on_duplicate_key_update(changed).returning(state, *returning)

    def newest(self, query: Select[Any]) -> Select[Any]:
        by_key = query.where(literal_column("live_key") == jobs.c.unique_key)
        by_key = by_key.with_hint(jobs, "FORCE INDEX (jobs_live_key)", "mariadb").prefix_with("STRAIGHT_JOIN")
        # a snapshot may be older; guard: conflicting-job-is-read-anew
        return by_key.with_for_update(read=True)

    def lock(
        self, conn: Connection, query: Select[Any], parameters: Any = None, *, waits: bool = False
    ) -> Sequence[Any]:
        selects_keys, locks, position = locking(query, waits)
        ids: list[Any] | None = None
        if selects_keys is not None:
            ids = list(conn.scalars(selects_keys, parameters))
            if not ids:
                return []
            parameters = {**(parameters or {}), "sqlq_ids": sorted(ids)}
        rows = conn.execute(locks, parameters).all()
        if ids is None or position is None:
            return rows
        order = {id: number for number, id in enumerate(ids)}
        return sorted(rows, key=lambda row: order[row[position]])

    def change(self, conn: Connection, change: Change, parameters: Any = None) -> Sequence[Any]:
        plan = _plan_of(self, change)
        rows = self.lock(conn, plan.selection, parameters, waits=change.waits)
        if not rows:
            return []
        ids = {"sqlq_ids": sorted(row[0] for row in rows)}
        values = {**(parameters or {}), **ids}
        if plan.batch is not None:
            ascending = [row[: len(plan.batch.columns)] for row in sorted(rows, key=lambda row: row[0])]
            values |= self.batch_parameters(plan.batch, ascending)
        if plan.changes is None:
            self.delete(conn, change.key, ids["sqlq_ids"])
        else:
            conn.execute(plan.changes, {name: values[name] for name in plan.takes})
        if plan.returns is not None:
            return conn.execute(plan.returns, ids).all()
        return [plan.row(row[plan.returned_from :]) for row in rows]

    def delete(self, conn: Connection, column: Any, values: Sequence[Any], *where: Condition) -> None:
        if where:  # whose subqueries would lock the rows that they read
            values = conn.scalars(select(column).where(column.in_(values), *where)).all()
        if values:
            batch, statement = _deletion(self, column)
            conn.execute(statement, self.batch_parameters(batch, [(value,) for value in sorted(values)]))

    def move(
        self,
        conn: Connection,
        batch: Batch,
        rows: RawRows,
        target: Table,
        *,
        waits: bool = False,
    ) -> set[Right]:
        copy, query = _copying(self, batch, target)
        locked_rows = self.lock(conn, query, self.batch_parameters(batch, rows), waits=waits)
        rights = {(row[0], row[-1]) for row in locked_rows}
        if rights:
            held = [row for row in rows if tuple(row[:2]) in rights]
            conn.execute(copy, self.batch_parameters(batch, held))
            self.delete(conn, jobs.c.id, [id for id, _ in rights])
        return rights

    # -- claim -----------------------------------------------------------------------------------------------

    def claim(self, execute: Execute, request: ClaimRequest, by: Claimant) -> RawRows:
        find = self._due_beyond if request.positions else self._due
        return _reserved(execute, find(execute, request), by)

    def _due(self, execute: Execute, request: ClaimRequest) -> RawRows:
        names, limit, order, _ = request
        levels = (
            statements.due(newest_first=order == "newest"),
            statements.due(has_level=True, newest_first=order == "newest"),
            statements.NEXT_LEVEL,
        )
        due: list[Any] = []
        if len(names) > 1:  # one statement for all finds those that are worth one of their own
            ready = {queue for queue, ms, _ in self.due_in(execute, names) if ms is not None and ms <= 0}
            names = [name for name in names if name in ready]
        for name in names:
            if len(due) < limit:
                due += self._due_in_one(execute, levels, name, limit - len(due), _POSITION["priority"])
        return due

    def _due_beyond(self, execute: Execute, request: ClaimRequest) -> RawRows:
        due: list[Any] = []
        statement = statements.due(has_level=True, beyond=True)
        for queue, priority, due_us, id in request.positions:
            if len(due) < request.limit:
                # a DATETIME, in UTC, has no time zone
                time = datetime(1970, 1, 1) + timedelta(microseconds=due_us)  # noqa: DTZ001 - as above
                due += execute(statement, (queue, priority, time, time, id, request.limit - len(due)))
        return due

    def due_in(self, execute: Execute, names: Sequence[str], after: str | None = None) -> RawRows:
        if after is None and not names:
            return []
        # A loose scan cannot begin behind a queue: MariaDB would read all jobs there. So it reads all queues.
        number, values = (len(names), tuple(names)) if after is None else (None, ())
        rows = execute(statements.due_in(number), values)
        if any(queue is None for queue, _ in rows):
            execute(REFUSE_STANDBY, None)  # guard: empty-look-needs-a-primary-mariadb
        beyond = [] if after is None else sorted(queue for queue, _ in rows if queue > after)
        positions = {queue: position for position, queue in enumerate(beyond[:LARGEST_WINDOW], 1)}
        known = {*names}
        return [
            (queue, ms, positions.get(queue)) for queue, ms in rows if queue in positions or queue in known
        ]

    def look(self, execute: Execute, request: LookRequest) -> RawRows:
        due = [(*row, *[None] * 8) for row in self.due_in(execute, request.names, request.after)]
        values = [request.hosts_within_ms] * 2 + [request.maintenance] * 2 + request.workers
        return [*due, *execute(statements.look(len(request.workers)), tuple(values))]

    # -- batches ---------------------------------------------------------------------------------------------

    def batch_table(self, batch: Batch) -> FromClause:
        types = [
            next((type_ for known, type_ in _TYPES.items() if issubclass(kind, known)), _TEXT)
            for kind in batch.columns.values()
        ]
        columns = [f"`{name}` {types[i]} PATH '$[{i}]'" for i, name in enumerate(batch.columns)]
        return _json_table("batch", ", ".join(columns), batch.columns)

    def texts(self) -> FromClause:
        return _json_table(
            "texts",
            f"place FOR ORDINALITY, value {_TEXT} PATH '$'",
            {"place": Integer, "value": mysql.LONGTEXT},
        )

    def lock_key(self, conn: Connection, id: int) -> None:
        execute = execute_on(conn)
        for key in execute(statements.KEY_OF, (id,)):
            execute(statements.LOCK_KEY, tuple(key))  # guard: the-key-before-its-job


def _reserved(execute: Execute, due: RawRows, by: Claimant) -> RawRows:
    """Reserve locked jobs, and return them. Rows without attempts of their own get those of their tasks."""
    if not due:
        return []
    claimed = [list(row[:-1]) for row in due]
    allowed: dict[str, int] = json.loads(by.max_attempts)
    missing: dict[int, list[int]] = {}
    for row, own in zip(claimed, due, strict=True):
        attempts = allowed.get(row[_POSITION["task"]])
        if own[-1] is None and attempts is not None:
            row[_POSITION["max_attempts"]] = attempts
            missing.setdefault(attempts, []).append(row[0])
    cases = " ".join(f"WHEN id IN ({listed(ids)}) THEN %s" for ids in missing.values())
    execute(statements.reserve(listed(row[0] for row in due), cases), (by.owner, by.lease_ms, *missing))
    return [tuple(row) for row in claimed]


_TYPES = {BigInteger: "BIGINT", Integer: "INT", Moment: "DATETIME(6)", Double: "DOUBLE"}


def _json_table(name: str, columns: str, types: dict[str, Any]) -> FromClause:
    """Return a table of the rows of a JSON array, a parameter of this name."""
    rows = text(f"SELECT * FROM JSON_TABLE(:{name}, '$[*]' COLUMNS ({columns})) AS given")
    return rows.bindparams(bindparam(name, type_=mysql.LONGTEXT)).columns(**types).subquery(name)


# -- locks and changes by primary keys, in ascending order ---------------------------------------------------


def _note_conflict(key: str) -> str:
    """Note the id of a row that an insert meets. No later insert of the session has this id: the table
    counts them."""
    return f"(@sqlq_met_{key} := `{key}`)"


def _is_conflict(key: str) -> str:
    """Whether the insert has met the row that it returns. Without an assignment in front of it, MariaDB would
    read the variable before it inserts, or take an unknown one for NULL."""
    return f"IF(`{key}` IS NULL, @sqlq_met_{key} := '', @sqlq_met_{key}) <=> `{key}`"


@lru_cache(maxsize=512)
def locking(query: Select[Any], waits: bool) -> tuple[Select[Any] | None, Select[Any], int | None]:
    """Return the statements that lock the rows of a query, and the position of the key among its columns, if
    any. The first one selects their keys without a lock, if it has to look for them; the other one locks them
    by these keys."""
    key = first_column(query)
    table = key.table
    by_key = query.with_hint(table, "FORCE INDEX (PRIMARY)", "mariadb").with_for_update(skip_locked=not waits)
    if query._limit_clause is None:  # noqa: SLF001 - no public attribute has the limit
        if any(isinstance(source, Subquery) and source.name == "batch" for source in visitors.iterate(query)):
            # the rows of a batch are in the order of their ids, and find the table's by these
            return (None, by_key.order_by(None).prefix_with("STRAIGHT_JOIN"), None)
        if table not in _LARGE:
            return (None, by_key, None)
    ids = bindparam("sqlq_ids", expanding=True, type_=key.type)
    locks = by_key.limit(None).order_by(None).where(key.in_(ids)).order_by(key)
    names = [column.name for column in query.selected_columns]
    position = names.index(key.name) if key.name in names else None
    return (query.with_only_columns(key), locks, position)


_LARGE = (jobs, finished_jobs, failed_jobs)


@dataclass
class _Plan:
    """The statements of a `Change`. The rows are chosen and locked, then changed by their keys. They are read
    again if the change writes columns that it returns."""

    selection: Select[Any]
    batch: Batch | None = None
    changes: Any = None
    takes: list[str] = field(default_factory=list)
    """The parameters of the changing statement, which takes no others."""
    returns: Any = None
    returned_from: int = 0
    row: Callable[[Any], Any] = tuple


@lru_cache(maxsize=512)
def _plan_of(sql: Sql, change: Change) -> _Plan:
    key, selection = change.key, change.selection
    table = key.table
    plan = _Plan(selection)
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
        for bound in ([] if plan.changes is None else visitors.iterate(plan.changes))
        if isinstance(bound, BindParameter) and bound.required and bound.key != "batch"
    ]
    read = {
        c.name
        for each in change.returning
        for c in visitors.iterate(each)
        if isinstance(c, Column) and c.table is table
    }
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
def _deletion(sql: Sql, column: Any) -> tuple[Batch, Any]:
    batch = Batch(**{column.name: type(column.type)})
    return batch, delete(column.table).where(column == sql.batch_table(batch).c[column.name])


@lru_cache(maxsize=64)
def _copying(sql: Sql, batch: Batch, target: Table) -> tuple[Any, Select[Any]]:
    rows = sql.batch_table(batch)
    source = (
        select(*(jobs.c[name] for name in CARRIED), *batch.carried(rows))
        .join_from(rows, jobs, jobs.c.id == rows.c.id)
        .prefix_with("STRAIGHT_JOIN")
        .with_hint(jobs, "FORCE INDEX (PRIMARY)", "mariadb")
    )
    copy = insert(target).from_select([*CARRIED, *batch.extra], source)
    return copy, fenced(sql, batch, jobs.c.lease_token)


# one for each database, since the server has one for each name
_LOCK = "CONCAT('sqlq migrates ', :schema)"


class MariaDBMigrations(Migrations):
    locks = f"SELECT GET_LOCK({_LOCK}, 0)"
    unlocks = f"SELECT RELEASE_LOCK({_LOCK})"
    holder = f"""
SELECT CONCAT(COALESCE(user, 'a user'), ' in session ', held.id, ', which KILL ', held.id, ' ends')
  FROM (SELECT IS_USED_LOCK({_LOCK}) AS id) AS held
  LEFT JOIN information_schema.processlist AS session ON session.id = held.id
 WHERE held.id IS NOT NULL"""
    relations = "SELECT table_name FROM information_schema.tables WHERE table_schema = :schema"
    finds_schema = "SELECT 1 FROM information_schema.schemata WHERE schema_name = :schema"
    script = ("mariadb", "", "")  # its DDL commits at once; each statement can be repeated
    in_transactions = False
    open_transactions = "information_schema.innodb_trx (by trx_started)"

    def lock_tables(self, conn: Connection, tables: Iterable[str]) -> None:
        conn.exec_driver_sql(f"LOCK TABLES {', '.join(f'{table} WRITE' for table in tables)}")


DIALECT = Dialect(
    name="mariadb",
    title="MariaDB",
    oldest=OLDEST,
    sql=MariaDBSql(),
    driver=MariaDBDriver(),
    migrations=MariaDBMigrations(),
    health=health,
    schemas_are_databases=True,
    locks_on_one_node=True,
)
