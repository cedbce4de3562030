"""The statements in which databases differ: each method of `Sql`, with its default."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, TypeVar

from sqlalchemy import (
    Connection,
    Delete,
    Integer,
    Select,
    Table,
    bindparam,
    delete,
    func,
    insert,
    literal,
    literal_column,
    null,
    select,
)
from sqlalchemy.sql.dml import ReturningInsert
from sqlalchemy.sql.selectable import FromClause

from sqlq.database.batch import (
    NEW,
    NO_VALUES,
    Batch,
    Change,
    Condition,
    Expression,
    Key,
    Right,
    Values,
    locked,
    locking,
    rights,
)
from sqlq.database.values import (
    Claimant,
    ClaimRequest,
    Execute,
    LookRequest,
    RawRows,
)
from sqlq.schema.tables import CARRIED, jobs

T = TypeVar("T")
RowQuery = Callable[[Any], Select[Any]]
"""Returns a query that is run for a row, from its columns by their names."""


_ABOVE_ALL = 1_000
"""Above each priority."""


def listed(ids: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ids)))


# These step from one value of an index to the next, by one probe for each. A SELECT DISTINCT would read all
# rows of the index.
LEVELS = """
WITH RECURSIVE each_queue (queue) AS (
      SELECT min(queue) FROM __sqlq__.jobs WHERE reserved_at IS NULL
      UNION ALL
      SELECT (SELECT min(j.queue) FROM __sqlq__.jobs j
               WHERE j.reserved_at IS NULL AND j.queue > each_queue.queue)
        FROM each_queue WHERE each_queue.queue IS NOT NULL),
each_priority (queue, priority) AS (
      SELECT queue, (SELECT min(j.priority) FROM __sqlq__.jobs j
                      WHERE j.reserved_at IS NULL AND j.queue = each_queue.queue)
        FROM each_queue WHERE queue IS NOT NULL
      UNION ALL
      SELECT queue, (SELECT min(j.priority) FROM __sqlq__.jobs j
                      WHERE j.reserved_at IS NULL AND j.queue = each_priority.queue
                        AND j.priority > each_priority.priority)
        FROM each_priority WHERE priority IS NOT NULL)
SELECT queue, priority FROM each_priority WHERE priority IS NOT NULL
"""
"""The queues with unreserved jobs, and the priorities of these."""

BEGINS = " AND substr(limit_key, 1, :length) = :prefix"

LINES = """
WITH RECURSIVE each_limit_key (limit_key) AS (
      SELECT min(limit_key) FROM __sqlq__.jobs WHERE blocked_by = 'limit' AND limit_key > :after{begins}
      UNION ALL
      SELECT (SELECT min(limit_key) FROM __sqlq__.jobs
               WHERE blocked_by = 'limit' AND limit_key > each_limit_key.limit_key{begins})
        FROM each_limit_key WHERE each_limit_key.limit_key IS NOT NULL)
SELECT limit_key FROM each_limit_key WHERE limit_key IS NOT NULL LIMIT :most
"""
"""The keys of limits with jobs in line, after one key. `{begins}` is nothing, or the condition `BEGINS`."""


class Sql:
    """The statements of one database; stateless, a part of its `Dialect`."""

    _time_in_json: Callable[[Any], Any] = staticmethod(str)
    """Return a time as a batch has it in JSON."""
    max_characters: int | None = None
    """The most that the texts of one statement may have; None where there is no limit."""
    scans_loosely = False
    """Whether a GROUP BY reads one row of an index for each group. A recursion would read all rows there."""
    claims_queues_apart = False
    """Whether a claim takes a statement for each queue."""
    conflicted: Expression = null()
    """Whether an `upsert` met the row and changed it, for its RETURNING; NULL where the database does not
    report that."""
    _insert: Callable[[Table], Any]
    """The class of an insert that can skip or change rows."""
    levels, lines = LEVELS, LINES
    """These statements, as this database runs them."""

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
        """Return an insert of one row that leaves out the row if its key is taken. With `changes` it changes
        the row that has the key instead, if that one fulfils `where`. `changes` computes the new values from
        the rejected row.

        With `returning` it returns what it met, and then these columns, of rows that it inserted or changed.
        A database may also return rows that it has left as they are, as `LEFT`.
        """
        statement = self._insert(table).values(**values)
        index = {"index_elements": key.columns, "index_where": key.where}
        state = self.conflicted
        if changes is None:
            statement, state = statement.on_conflict_do_nothing(**index), literal_column(str(NEW), Integer)
        else:
            statement = statement.on_conflict_do_update(
                **index, set_=changes(statement.excluded), where=where
            )
        return statement.returning(state, *returning) if returning else statement

    def newest(self, query: Select[Any]) -> Select[Any]:
        """Return a query of live jobs that hold keys so that it reads what an insert has met."""
        return query

    def lock(
        self, conn: Connection, query: Select[Any], parameters: Any = None, *, waits: bool = False
    ) -> Sequence[Any]:
        """Return the rows of a query, and lock those of its first column's table until the transaction ends.
        A row that another transaction has locked is skipped, or with `waits` waited for."""
        return conn.execute(locking(query, waits=waits), parameters).all()

    def change(self, conn: Connection, change: Change, parameters: Any = None) -> Sequence[Any]:
        """Change rows, and return them as they are now, or as they were deleted."""
        return conn.execute(change.statement, parameters).all()

    def delete(self, conn: Connection, column: Any, values: Sequence[Any], *where: Condition) -> None:
        """Delete the rows that have one of these values in a column, the first one of the primary key, and
        that fulfil `where`."""
        conn.execute(delete(column.table).where(column.in_(values), *where))

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
        """Run a query for each row of a batch, and return all its rows. `query` builds it from the columns of
        a row. With `locks` it locks the rows of its first column's table where rows can be locked one by one.
        """
        statement = _query_of_one(query, batch)
        return [
            job
            for row in rows
            for job in conn.execute(statement, {**parameters, **dict(zip(batch.columns, row, strict=True))})
        ]

    # -- claim -----------------------------------------------------------------------------------------------

    def claim(self, execute: Execute, request: ClaimRequest, by: Claimant) -> RawRows:
        """Claim due jobs of the wanted queues, and return them as `CLAIMED`, in any order.

        Queues are served in the order given. With "evenly" there is no strict order between them, so that a
        claim may take some of each. If jobs were enqueued alternately these lie together, and SQLite writes
        whole pages. Within a queue, each priority is one range of the claim index. So a claim steps over rows
        scheduled at a higher priority as a whole instead of reading them. No other worker claims a row
        meanwhile: the rows are locked, or without row locks the transaction has the database's write lock.
        """
        raise NotImplementedError

    def _due_in_one(
        self, execute: Execute, statements: Sequence[str], name: str, limit: int, column: int
    ) -> RawRows:
        """Return due jobs of a queue, level by level. The statements are those for the highest priority, for
        a given one, and for the next lower one; `column` is that of the priority."""
        at_top, at_level, next_level = statements
        due = execute(at_top, (name, name, limit))
        level = due[0][column] if due else execute(next_level, (name, _ABOVE_ALL))[0][0]
        while level is not None and len(due) < limit:
            ((level,),) = execute(next_level, (name, level))
            if level is not None:
                due = [*due, *execute(at_level, (name, level, limit - len(due)))]
        return due

    def due_in(self, execute: Execute, names: Sequence[str], after: str | None = None) -> RawRows:
        """Return `(queue, ms, place)` for each of these queues that has unreserved jobs. With `after`, also
        for the next `LARGEST_WINDOW` queues after that one.

        `ms` is the time until its next job is due; None for a paused queue. `place` counts the queues of the
        window; None for a known queue beside it.

        The first row of each priority in the claim index is the next due one. So it reads one row for each
        queue and priority.
        """
        raise NotImplementedError

    def look(self, execute: Execute, request: LookRequest) -> RawRows:
        """Return the rows of `due_in`, filled up with Nones, and one row more. It is `(None, ms, None,
        listens, hosts, expired, limited, signalled, asked, all_paused, pause_ms)`.

        - `ms`: the milliseconds until the next schedule is due, or None.
        - `listens`: whether this connection LISTENs to the channel; None where its server takes no writes.
        - `hosts`: the number of hosts with a heartbeat within this time.
        - With `maintenance`: whether a lease has expired, any job is under a limit.
        - `signalled`: whether a signal is new, or a wait for one is due.
        - The arguments of `workers.wanted`: the requests to these workers as JSON, and whether all queues are
          paused. Then the milliseconds until the next pause ends.
        """
        raise NotImplementedError

    # -- settle ----------------------------------------------------------------------------------------------

    def batch_table(self, batch: Batch) -> FromClause:
        """Return a table of the rows given as parameters, so that one statement serves batches of any
        size."""
        raise NotImplementedError

    def batch_parameters(self, batch: Batch, rows: RawRows) -> dict[str, Any]:
        """Return the parameters that fill `batch_table(batch)`, as JSON unless it is overridden."""
        return {"batch": json.dumps([list(row) for row in rows], ensure_ascii=False, default=self._in_json)}

    def _in_json(self, value: Any) -> Any:
        # bytes such as a queue's name in a row written by SQL; no text is equal to them
        return value.decode(errors="replace") if isinstance(value, bytes) else self._time_in_json(value)

    def texts(self) -> FromClause:
        """Return a table of the texts given as the parameter `texts`: `value`, and `place` in their order."""
        raise NotImplementedError

    def joined(self, texts: Sequence[str]) -> str | None:
        """Return the parameter that fills `texts()`; None where it cannot hold these texts."""
        return json.dumps(texts, ensure_ascii=False)

    def move(
        self,
        conn: Connection,
        batch: Batch,
        rows: RawRows,
        target: Table,
        *,
        waits: bool = False,
    ) -> set[Right]:
        """Move the jobs that their owner still holds into `target`, with the batch's own columns; return the
        rights to them. With `waits`, wait for rows that another transaction has locked."""
        parameters = self.batch_parameters(batch, rows)
        moved = rights(conn.execute(_copy_fenced(self, batch, target), parameters))
        if moved:
            conn.execute(_delete_fenced(self, batch), parameters)
        return moved

    def lock_key(self, conn: Connection, id: int) -> None:
        """Lock the unique key of a job in the transaction of its handler, before that locks the job. Where a
        producer locks a key before the job that has it, both then do so in one order."""


@cache
def _query_of_one(query: RowQuery, batch: Batch) -> Select[Any]:
    return query({name: bindparam(name, type_=kind) for name, kind in batch.columns.items()})


def distinct(
    sql: Sql, columns: Sequence[Any], limit: int, equal: Values = NO_VALUES, *, newest: bool = False
) -> Select[Any]:
    """Return a query of the different values of the first columns of the index of errors, one probe for each.
    Some may be `equal` to a value. With `newest` it has the last id of each, the next column of the index."""
    table = columns[0].table
    ids = [table.c.id] if newest else []
    where = [table.c[name] == value for name, value in equal.items()]
    if sql.scans_loosely:
        query = select(*columns, *map(func.max, ids)).where(*where).group_by(*columns).order_by(*columns)
        hint = "FORCE INDEX FOR GROUP BY (failed_jobs_error)"
        return query.limit(limit).with_hint(table, hint, "mariadb")
    order = [column.desc() for column in (*columns, *ids)]
    values = select(literal(1).label("place"), *columns, table.c.id).where(*where).order_by(*order).limit(1)
    each = select(values.subquery()).cte("each_value", recursive=True)
    # A probe for each column. By a comparison of rows SQLite would read all those of the last value.
    # PostgreSQL would find no place in the index where one of the columns is an equation.
    free = [column for column in columns if column.name not in equal]
    probes = (
        select(table.c.id)
        .where(*(same == each.c[same.name] for same in free[:i]), free[i] < each.c[free[i].name], *where)
        .correlate(each)
        .order_by(*order)
        .limit(1)
        .scalar_subquery()
        for i in reversed(range(len(free)))
    )
    row = table.alias("next_row")
    following = select(each.c.place + 1, *(row.c[column.name] for column in columns), row.c.id)
    is_next = row.c.id == func.coalesce(*probes, 0, 0)  # no job has the id 0
    each = each.union_all(following.join_from(each, row, is_next).where(each.c.place < limit))
    return select(*(each.c[column.name] for column in (*columns, *ids)))


def portions(sql: Sql, rows: Sequence[T], texts: Callable[[T], Iterable[Any]]) -> Iterator[Sequence[T]]:
    """Divide rows with such texts into portions that one statement takes."""
    begin = size = 0
    limit = sql.max_characters or 0
    for i, row in enumerate(rows if limit else ()):
        own = sum(len(text) for text in texts(row) if isinstance(text, str))
        # guard: statement-fits-its-packet
        if size + own > limit and i > begin:
            yield rows[begin:i]
            begin, size = i, 0
        size += own
    if rows:
        yield rows[begin:]


def fenced(sql: Sql, batch: Batch, *columns: Expression) -> Select[Any]:
    """Select the jobs of a batch that their owner still holds, with the batch's own columns and more. Ids
    ascend, so that two batches cannot deadlock."""
    rows = sql.batch_table(batch)
    return (
        select(jobs.c.id, *(rows.c[name] for name in batch.own), *columns)
        .join_from(rows, jobs, jobs.c.id == rows.c.id)
        .where(*fence(rows))
        .order_by(jobs.c.id)
    )


def fence(rows: FromClause) -> Sequence[Condition]:
    """Return the fence of every owner's write: the row is reserved, and under the owner's token."""
    return (jobs.c.lease_token == rows.c.token, jobs.c.reserved_at.is_not(None))  # guard: settle-is-fenced


@cache
def _copy_fenced(sql: Sql, batch: Batch, target: Table) -> ReturningInsert[Any]:
    fenced_rows = locked(fenced(sql, batch))
    source = select(*(jobs.c[name] for name in CARRIED), *batch.carried(fenced_rows)).join_from(
        fenced_rows, jobs, jobs.c.id == fenced_rows.c.id
    )
    return (
        insert(target)
        .from_select([*CARRIED, *batch.extra], source)
        .returning(target.c.id, target.c.lease_token)
    )


@cache
def _delete_fenced(sql: Sql, batch: Batch) -> Delete:
    return delete(jobs).where(jobs.c.id.in_(select(locked(fenced(sql, batch)).c.id)))
