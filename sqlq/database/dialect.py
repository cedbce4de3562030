"""The differences between databases, each a method of `Dialect`.

A database has to write `claim`, `look`, `unblock`, `pick` and its tables of a batch itself. The other methods
have a default, which needs RETURNING, UPDATE … FROM, ON CONFLICT and common table expressions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

from sqlalchemy import (
    URL,
    Connection,
    Delete,
    Engine,
    Integer,
    Select,
    Table,
    delete,
    insert,
    literal_column,
    null,
    select,
    text,
)
from sqlalchemy.sql.dml import ReturningInsert
from sqlalchemy.sql.selectable import FromClause

from sqlq.database import blocked, steps
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
from sqlq.database.timeouts import Patience
from sqlq.database.values import (
    Ask,
    Backlog,
    Claimant,
    ClaimRequest,
    LookWanted,
    RawRows,
    Trouble,
    Verdict,
)
from sqlq.payload.encryption import Encryption
from sqlq.schema.qualify import qualified
from sqlq.schema.tables import CARRIED, INDEXES, TOKEN_SCHEMA, jobs

T = TypeVar("T")


def schema_of(conn: Connection) -> str | None:
    """Return the schema to which a connection of sqlq's own sends its statements."""
    schema: str | None = conn.get_execution_options()["schema_translate_map"][TOKEN_SCHEMA]
    return schema


def named(statement: str, dialect: Any, schema: str | None) -> str:
    """Return a statement written by hand, which names the token schema, for this one; None means SQLite."""
    name = dialect.identifier_preparer.quote_schema(schema) if schema else "main"
    return statement.replace(TOKEN_SCHEMA, name)


def ask_on(conn: Connection) -> Ask:
    """Return what runs statements written by hand on a connection of sqlq's own."""

    def ask(statement: str, parameters: Any) -> RawRows:
        rows = conn.exec_driver_sql(named(statement, conn.dialect, schema_of(conn)), parameters)
        # the result on a caller's connection of a driver has rows or is empty
        return list(rows) if getattr(rows, "returns_rows", True) else []

    return ask


@contextmanager
def in_schema(conn: Any, schema: str | None, seal: Encryption | None = None) -> Iterator[None]:
    """Execute the block's statements on a caller's connection as on sqlq's own: in this schema, by qualified
    names."""
    dialect, options = conn.dialect, conn._execution_options  # noqa: SLF001 - as below
    conn.dialect = qualified(dialect)
    translated = options.union({"schema_translate_map": {TOKEN_SCHEMA: schema}, SEAL: seal})
    conn._execution_options = translated  # noqa: SLF001 - the public way calls the caller's hooks
    try:
        yield
    finally:
        conn.dialect = dialect
        conn._execution_options = options  # noqa: SLF001 - as above


def seal_of(conn: Connection) -> Encryption | None:
    """Return the seal of the database of a connection of sqlq's own."""
    seal: Encryption | None = conn.get_execution_options()[SEAL]
    return seal


SEAL = "sqlq_seal"
"""The execution option of sqlq's own connections that holds the `Encryption` of their database."""


_ABOVE_ALL = 1_000
"""Above each priority."""


def listed(ids: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ids)))


class Dialect:
    """The SQL of one database; stateless, found by its name with `dialects.dialect_named`."""

    name: str
    title: str
    """Its name for people."""
    oldest: tuple[int, ...]
    """The oldest version that sqlq runs on."""
    in_a_file = False
    """Whether a database is a file, without a server, schemas and roles. Such a database gives ids again."""
    has_schemas = False
    schemas_are_databases = False
    has_kinds_of_roles = False
    """Whether `store.rights` has the rights that each kind of role needs."""
    own_paramstyle = "pyformat"
    """The style of parameters of most of its drivers."""
    begins = ""
    """The statement that begins a transaction of several statements; none where one statement does it all."""
    in_json: Callable[[Any], Any] = staticmethod(str)
    """Return a time as a batch has it in JSON."""
    own_options: Values = NO_VALUES
    """The execution options of sqlq's own connections, whose transactions are READ COMMITTED."""
    refuses_standby = ""
    """The statement that raises on a standby."""
    which_isolation = ""
    """The query for the isolation level of a transaction, where that matters."""
    which_server = ""
    """The query for the name of the database that a connection leads to, and for what is different on each
    server."""
    one_writer = False
    """Whether one transaction at a time may write, and keeps all others waiting."""
    sees_commits = False
    """Whether a connection sees another's commit without a statement, and so needs no notification."""
    claims_queues_apart = False
    """Whether a claim takes a statement for each queue."""
    locks_on_one_node = False
    """Whether a cluster may have several writers, each with row locks of its own. They see what the others
    wrote, and not what they locked."""
    claims_beyond = True
    """Whether a claim may begin at positions."""
    most_unwritten = 2_000
    """The most outcomes that may wait to be written before a worker starts no more jobs. After a crash all of
    these run again."""
    shortest_us = 1
    """The resolution of its timestamps in microseconds."""
    drivers: tuple[str, ...] = ()
    """The packages of drivers whose errors mean nothing to another database, though they look alike."""
    single_changes = True
    """Whether `change` and `move` are one statement each, and so may be transactions by themselves."""
    own_indexes = INDEXES
    """The names of the indexes of our tables."""
    correlates_in_from = True
    """Whether a subquery in FROM may refer to rows outside it."""
    notifies = False
    """Whether a notification of idle workers takes a statement, since they do not see commits by
    themselves."""
    changes_tables_in_transactions = True
    """Whether a transaction can create and change tables. Otherwise each such statement commits. Then all are
    written so that they can be repeated, and a migration that was broken off goes on."""
    builds_indexes_apart = False
    """Whether an index is built beside the traffic by a statement outside transactions."""
    open_transactions = "other programs"
    """Where an operator finds the open transactions, and by which column the oldest."""
    health: Any
    """The module with the queries about the state of its servers. `burden` returns the causes of a slow
    database, `indexes` those of our tables, and whether queries can use each. `last_id` returns the newest id
    that the database has given a job, kept or not; None where that is unknown."""
    unfit: Callable[[Connection], str | None] = staticmethod(lambda conn: None)
    """Return why this server breaks a promise of sqlq's, though it speaks like a supported one. None if it
    does not."""
    missing_grant: Callable[..., str | None] = staticmethod(lambda error, url, kind: None)
    """Return the advice for the role in a URL where an error means that it lacks a right of its kind."""
    words: Mapping[str, str]
    """The words in which the statements of `blocked` differ: functions, joins in their order, and indexes."""
    levels, lines = steps.LEVELS, staticmethod(steps.lines)
    """The statements of `steps`, as this database runs them."""
    remove_steps: str
    """Deletes the jobs with the `ids`."""
    _insert: Callable[[Table], Any]
    """The class of an insert that can skip or change rows."""
    _core: Callable[..., Any]
    """SQLAlchemy's dialect."""

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
        met = self.has_met
        if changes is None:
            statement, met = statement.on_conflict_do_nothing(**index), literal_column(str(NEW), Integer)
        else:
            changed = changes(statement.excluded)
            statement = statement.on_conflict_do_update(**index, set_=changed, where=where)
        return statement.returning(met, *returning) if returning else statement

    has_met: Expression = null()
    """Whether an `upsert` met the row and changed it, for its RETURNING; NULL where the database does not
    report that."""

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

    def run_text(self, conn: Connection, statement: str, **given: Any) -> Any:
        """Run a statement written by hand, with its parameters by name."""
        return conn.execute(text(named(statement, conn.dialect, schema_of(conn))), given)

    def for_parameters(self, style: Any) -> Any:
        """Return a dialect of SQLAlchemy's that writes statements with parameters in this style, for any
        driver."""
        return qualified(self._core(paramstyle=style))

    # -- claim -----------------------------------------------------------------------------------------------

    def claim(self, ask: Ask, wanted: ClaimRequest, by: Claimant) -> RawRows:
        """Claim due jobs of the wanted queues, and return them as `CLAIMED`, in any order.

        Queues are served in the order given. With "evenly" there is no strict order between them, so that a
        claim may take some of each. If jobs were enqueued alternately these lie together, and SQLite writes
        whole pages. Within a queue, each priority is one range of the claim index. So a claim steps over rows
        scheduled at a higher priority as a whole instead of reading them. No other worker claims a row
        meanwhile: the rows are locked, or without row locks the transaction has the database's write lock.
        """
        raise NotImplementedError

    def _due_in_one(self, ask: Ask, statements: Sequence[str], name: str, most: int, place: int) -> RawRows:
        """Return due jobs of a queue, level by level. The statements are those for the highest priority, for
        a given one, and for the next lower one; `place` is the column of the priority."""
        at_top, at_level, next_level = statements
        due = ask(at_top, (name, name, most))
        level = due[0][place] if due else ask(next_level, (name, _ABOVE_ALL))[0][0]
        while level is not None and len(due) < most:
            ((level,),) = ask(next_level, (name, level))
            if level is not None:
                due = [*due, *ask(at_level, (name, level, most - len(due)))]
        return due

    def due_in(self, ask: Ask, names: Sequence[str], after: str | None = None) -> RawRows:
        """Return `(queue, ms, place)` for each of these queues that has unreserved jobs. With `after`, also
        for the next `LARGEST_WINDOW` queues after that one.

        `ms` is the time until its next job is due; None for a paused queue. `place` counts the queues of the
        window; None for a known queue beside it.

        The first row of each priority in the claim index is the next due one. So it reads one row for each
        queue and priority.
        """
        raise NotImplementedError

    def look(self, ask: Ask, wanted: LookWanted) -> RawRows:
        """Return the rows of `due_in`, filled up with Nones, and one row more. It is `(None, ms, None,
        listens, hosts, expired, limited, asked, all_paused, pause_ms)`.

        - `ms`: the milliseconds until the next schedule is due, or None.
        - `listens`: whether this connection LISTENs to the channel; None where its server takes no writes.
        - `hosts`: the number of hosts with a heartbeat within this time.
        - With `maintenance`: whether a lease has expired, any job is under a limit.
        - The arguments of `workers.wanted`: the requests to these workers as JSON, and whether all queues are
          paused. Then the milliseconds until the next pause ends.
        """
        raise NotImplementedError

    # -- settle ----------------------------------------------------------------------------------------------

    def batch_table(self, batch: Batch) -> FromClause:
        """Return a table of the rows given as parameters, so that one statement serves batches of any
        size."""
        raise NotImplementedError

    def portions(self, rows: Sequence[T], texts: Callable[[T], Iterable[Any]]) -> Iterable[Sequence[T]]:
        """Divide rows with such texts into portions that one statement takes."""
        return (rows,) if rows else ()

    def batch_parameters(self, batch: Batch, rows: RawRows) -> dict[str, Any]:
        """Return the parameters that fill `batch_table(batch)`, as JSON unless it is overridden."""
        return {"batch": json.dumps([list(row) for row in rows], ensure_ascii=False, default=self._in_json)}

    def _in_json(self, value: Any) -> Any:
        # bytes such as a queue's name in a row written by SQL; no text is equal to them
        return value.decode(errors="replace") if isinstance(value, bytes) else self.in_json(value)

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
        moved = rights(conn.execute(_copy_held(self, batch, target), parameters))
        if moved:
            conn.execute(_delete_held(self, batch), parameters)
        return moved

    def takes_single_statements(self, conn: Connection) -> bool:
        """Whether a statement outside any transaction is one by itself, and READ COMMITTED."""
        return True

    def limit_time(
        self, conn: Connection, *, lock_ms: int | None = None, statement_ms: int | None = None
    ) -> None:
        """Limit the time of this transaction's waits for locked rows, and of its statements, if the database
        can do so."""

    def refuse_standby(self, conn: Connection) -> None:
        """Raise on a standby that may lag behind, since its rows may be out of date."""
        if self.refuses_standby:
            conn.exec_driver_sql(self.refuses_standby)

    def stricter_isolation(self, conn: Connection) -> str | None:
        """Return the transaction's isolation level if it is stricter than READ COMMITTED: one snapshot then
        serves all its statements. None where that does not matter."""
        if not self.which_isolation:
            return None
        level = str(conn.exec_driver_sql(self.which_isolation).scalar()).upper().replace("-", " ")
        return None if level in ("READ COMMITTED", "READ UNCOMMITTED") else level

    def refuses_newer_rows(self, conn: Connection) -> str | None:
        """Return the transaction's isolation level if it cannot change a row that another transaction has
        changed since its snapshot."""
        return self.stricter_isolation(conn)

    def lock_key(self, conn: Connection, id: int) -> None:
        """Lock the unique key of a job in the transaction of its handler, before that locks the job. Where a
        producer locks a key before the job that has it, both then do so in one order."""

    def has_lost_transaction(self, conn: Connection) -> bool:
        """Whether a caller's connection is outside any transaction, after an error that undid one. A database
        that refuses all statements until the rollback does not need it."""
        return False

    def commits_at_once(self, pooled: Any) -> bool:
        """Whether each write on this pooled connection commits at once: its driver has no open transaction,
        and begins none."""
        return False

    # -- unblock ---------------------------------------------------------------------------------------------

    def _written(self, statement: str, **parts: Any) -> str:
        return statement.format(**self.words, **parts)

    def unblock(self, ask: Ask, ids: Sequence[int], *, are_steps: bool, most: int, reason: str) -> Verdict:
        """Judge at most `most` blocked steps that wait for these jobs, or with `are_steps` these steps, by
        committed rows. Make a step available if all its edges hold, and cancel it if one never can.

        A step waits while a job before it is live, or has failed and may be retried for a wanted success. A
        job in no table has ended in an unknown way. A step that another transaction has locked is skipped.
        """
        steps = ids
        if not are_steps:
            waiting = self._written(blocked.WAITING_FOR, ids=listed(ids))
            steps = [id for (id,) in ask(f"{waiting} LIMIT {most}", ())]
        rows = ask(self._written(blocked.VERDICT, ids=listed(steps)), ()) if steps else []
        judged = {id: bool(never) for id, never in rows}
        mine: Iterable[int] = judged
        if judged and not self.one_writer:
            mine = [id for (id,) in ask(self._written(blocked.LOCK_STEPS, ids=listed(judged)), ())]
        free = [id for id in mine if not judged[id]]
        cancelled = [id for id in mine if judged[id]]
        if free:
            ask(self._written(blocked.WAKE, ids=listed(free)), ())
            ask(self._written(blocked.FREE, ids=listed(free)), ())
        if cancelled:
            ask(self._written(blocked.CANCEL, ids=listed(cancelled)), (reason,))
            ask(self._written(self.remove_steps, ids=listed(cancelled)), ())
        return Verdict(len(steps), free, cancelled)

    def waiting_for(self, ask: Ask, ended: Sequence[int]) -> list[int]:
        """Return the blocked steps that wait for these jobs."""
        statement = self._written(blocked.WAITING_FOR, ids=listed(ended))
        return [id for (id,) in ask(statement, ())] if ended else []

    def waiting_for_recent(self, ask: Ask, within_ms: int) -> list[int]:
        """Return the blocked steps that wait for jobs that ended within this time."""
        recent = ask(self._written(blocked.WAITING_FOR_RECENT), (within_ms, within_ms))
        return [id for (id,) in recent]

    def pick(
        self, conn: Connection, lines: Sequence[Backlog], served: Sequence[str] | None
    ) -> Iterable[Sequence[Any]]:
        """Return the jobs of these lines that may run, each with its key, and lock them where rows can be
        locked. The caller holds the locks on the keys. A job keeps its place in a paused queue, or in one not
        `served` where that is known."""
        ask, among = ask_on(conn), ""
        if served is not None:
            # guard: only-what-is-served-is-admitted
            among = f"AND queue IN ({', '.join([self.words['given']] * len(served)) or 'NULL'})"
        admitted, head, first = (
            self._written(statement, among=among)
            for statement in (blocked.ADMITTED, blocked.HEAD, blocked.FIRST)
        )
        for line in lines:
            number = line.most
            if line.running is not None:
                ((taken,),) = ask(admitted, (line.key, line.running))
                number = min(number, line.running - taken)
            if number > 0:
                statement, last = (head, line.holds) if line.in_order else (first, number)
                for (id,) in ask(statement, (line.key, *(served or ()), last)):
                    yield id, line.key

    # -- migrations ------------------------------------------------------------------------------------------

    def lock_for_migration(self, conn: Connection, schema: str | None) -> bool:
        """Try to keep other migrators out of a schema until the transaction ends, or until
        `unlock_for_migration`.

        The caller retries instead of waiting for it. A waiting statement holds a snapshot on PostgreSQL, and
        CREATE INDEX CONCURRENTLY of the lock's holder would wait for that.
        """
        raise NotImplementedError

    def migrator(self, conn: Connection, schema: str | None) -> str | None:
        """Return who holds the lock of migrations, and how to end that session; None where it is not
        known."""
        return None

    def unlock_for_migration(self, conn: Connection, schema: str | None) -> None:
        """Let other migrators in, where the lock does not end with the transaction."""

    def migrate_beside_traffic(self, conn: Connection, lock_ms: int) -> None:
        """Let no statement of a migration wait longer than this for a table, since all others would wait
        behind it."""
        self.limit_time(conn, lock_ms=lock_ms)

    def lock_tables(self, conn: Connection, tables: Iterable[str]) -> None:
        """Let no other session write to tables until the transaction ends, or they are dropped."""

    # -- connections -----------------------------------------------------------------------------------------

    def ends(self, url: URL, connect_seconds: int) -> dict[str, Any]:
        """Return the driver's arguments for timeouts of connecting and of silence, without those that the URL
        or the environment sets."""
        return {}

    # -- past SQLAlchemy -------------------------------------------------------------------------------------

    def is_cut_off(self, driver: Any) -> bool:
        """Whether the other end has closed a driver's idle connection, as far as the socket shows without a
        query."""
        return False

    def is_sound(self, engine: Engine, driver: Any) -> bool:
        """Whether a driver's connection answers, and its session is as it was made."""
        return bool(engine.dialect.do_ping(driver))

    def whole(self, ask: Ask, work: Callable[[Ask], T]) -> T:
        """Do `work` as one transaction; on some databases it is one statement."""
        if not self.begins:
            return work(ask)
        ask(self.begins, ())
        done = work(ask)
        ask("COMMIT", ())
        return done

    def run(self, driver: Any, statement: str, parameters: Any) -> RawRows:
        """Run a statement on a driver's connection and return its rows."""
        with driver.cursor() as cursor:
            cursor.execute(statement, parameters or None)
            rows: RawRows = cursor.fetchall()
            return rows

    # -- trouble ---------------------------------------------------------------------------------------------

    def trouble(self, error: BaseException) -> Trouble:
        """Return the meaning of an error of the database or its driver."""
        raise NotImplementedError

    def prepare(self, engine: Engine, patience: Patience, *, plans_once: bool) -> None:
        """Set up an engine of sqlq's own: how its transactions begin, how long they wait.

        With `plans_once`, statements prepared on its connections are planned once, for tables of any size.
        Planning a claim takes as long as running it. A plan for an empty table stays when there are a million
        rows in it, until it is analysed. So the plan may only use indexes, whose order makes sorting
        needless.
        """


def held(dialect: Dialect, batch: Batch, *columns: Expression) -> Select[Any]:
    """Select the jobs of a batch that their owner still holds, with the batch's own columns and more. Ids
    ascend, so that two batches cannot deadlock."""
    rows = dialect.batch_table(batch)
    return (
        select(jobs.c.id, *(rows.c[name] for name in batch.given), *columns)
        .join_from(rows, jobs, jobs.c.id == rows.c.id)
        .where(*fence(rows))
        .order_by(jobs.c.id)
    )


def fence(rows: FromClause) -> Sequence[Condition]:
    """Return the fence of every owner's write: the row is reserved, and under the owner's token."""
    return (jobs.c.lease_token == rows.c.token, jobs.c.reserved_at.is_not(None))  # guard: fence


@cache
def _copy_held(dialect: Dialect, batch: Batch, target: Table) -> ReturningInsert[Any]:
    found = locked(held(dialect, batch))
    source = select(*(jobs.c[name] for name in CARRIED), *batch.carried(found)).join_from(
        found, jobs, jobs.c.id == found.c.id
    )
    return (
        insert(target)
        .from_select([*CARRIED, *batch.extra], source)
        .returning(target.c.id, target.c.lease_token)
    )


@cache
def _delete_held(dialect: Dialect, batch: Batch) -> Delete:
    return delete(jobs).where(jobs.c.id.in_(select(locked(held(dialect, batch)).c.id)))
