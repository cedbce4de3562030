"""PostgreSQL: one statement where the portable form takes several.

Below them stand the locks of migrations on PostgreSQL, and indexes that are built beside the traffic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from sqlalchemy import (
    Connection,
    Integer,
    Select,
    Table,
    Text,
    any_,
    bindparam,
    cast,
    delete,
    func,
    insert,
    literal_column,
    select,
    true,
)
from sqlalchemy import column as sql_column
from sqlalchemy.dialects import postgresql
from sqlalchemy.sql.dml import ReturningInsert
from sqlalchemy.sql.selectable import FromClause

from sqlq.database.batch import NO_VALUES, Batch, Right, Values, locking, rights
from sqlq.database.dialect import Dialect, Migrations
from sqlq.database.postgresql import health, online, statements
from sqlq.database.postgresql.driver import REFUSE_STANDBY, PostgreSQLDriver
from sqlq.database.sql import RowQuery, Sql, fence
from sqlq.database.values import (
    Claimant,
    ClaimRequest,
    Execute,
    LookRequest,
    RawRows,
)
from sqlq.schema.qualify import in_catalog
from sqlq.schema.tables import CARRIED, jobs

_SEPARATOR = "\x1f"
"""A separator that no JSON contains, since JSON escapes control characters in strings. An array of texts
takes a driver twice as long."""


class PostgreSQLSql(Sql):
    _insert = staticmethod(postgresql.insert)
    # a row that the statement updated has its transaction there
    conflicted = literal_column(in_catalog("xmax <> 0"))

    def claim(self, execute: Execute, request: ClaimRequest, by: Claimant) -> RawRows:
        parameters = {"most": request.limit, **by._asdict()}
        if not request.positions:
            return execute(
                statements.claim(request.order == "newest"), {"names": list(request.queues), **parameters}
            )
        queues, priorities, moments, ids = zip(*request.positions, strict=True)
        positions = {
            "queues": list(queues),
            "priorities": _numbers(priorities),
            "moments": _numbers(moments),
            "ids": _numbers(ids),
        }
        return execute(statements.claim_beyond(), positions | parameters)

    def due_in(self, execute: Execute, names: Sequence[str], after: str | None = None) -> RawRows:
        statement = statements.due_in(after is not None) + statements.IF_READ_ONLY
        rows = execute(statement, {"names": list(names), "after": after})
        if any(row[0] is None for row in rows):
            execute(REFUSE_STANDBY, None)  # guard: empty-look-needs-a-primary
        return rows

    def look(self, execute: Execute, request: LookRequest) -> RawRows:
        return execute(statements.look(request.after is not None), request._asdict())

    def batch_table(self, batch: Batch) -> FromClause:
        arrays = (
            cast(bindparam(f"batch_{name}", type_=Text), postgresql.ARRAY(kind))
            if issubclass(kind, Integer)
            else bindparam(f"batch_{name}", type_=postgresql.ARRAY(kind))
            for name, kind in batch.columns.items()
        )
        columns = (sql_column(name, kind) for name, kind in batch.columns.items())
        return func.unnest(*arrays).table_valued(*columns, name="batch").render_derived()

    def batch_parameters(self, batch: Batch, rows: RawRows) -> dict[str, Any]:
        columns = zip(batch.columns.items(), zip(*rows, strict=True), strict=True)
        return {
            f"batch_{name}": _numbers(values) if issubclass(kind, Integer) else list(values)
            for (name, kind), values in columns
        }

    def texts(self) -> FromClause:
        parts = func.string_to_array(bindparam("texts", type_=Text), func.chr(ord(_SEPARATOR)))
        return (
            func.unnest(parts).table_valued("value", with_ordinality="place", name="texts").render_derived()
        )

    def joined(self, texts: Sequence[str]) -> str | None:
        text = _SEPARATOR.join(texts)
        return text if text.count(_SEPARATOR) == len(texts) - 1 and text else None

    def move(
        self,
        conn: Connection,
        batch: Batch,
        rows: RawRows,
        target: Table,
        *,
        waits: bool = False,
    ) -> set[Right]:
        return rights(conn.execute(_move(self, batch, target, waits), self.batch_parameters(batch, rows)))

    def each(
        self,
        conn: Connection,
        query: RowQuery,
        batch: Batch,
        rows: RawRows,
        parameters: Values = NO_VALUES,
        *,
        locks: bool = False,
    ) -> Sequence[Any]:
        if not rows:
            return []
        parameters = {**parameters, **self.batch_parameters(batch, rows)}
        return conn.execute(_query_of_each(self, query, batch, locks=locks), parameters).all()


@cache
def _query_of_each(sql: Sql, query: RowQuery, batch: Batch, *, locks: bool) -> Select[Any]:
    rows = sql.batch_table(batch)
    selected = query(rows.c).correlate(rows)
    each = (locking(selected, waits=False) if locks else selected).lateral()
    return select(*each.c).join_from(rows, each, true())


def _numbers(values: Sequence[int | None]) -> str:
    """Return an array of numbers as text, which costs a driver a hundredth of a list."""
    return "{" + ",".join(map(str, values)).replace("None", "NULL") + "}"


@cache
def _move(sql: Sql, batch: Batch, target: Table, waits: bool) -> ReturningInsert[Any]:
    """Copy rows as they are locked, one after the other in the order of the batch, and delete them by their
    ids. So no join is planned, which would take as long as the statement itself. On connections that plan
    once, as claims have them, a drain fell to a tenth (decision 10)."""
    rows = sql.batch_table(batch)
    own = select(*(jobs.c[name] for name in CARRIED)).where(jobs.c.id == rows.c.id, *fence(rows))
    each = locking(own, waits=waits).lateral("mine")
    rows_of_each = select(*each.c, *batch.carried(rows)).join_from(rows, each, true())
    taken = rows_of_each.cte("held").prefix_with("MATERIALIZED")
    ids = func.array(select(taken.c.id).scalar_subquery())
    return (
        insert(target)
        .from_select([*CARRIED, *batch.extra], select(*taken.c))
        .add_cte(delete(jobs).where(jobs.c.id == any_(ids)).cte("gone"))
        .returning(target.c.id, target.c.lease_token)
    )


_OWN_PATH = (
    "SELECT pg_catalog.set_config('search_path', pg_catalog.quote_ident(pg_catalog.current_schema()), true)"
)
"""Names resolve in pg_catalog, or in the one schema of the tables."""


class PostgreSQLMigrations(Migrations):
    # of the transaction, so that a pooler can share the session and a killed process leaves none
    locks = f"SELECT pg_catalog.pg_try_advisory_xact_lock({online.MIGRATIONS})"
    holder = in_catalog(f"""
SELECT concat(a.usename, ' in session ', a.pid, ', which SELECT pg_terminate_backend(', a.pid, ') ends')
  FROM pg_catalog.pg_locks l JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid
 WHERE l.locktype = 'advisory' AND l.granted AND l.classid = 0 AND l.objid = {online.MIGRATIONS}
   AND a.datname = current_database()
   AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())
 LIMIT 1""")
    relations = in_catalog("""
SELECT c.relname
  FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname = :schema""")
    finds_schema = in_catalog("SELECT 1 FROM pg_catalog.pg_namespace WHERE nspname = :schema")
    script = ("psql", f"BEGIN;\n\n{_OWN_PATH};\n\n", "COMMIT;\n")
    open_transactions = "pg_stat_activity (by xact_start)"
    build_index = staticmethod(online.build_index)

    def lock_tables(self, conn: Connection, tables: Iterable[str]) -> None:
        conn.exec_driver_sql(f"LOCK TABLE {', '.join(tables)} IN ACCESS EXCLUSIVE MODE")


DIALECT = Dialect(
    name="postgresql",
    title="PostgreSQL",
    oldest=(15,),
    sql=PostgreSQLSql(),
    driver=PostgreSQLDriver(),
    migrations=PostgreSQLMigrations(),
    health=health,
    notifies=True,
    has_kinds_of_roles=True,
)
