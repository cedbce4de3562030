"""MariaDB: two statements where PostgreSQL needs one, and every row found by its primary key.

InnoDB locks each row that a statement reads, not only those that it returns. So a statement that locks reads
no other rows, whatever the size of the table is: by an index that holds only these, or by their ids in
ascending order. The statements name the index, since for a small table the planner prefers to read all of it.
"""

from __future__ import annotations

import json
import re
import select as select_module
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, TypeVar

from sqlalchemy import (
    URL,
    BigInteger,
    ColumnElement,
    Connection,
    Engine,
    Select,
    Table,
    bindparam,
    delete,
    event,
    func,
    insert,
    literal_column,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.dialects import mysql
from sqlalchemy.dialects.mysql.mariadb import MariaDBDialect
from sqlalchemy.engine import ExceptionContext, result_tuple
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql import operators, visitors
from sqlalchemy.sql.elements import BindParameter
from sqlalchemy.sql.selectable import FromClause, Subquery
from sqlalchemy.types import Double, Integer

from sqlq.config.constants import LOOP_LONGEST_ANSWER_SECONDS
from sqlq.config.urls import masked
from sqlq.database.batch import NO_VALUES, Batch, Change, Key, Right
from sqlq.database.dialect import CLAIMED, Dialect, held, schema_of
from sqlq.database.idle import look_at_idle
from sqlq.database.mariadb import compiler, health, sql
from sqlq.database.timeouts import Patience, bound
from sqlq.database.values import (
    Ask,
    Backlog,
    Claimant,
    ClaimOrder,
    LookWanted,
    QueuePosition,
    Trouble,
    Verdict,
)
from sqlq.errors import UnsupportedDatabaseError
from sqlq.schema import qualify, version
from sqlq.schema.tables import CARRIED, TOKEN_SCHEMA, failed_jobs, finished_jobs, jobs
from sqlq.schema.types import Moment, naive

T = TypeVar("T")

BEGINS = "sqlq_begins"
"""The execution option of connections whose statements are transactions of several."""
LOCK_WAIT_SECONDS = 5
MOST_CHARACTERS = 3_500_000
"""The most that the texts of one statement may have. Each takes at most four bytes there, and a packet has
16 MiB."""
_ROLLED_BACK = {1213, 1020, 1205, 1305}
"""Deadlock; a row that changed since the snapshot (innodb_snapshot_isolation); timeout of a wait for a
lock; a savepoint that went with its transaction."""
_READ_ONLY = {1290, 1792, 1836}
_NO_ROOM = {3, 1021, 1026, 1030, 1041, 1114}
_LOST = {
    0,
    1053,
    1077,
    1079,
    1080,
    1152,
    1158,
    1159,
    1160,
    1161,
    1184,
    1927,
    2006,
    2013,
    2014,
    2045,
    2055,
    4031,
}
_AWAY = {*_LOST, 1040, 1047, 1129, 1135, 1203, 2001, 2002, 2003, 2004, 2005, 2012, *_READ_ONLY, *_NO_ROOM}
_USELESS = {*_LOST, *_READ_ONLY, 1047}
"""The server may lead to another one by now: the next connection finds it."""


def _met(key: str) -> str:
    """Return the key of the row that an insert met. Without an assignment in front of it, MariaDB would read
    the variable before it inserts, or take an unknown one for NULL."""
    return f"IF(`{key}` IS NULL, @sqlq_met_{key} := 0, @sqlq_met_{key})"


class MariaDB(Dialect):
    name, title = "mariadb", "MariaDB"
    oldest = (10, 11)
    has_schemas = schemas_are_databases = True
    own_paramstyle = "format"
    # an index of it has the rows of several partial ones
    own_indexes = Dialect.own_indexes - {
        *("jobs_rescue", "jobs_admitted", "finished_jobs_expire", "failed_jobs_expire")
    } | {"jobs_live_key"}
    correlates_in_from = False
    burden, indexes = staticmethod(health.burden), staticmethod(health.indexes)
    single_changes = False
    drivers = ("pymysql", "MySQLdb", "asyncmy")
    where_it_leads = "SELECT DATABASE()"
    which_server = "SELECT DATABASE(), @@server_uid"
    changes_tables_in_transactions = False
    open_transactions = "information_schema.innodb_trx (by trx_started)"
    # A row that the insert met has left its id in the variable.
    is_new = literal_column(f"NOT ({_met('id')} <=> id)")

    def for_parameters(self, style: Any) -> Any:
        return qualify.qualified(MariaDBDialect(paramstyle=style))

    # -- writing ---------------------------------------------------------------------------------------------

    def insert_or_skip(
        self,
        table: Table,
        key: Key,
        values: Mapping[str, Any] = NO_VALUES,
        *,
        returning: Sequence[ColumnElement[Any]] = (),
    ) -> Any:
        statement = mysql.insert(table).values(**values)
        (row,) = table.primary_key
        name = next(column.name for column in table.columns if column is not row)
        met = text(f"IF((@sqlq_met_{row.name} \\:= `{row.name}`) IS NULL, `{name}`, `{name}`)")
        statement = statement.on_duplicate_key_update({name: met})
        return statement.returning(*returning, _kept(row)) if returning else statement

    def insert_or_change(
        self,
        table: Table,
        key: Key,
        values: Mapping[str, Any],
        changes: Callable[[Any], Mapping[str, Any]],
        *,
        where: ColumnElement[bool] | None = None,
        returning: Sequence[ColumnElement[Any]] = (),
    ) -> Any:
        statement = mysql.insert(table).values(**values)
        (row,) = table.primary_key
        changed = dict(changes(statement.inserted))
        if where is not None:
            changed = {name: func.if_(where, value, table.c[name]) for name, value in changed.items()}
        if returning:
            name = next(iter(changed))
            met: Any = literal_column(f"(@sqlq_met_{row.name} := `{row.name}`)")
            changed[name] = func.if_(met.is_(None), changed[name], changed[name])
        statement = statement.on_duplicate_key_update(changed)
        if not returning:
            return statement
        return statement.returning(*returning, _kept(row) if where is None else or_(_kept(row), where))

    def kept(self, rows: Sequence[Any]) -> Sequence[Any]:
        return [row[:-1] for row in rows if row[-1]]

    def met(self, conn: Connection, rows: Sequence[Any], query: Select[Any]) -> Sequence[Any]:
        ids = [row.id for row in rows if not row[-1]]
        if not ids:
            return ()
        # the insert has locked them, and they may be newer than the caller's snapshot
        by_id = query.where(jobs.c.id.in_(ids)).with_hint(jobs, "FORCE INDEX (PRIMARY)", "mariadb")
        return conn.execute(by_id.with_for_update()).all()

    def distinct(
        self,
        among: ColumnElement[bool],
        *columns: ColumnElement[Any],
        after: ColumnElement[Any] | None = None,
        where: Sequence[ColumnElement[bool]] = (),
    ) -> Select[Any]:
        comparison: Any = among
        leading = comparison.left
        if comparison.operator is operators.eq:  # then the planner would sort all rows by the other columns
            where = (leading >= comparison.right, leading <= comparison.right, *where)
        else:
            where = (among, *where)
        order = (leading, *columns)
        query = select(*columns).where(*where).group_by(*order).order_by(*order)
        return query if after is None else query.where(columns[-1] > after)

    def missing_grant(self, error: BaseException, url: URL | None, kind: str | None) -> str | None:
        return health.missing_grant(error, kind)

    def lock(
        self, conn: Connection, query: Select[Any], parameters: Any = None, *, waits: bool = False
    ) -> Sequence[Any]:
        locking, ids = _locking(query, waits), None
        if locking.chooses is not None:
            ids = list(conn.scalars(locking.chooses, parameters))
            if not ids:
                return []
            parameters = {**(parameters or {}), "sqlq_ids": sorted(ids)}
        rows = conn.execute(locking.locks, parameters).all()
        if ids is None or locking.place is None:
            return rows
        order = {id: place for place, id in enumerate(ids)}
        return sorted(rows, key=lambda row: order[row[locking.place]])

    def change(self, conn: Connection, change: Change, parameters: Any = None) -> Sequence[Any]:
        plan = _plan(self, change)
        rows = self.lock(conn, plan.chosen, parameters, waits=plan.waits)
        if not rows:
            return []
        ids = {"sqlq_ids": sorted(row[0] for row in rows)}
        given = {**(parameters or {}), **ids}
        if plan.given is not None:
            some = [row[: len(plan.given.columns)] for row in sorted(rows, key=lambda row: row[0])]
            given |= self.batch_parameters(plan.given, some)
        if plan.changes is None:
            self.delete(conn, next(iter(change.table.primary_key)), ids["sqlq_ids"])
        else:
            conn.execute(plan.changes, {name: given[name] for name in plan.takes})
        if plan.returns is not None:
            return conn.execute(plan.returns, ids).all()
        return [plan.row(row[plan.returned_from :]) for row in rows]

    def delete(
        self, conn: Connection, column: Any, values: Sequence[Any], *where: ColumnElement[bool]
    ) -> None:
        if where:  # whose subqueries would lock the rows that they read
            values = conn.scalars(select(column).where(column.in_(values), *where)).all()
        if values:
            batch, statement = _deletion(self, column)
            conn.execute(statement, self.batch_parameters(batch, [(value,) for value in sorted(values)]))

    def move(
        self,
        conn: Connection,
        batch: Batch,
        rows: Sequence[Sequence[Any]],
        target: Table,
        *,
        waits: bool = False,
    ) -> set[Right]:
        copy, query = _copy(self, batch, target)
        mine = self.lock(conn, query, self.batch_parameters(batch, rows), waits=waits)
        rights = {(row[0], row[-1]) for row in mine}
        if rights:
            conn.execute(
                copy, self.batch_parameters(batch, [row for row in rows if tuple(row[:2]) in rights])
            )
            self.delete(conn, jobs.c.id, [id for id, _ in rights])
        return rights

    # -- claim -----------------------------------------------------------------------------------------------

    def claim(
        self, ask: Ask, schema: str | None, names: Sequence[str], limit: int, by: Claimant, order: ClaimOrder
    ) -> list[Sequence[Any]]:
        first = _due(schema, newest_first=order == "newest")
        at_level = _due(schema, given_level=True, newest_first=order == "newest")
        due: list[Sequence[Any]] = []
        for name in names:
            if len(due) < limit:
                due += _due_in_one(ask, schema, (first, at_level), name, limit - len(due))
        return _reserved(ask, schema, due, by)

    def claim_beyond(
        self, ask: Ask, schema: str | None, positions: Sequence[QueuePosition], limit: int, by: Claimant
    ) -> list[Sequence[Any]]:
        statement = _due(schema, given_level=True, beyond=True)
        due: list[Sequence[Any]] = []
        for queue, priority, due_us, id in positions:
            if len(due) < limit:
                at = _time(due_us)
                due += ask(statement, (queue, priority, at, at, id, limit - len(due)))
        return _reserved(ask, schema, due, by)

    def due_in(self, ask: Ask, schema: str | None, names: Sequence[str] | None) -> list[Sequence[Any]]:
        if names is not None and not names:
            return []
        return ask(sql.due_in(schema, None if names is None else len(names)), tuple(names or ()))

    def look(
        self, ask: Ask, schema: str | None, names: Sequence[str] | None, wanted: LookWanted
    ) -> list[Sequence[Any]]:
        due = [(*row, *[None] * 8) for row in self.due_in(ask, schema, names)]
        services = (wanted.maintenance,) * 3
        given = (wanted.hosts_within_ms, wanted.hosts_within_ms, *services, *wanted.workers)
        return [*due, *ask(sql.look(schema, len(wanted.workers)), given)]

    # -- batches ---------------------------------------------------------------------------------------------

    def batch_table(self, batch: Batch) -> FromClause:
        columns = ", ".join(
            f"`{name}` {_json_type(kind)} PATH '$[{i}]'"
            for i, (name, kind) in enumerate(batch.columns.items())
        )
        return _json_table("batch", columns, batch.columns)

    def portions(self, rows: Sequence[T], texts: Callable[[T], Iterable[Any]]) -> Iterable[Sequence[T]]:
        begin, size = 0, 0
        for i, row in enumerate(rows):
            own = sum(len(text) for text in texts(row) if isinstance(text, str))
            # guard: a-statement-fits-its-packet
            if size + own > MOST_CHARACTERS and i > begin:
                yield rows[begin:i]
                begin, size = i, 0
            size += own
        yield rows[begin:]

    def batch_parameters(self, batch: Batch, rows: Sequence[Sequence[Any]]) -> dict[str, Any]:
        return {"batch": json.dumps([list(row) for row in rows], ensure_ascii=False, default=_in_json)}

    def texts(self) -> FromClause:
        columns = f"place FOR ORDINALITY, value {_TEXT} PATH '$'"
        return _json_table("texts", columns, {"place": Integer, "value": mysql.LONGTEXT})

    def joined(self, texts: Sequence[str]) -> str | None:
        return json.dumps(texts, ensure_ascii=False)

    # -- unblock ---------------------------------------------------------------------------------------------

    def unblock(
        self, ask: Ask, schema: str | None, ids: Sequence[int], *, are_steps: bool, most: int, reason: str
    ) -> Verdict:
        steps = list(ids)
        if not are_steps:
            steps = [id for (id,) in ask(f"{sql.waiting_for(schema, _list(ids))} LIMIT {most}", ())]
        rows = ask(sql.verdict(schema, _list(steps)), ()) if steps else []
        judged = {id: bool(never) for id, never in rows}
        locked = [id for (id,) in ask(sql.lock_steps(schema, _list(judged)), ())] if judged else []
        free = [id for id in locked if not judged[id]]
        cancelled = [id for id in locked if judged[id]]
        if free:
            ask(sql.wake(schema, _list(free)), ())
            ask(sql.free(schema, _list(free)), ())
        if cancelled:
            copy, remove = sql.cancel(schema, _list(cancelled))
            ask(copy, (reason,))
            ask(remove, ())
        return Verdict(len(steps), free, cancelled)

    def waiting_for(self, ask: Ask, schema: str | None, ended: Sequence[int]) -> list[int]:
        return [id for (id,) in ask(sql.waiting_for(schema, _list(ended)), ())] if ended else []

    def waiting_for_recent(self, ask: Ask, schema: str | None, within_ms: int) -> list[int]:
        return [id for (id,) in ask(sql.waiting_for_recent(schema), (within_ms, within_ms))]

    def pick(
        self, conn: Connection, lines: Sequence[Backlog], served: Sequence[str] | None
    ) -> Iterable[tuple[int, str]]:
        schema, some = schema_of(conn), None if served is None else len(served)
        for line in lines:
            number = line.most
            if line.running is not None:
                taken = conn.exec_driver_sql(sql.admitted(schema), (line.key, line.running)).scalar_one()
                number = min(number, line.running - taken)
            if number > 0:
                statement = (sql.head_of_line if line.in_order else sql.first_in_line)(schema, some)
                last = line.holds if line.in_order else number
                given = (line.key, *(served or ()), last)
                for (id,) in conn.exec_driver_sql(statement, given).all():
                    yield id, line.key

    # -- transactions and trouble ----------------------------------------------------------------------------

    def limit_time(
        self, conn: Connection, *, lock_ms: int | None = None, statement_ms: int | None = None
    ) -> None:
        limits = []
        if lock_ms is not None:
            seconds = max(1, round(lock_ms / 1000))
            limits += [f"innodb_lock_wait_timeout = {seconds}", f"lock_wait_timeout = {seconds}"]
        if statement_ms is not None:
            limits.append(f"max_statement_time = {statement_ms / 1000}")
        conn.connection.info[_LIMITED] = True
        conn.exec_driver_sql(f"SET SESSION {', '.join(limits)}")

    def ends(self, url: URL, connect_seconds: int) -> dict[str, Any]:
        # PyMySQL's connections are bound afterwards; those of mysqlclient keep these timeouts
        silent = connect_seconds if "pymysql" in url.drivername else round(LOOP_LONGEST_ANSWER_SECONDS)
        timeouts = {"connect_timeout": connect_seconds, "read_timeout": silent, "write_timeout": silent}
        return {name: seconds for name, seconds in timeouts.items() if name not in url.query}

    def lock_for_migration(self, conn: Connection, schema: str | None) -> bool:
        return bool(conn.scalar(_LOCK, {"name": _lock_of(conn, schema)}))

    def unlock_for_migration(self, conn: Connection, schema: str | None) -> None:
        with suppress(DBAPIError):  # a lost session holds no lock
            conn.scalar(_UNLOCK, {"name": _lock_of(conn, schema)})

    def migrate_beside_traffic(self, conn: Connection, lock_ms: int) -> None:
        conn.detach()  # no pool gets a session with these settings
        self.limit_time(conn, lock_ms=lock_ms)

    def lock_tables(self, conn: Connection, tables: Iterable[str]) -> None:
        conn.exec_driver_sql(f"LOCK TABLES {', '.join(f'{table} WRITE' for table in tables)}")

    def refuse_standby(self, conn: Connection) -> None:
        if conn.exec_driver_sql("SELECT @@global.read_only").scalar():
            raise conn.dialect.loaded_dbapi.OperationalError(1290, "the server is read-only")

    def stricter_isolation(self, conn: Connection) -> str | None:
        level = str(conn.exec_driver_sql("SELECT @@tx_isolation").scalar())
        return None if level in ("READ-COMMITTED", "READ-UNCOMMITTED") else level.replace("-", " ")

    def refuses_newer_rows(self, conn: Connection) -> str | None:
        level = self.stricter_isolation(conn)
        if level != "REPEATABLE READ":
            return level
        # a write, and a read that locks, are of the newest rows, but for this setting of later versions
        kept = conn.exec_driver_sql("SHOW VARIABLES LIKE 'innodb_snapshot_isolation'").first()
        return level if kept is not None and kept[1] == "ON" else None  # guard: a-snapshot-that-is-kept-to

    def lock_key(self, conn: Connection, id: int) -> None:
        schema = schema_of(conn)
        key = conn.exec_driver_sql(sql.key_of(schema), (id,)).first()
        if key is not None:
            # guard: the-key-before-its-job
            conn.exec_driver_sql(sql.lock_key(schema), tuple(key)).all()

    def commits_at_once(self, pooled: Any) -> bool:
        driver = pooled.dbapi_connection
        return bool(driver.get_autocommit()) and not self.run(driver, _IN_TRANSACTION, ())[0][0]

    def has_lost_transaction(self, conn: Connection) -> bool:
        return not conn.exec_driver_sql(_IN_TRANSACTION).scalar()

    def transactional(self, conn: Connection) -> Connection:
        return conn.execution_options(**{BEGINS: True})

    def takes_single_statements(self, conn: Connection) -> bool:
        return True  # the session of each connection is set to READ COMMITTED

    def is_cut_off(self, driver: Any) -> bool:
        sock = getattr(driver, "_sock", None)
        if sock is None:
            return True
        looker = select_module.poll()
        looker.register(sock.fileno(), select_module.POLLIN)
        return bool(looker.poll(0))  # readable without a query

    def whole(self, ask: Ask, work: Callable[[Ask], T]) -> T:
        ask("BEGIN", ())
        done = work(ask)
        ask("COMMIT", ())
        return done

    def run(self, driver: Any, statement: str, parameters: Any) -> list[Sequence[Any]]:
        with driver.cursor() as cursor:
            cursor.execute(statement, parameters or None)
            return list(cursor.fetchall())

    def trouble(self, error: BaseException) -> Trouble:
        said = getattr(error, "orig", None) or error
        is_drivers = type(said).__module__.partition(".")[0] in self.drivers
        code = said.args[0] if is_drivers and said.args and isinstance(said.args[0], int) else None
        # an error without a code is the driver's own: it cannot read the answer
        lost = (
            getattr(error, "connection_invalidated", False)
            or code in _LOST
            or (is_drivers and code is None and type(said).__name__ in ("InternalError", "InterfaceError"))
        )
        return Trouble(
            is_away=code in _AWAY or lost,
            rolled_back=code in _ROLLED_BACK,
            refused=code is not None and not (code in _AWAY or lost or code in _ROLLED_BACK),
            takes_no_writes=code in _READ_ONLY or code in _NO_ROOM,
            is_useless=lost or code in _USELESS,
        )

    def is_sound(self, engine: Engine, driver: Any) -> bool:
        with driver.cursor() as cursor:
            cursor.execute(_IS_SOUND)
            return bool(cursor.fetchone()[0])

    def prepare(self, engine: Engine, patience: Patience, *, looks_at_idle: bool, plans_once: bool) -> None:
        setattr(engine.dialect, compiler.IS_OWN, True)

        # before SQLAlchemy queries the version on a first connection
        @event.listens_for(engine, "connect", insert=True)
        def _connected(dbapi_connection: Any, record: Any) -> None:
            bound(dbapi_connection, patience)
            with dbapi_connection.cursor() as cursor:
                if engine.dialect.server_version_info is None:  # a first connection, perhaps to MySQL
                    cursor.execute("SELECT VERSION()")
                    _require_mariadb(cursor.fetchone()[0], engine.url)
                cursor.execute(_SESSION)

        @event.listens_for(engine, "begin")
        def _began(conn: Connection) -> None:
            options = conn.get_execution_options()
            if options.get(BEGINS) and options.get("isolation_level") != "AUTOCOMMIT":
                conn.exec_driver_sql("BEGIN")

        @event.listens_for(engine, "checkin")
        def _rests(dbapi_connection: Any, record: Any) -> None:
            if dbapi_connection is not None and record.info.pop(_LIMITED, False):
                with dbapi_connection.cursor() as cursor:
                    cursor.execute(_SESSION)

        @event.listens_for(engine, "handle_error")
        def _failed(context: ExceptionContext) -> None:
            if context.connection is None:
                patience.start_over()
            elif self.trouble(context.original_exception).is_useless:
                context.is_disconnect = True

        if looks_at_idle:
            look_at_idle(self, engine)


_IN_TRANSACTION = "SELECT @@in_transaction"
"""The drivers' own status may be that of an earlier answer."""


def _require_mariadb(said: str, url: URL) -> None:
    found = tuple(map(int, re.findall(r"\d+", said)[:2]))
    is_mariadb = "mariadb" in said.lower()
    if not is_mariadb or found < MariaDB.oldest:
        raise UnsupportedDatabaseError(
            f"sqlq needs MariaDB {'.'.join(map(str, MariaDB.oldest))} or newer; {masked(url)} is version "
            f"{said}{'' if is_mariadb else ', and not of MariaDB'}"
        )


_LOCK, _UNLOCK = text("SELECT GET_LOCK(:name, 0)"), text("SELECT RELEASE_LOCK(:name)")


def _lock_of(conn: Connection, schema: str | None) -> str:
    """Return the name of the migrators' lock: one for each database, since the server has one for each
    name."""
    return f"sqlq migrates {version.effective_schema(conn, schema)}"


_LIMITED = "sqlq_limited"
# guard: workers-read-committed-mariadb
_SESSION = (
    "SET SESSION autocommit = 1, tx_isolation = 'READ-COMMITTED', "
    f"wait_timeout = GREATEST(@@wait_timeout, 600), lock_wait_timeout = {LOCK_WAIT_SECONDS}, "
    f"innodb_lock_wait_timeout = {LOCK_WAIT_SECONDS}, lock_wait_timeout = {LOCK_WAIT_SECONDS}, "
    "max_statement_time = 0, sql_mode = "
    "'STRICT_ALL_TABLES,ERROR_FOR_DIVISION_BY_ZERO,NO_ENGINE_SUBSTITUTION,SIMULTANEOUS_ASSIGNMENT'"
)
"""The settings of sqlq's own sessions. An UPDATE sets all its columns at once, as in standard SQL."""
# guard: a-session-stays-as-it-was-made
_IS_SOUND = "SELECT @@tx_isolation = 'READ-COMMITTED' AND @@autocommit AND NOT @@in_transaction"
"""A proxy between here and the server may have given the connection another session."""


# -- locking by primary key ----------------------------------------------------------------------------------


class _Locking:
    """How a query locks its rows: `chooses` selects their keys without a lock, if it has to look for them;
    `locks` locks them by these keys. `place` is the place of the key among the columns, if it is there."""

    def __init__(self, chooses: Select[Any] | None, locks: Select[Any], place: int | None) -> None:
        self.chooses, self.locks, self.place = chooses, locks, place


@lru_cache(maxsize=512)
def _locking(query: Select[Any], waits: bool) -> _Locking:
    table: Any = next(iter(query.selected_columns)).table
    (key,) = table.primary_key
    by_key = query.with_hint(table, "FORCE INDEX (PRIMARY)", "mariadb").with_for_update(skip_locked=not waits)
    if any(isinstance(source, Subquery) and source.name == "batch" for source in _parts(query)):
        # the rows of a batch are in the order of their ids, and find the table's by these
        return _Locking(None, by_key.order_by(None).prefix_with("STRAIGHT_JOIN"), None)
    if query._limit_clause is None and table not in _LARGE:  # noqa: SLF001 - SQLAlchemy has no other word
        return _Locking(None, by_key, None)
    ids = bindparam("sqlq_ids", expanding=True, type_=key.type)
    locks = by_key.limit(None).order_by(None).where(key.in_(ids)).order_by(key)
    names = [column.name for column in query.selected_columns]
    place = names.index(key.name) if key.name in names else None
    return _Locking(query.with_only_columns(key), locks, place)


def _parts(element: Any) -> Iterable[Any]:
    return visitors.iterate(element)


_LARGE = (jobs, finished_jobs, failed_jobs)


class _Plan:
    """How a `Change` is made: the rows are chosen and locked, then changed by their keys, then read again if
    the change writes columns that it returns."""

    def __init__(self, chosen: Select[Any], waits: bool) -> None:
        self.chosen, self.waits = chosen, waits
        self.given: Batch | None = None
        self.changes: Any = None
        self.takes: list[str] = []
        """The parameters of the changing statement, which takes no others."""
        self.returns: Any = None
        self.returned_from = 0
        self.row: Callable[[Any], Any] = tuple


@lru_cache(maxsize=512)
def _plan(dialect: MariaDB, change: Change) -> _Plan:
    table, (key,) = change.table, change.table.primary_key
    chosen: Select[Any] = (
        change.chosen if isinstance(change.chosen, Select) else select(key).where(change.chosen).order_by(key)
    )
    if change.where is not None:
        chosen = chosen.where(change.where(_Columns(chosen.selected_columns)))
    plan = _Plan(chosen, change.waits or not isinstance(change.chosen, Select))
    ids = bindparam("sqlq_ids", expanding=True, type_=key.type)
    written: set[str] = set()
    if callable(change.values):
        plan.given = Batch(**{column.name: type(column.type) for column in chosen.selected_columns})
        rows = dialect.batch_table(plan.given)
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
        plan.returned_from = len(chosen.selected_columns)
        plan.chosen = chosen.add_columns(*(c.label(f"sqlq_{i}") for i, c in enumerate(change.returning)))
        plan.row = result_tuple([str(c.key) for c in change.returning])
    return plan


class _Columns:
    """The columns that a query selects, as those of a table."""

    def __init__(self, c: Any) -> None:
        self.c = c


def _kept(row: ColumnElement[Any]) -> ColumnElement[Any]:
    return literal_column(f"NOT ({_met(row.name)} <=> `{row.name}`)")


@lru_cache(maxsize=64)
def _deletion(dialect: MariaDB, column: Any) -> tuple[Batch, Any]:
    batch = Batch(**{column.name: type(column.type)})
    rows = dialect.batch_table(batch)
    return batch, delete(column.table).where(column == rows.c[column.name])


@lru_cache(maxsize=64)
def _copy(dialect: MariaDB, batch: Batch, target: Table) -> tuple[Any, Select[Any]]:
    rows = dialect.batch_table(batch)
    source = (
        select(*(jobs.c[name] for name in CARRIED), *batch.carried(rows))
        .join_from(rows, jobs, jobs.c.id == rows.c.id)
        .prefix_with("STRAIGHT_JOIN")
        .with_hint(jobs, "FORCE INDEX (PRIMARY)", "mariadb")
    )
    copy = insert(target).from_select([*CARRIED, *batch.extra], source)
    return copy, held(dialect, batch, jobs.c.lease_token)


# -- claims --------------------------------------------------------------------------------------------------

_PLACE = {column.name: place for place, column in enumerate(CLAIMED)}
_AFTER_CLAIM = {"lease_token": sql.NEXT_TOKEN, "attempts": sql.ONE_MORE}


@lru_cache
def _due(
    schema: str | None, *, given_level: bool = False, beyond: bool = False, newest_first: bool = False
) -> str:
    """Return the statement that locks due jobs, with the columns of a claim as they are after it."""
    dialect: Any = qualify.qualified(MariaDBDialect())
    columns = [
        _AFTER_CLAIM.get(column.name)
        or re.sub(rf"`?{TOKEN_SCHEMA}`?\.", "", str(column.compile(dialect=dialect)))
        for column in CLAIMED
    ]
    said = ", ".join([*columns, "max_attempts"])
    return sql.due(schema, said, given_level=given_level, beyond=beyond, newest_first=newest_first)


def _due_in_one(
    ask: Ask, schema: str | None, statements: tuple[str, str], name: str, most: int
) -> list[Sequence[Any]]:
    at_top, at_level = statements
    due = ask(at_top, (name, name, most))
    level = due[0][_PLACE["priority"]] if due else None
    if level is None:
        ((level,),) = ask(sql.next_level(schema), (name, _ABOVE_ALL))
    while level is not None and len(due) < most:
        ((level,),) = ask(sql.next_level(schema), (name, level))
        if level is not None:
            due = [*due, *ask(at_level, (name, level, most - len(due)))]
    return due


_ABOVE_ALL = 1_000


def _reserved(
    ask: Ask, schema: str | None, due: Sequence[Sequence[Any]], by: Claimant
) -> list[Sequence[Any]]:
    """Reserve locked jobs, and return them. Rows without values of their own get those of their tasks."""
    if not due:
        return []
    claimed = [list(row[:-1]) for row in due]
    allowed: dict[str, int] = json.loads(by.max_attempts)
    follow_ups: dict[str, dict[str, str]] = json.loads(by.follow_ups or "{}")
    missing: dict[tuple[str, Any], list[int]] = {}
    for row, own in zip(claimed, due, strict=True):
        task = row[_PLACE["task"]]
        values: dict[str, Any] = {
            name: text for name, text in follow_ups.get(task, {}).items() if row[_PLACE[name]] is None
        }
        if own[-1] is None and task in allowed:
            values["max_attempts"] = allowed[task]
        for name, value in values.items():
            if value is not None:
                row[_PLACE[name]] = value
                missing.setdefault((name, value), []).append(row[0])
    sets = {
        name: " ".join(
            f"WHEN id IN ({_list(ids)}) THEN %s" for (other, _), ids in missing.items() if other == name
        )
        for name, _ in missing
    }
    given = [value for column in sets for name, value in missing if name == column]
    ask(sql.reserve(schema, _list(row[0] for row in due), sets), (by.owner, by.lease_ms, *given))
    return [tuple(row) for row in claimed]


def _list(ids: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ids)))


def _time(us: int) -> datetime:
    return datetime(1970, 1, 1) + timedelta(microseconds=us)  # noqa: DTZ001 - as the columns have it


# -- batches -------------------------------------------------------------------------------------------------

_TEXT = "LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin"


def _json_type(kind: type[Any]) -> str:
    for known, said in (
        (BigInteger, "BIGINT"),
        (Integer, "INT"),
        (Moment, "DATETIME(6)"),
        (Double, "DOUBLE"),
    ):
        if issubclass(kind, known):
            return said
    return _TEXT


def _json_table(name: str, columns: str, types: Mapping[str, Any]) -> FromClause:
    """Return a table of the rows of a JSON array, a parameter of this name."""
    rows = text(f"SELECT * FROM JSON_TABLE(:{name}, '$[*]' COLUMNS ({columns})) AS given")
    return rows.bindparams(bindparam(name, type_=mysql.LONGTEXT)).columns(**types).subquery(name)


def _in_json(value: Any) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(naive(value))
