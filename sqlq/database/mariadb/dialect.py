"""MariaDB: two statements where PostgreSQL needs one, and every row found by its primary key.

InnoDB locks each row that a statement reads, not only those that it returns. So a statement that locks reads
no other rows, whatever the size of the table is. It reads an index that holds only these, or finds them by
their ids in ascending order. The statements name the index, since for a small table the planner prefers to
read all of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from itertools import chain
from typing import Any, TypeVar

from sqlalchemy import (
    URL,
    BigInteger,
    Connection,
    Engine,
    Select,
    Table,
    bindparam,
    event,
    func,
    literal_column,
    select,
    text,
)
from sqlalchemy.dialects import mysql
from sqlalchemy.dialects.mysql.mariadb import MariaDBDialect
from sqlalchemy.exc import DBAPIError, PendingRollbackError
from sqlalchemy.sql.selectable import FromClause
from sqlalchemy.types import Boolean, Double, Integer, Text

from sqlq.config.constants import IDLE_TRANSACTION_MS, LOOP_LONGEST_ANSWER_SECONDS
from sqlq.config.urls import masked
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
)
from sqlq.database.dialect import Dialect, ask_on
from sqlq.database.idle import is_readable
from sqlq.database.mariadb import compiler, health, sql
from sqlq.database.mariadb.claims import PLACE, reserved, time_of
from sqlq.database.mariadb.locking import copying, deletion, is_met, locking, note_met, plan_of
from sqlq.database.timeouts import Patience, bound
from sqlq.database.values import (
    LARGEST_WINDOW,
    Ask,
    Claimant,
    ClaimRequest,
    LookWanted,
    RawRows,
    Trouble,
)
from sqlq.errors import UnsupportedDatabaseError
from sqlq.schema import version
from sqlq.schema.tables import INDEXES, jobs
from sqlq.schema.types import Moment, naive

T = TypeVar("T")

BEGINS = "sqlq_begins"
"""The execution option of connections whose statements are transactions of several."""
_OWN_OPTIONS = {BEGINS: True}
LOCK_WAIT_SECONDS = 5
MOST_CHARACTERS = 3_500_000
"""The most that the texts of one statement may have. Each takes at most four bytes there, and a packet has
16 MiB."""
_ROLLED_BACK = {1213, 1020, 1205, 1305}
"""Deadlock; a row that changed since the snapshot (innodb_snapshot_isolation); timeout of a wait for a
lock; a savepoint that went with its transaction."""
_NO_ID = 167
_READ_ONLY = {1290, 1792, 1836}
_REFUSE_STANDBY = """
BEGIN NOT ATOMIC IF @@global.read_only THEN
  SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = 1290, MESSAGE_TEXT = 'the server is read-only';
END IF; END"""
_NO_ROOM = {3, 1021, 1026, 1030, 1041, 1114}
_ONE_WITH_OTHERS = ("jobs_admitted", "finished_jobs_expire", "failed_jobs_expire")
"""The indexes whose rows another one has, too."""
_ENDED = {1053, 1077, 1079, 1080, 1152, 1158, 1159, 1160, 1161, 1184, 1927, 4031}
"""The server ends, or has ended the connection."""
_LOST = {0, 2006, 2013, 2014, 2045, 2055, *_ENDED}
_AWAY = {*_LOST, 1040, 1047, 1129, 1135, 1203, 2001, 2002, 2003, 2004, 2005, 2012, *_READ_ONLY, *_NO_ROOM}
_USELESS = {*_LOST, *_READ_ONLY, 1047}
"""The server may lead to another one by now: the next connection finds it."""


_TEXT = "LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin"


class MariaDB(Dialect):
    name, title = "mariadb", "MariaDB"
    _core = MariaDBDialect
    words, remove_steps = sql.WORDS, sql.REMOVE_STEPS
    levels, lines = sql.LEVELS, staticmethod(sql.lines)
    oldest = (10, 11)
    has_schemas = schemas_are_databases = True
    own_paramstyle = "format"
    begins = "BEGIN"
    own_options = _OWN_OPTIONS
    refuses_standby = _REFUSE_STANDBY
    which_isolation = "SELECT @@tx_isolation"
    in_json = staticmethod(lambda moment: str(naive(moment)))
    own_indexes = INDEXES - {*_ONE_WITH_OTHERS} | {"jobs_live_key"}
    correlates_in_from = False
    health, missing_grant = health, staticmethod(health.missing_grant)
    single_changes = False
    claims_queues_apart = True
    locks_on_one_node = True
    drivers = ("pymysql", "MySQLdb", "asyncmy")
    which_server = "SELECT DATABASE(), @@server_uid"
    changes_tables_in_transactions = False
    open_transactions = "information_schema.innodb_trx (by trx_started)"

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
        new, changed_it, left = (literal_column(str(met), Integer) for met in (NEW, CHANGED, LEFT))
        # the exclusive locks of ON DUPLICATE KEY reach the next key
        if changes is None and returning:  # guard: what-is-met-is-shared
            return statement.prefix_with("IGNORE").returning(new, *returning)
        (row,) = table.primary_key
        changed = {} if changes is None else dict(changes(statement.inserted))
        if where is not None:
            changed = {name: func.if_(where, value, table.c[name]) for name, value in changed.items()}
        same = next(column for column in table.c if column is not row and column.name not in changed)
        if not returning:
            return statement.on_duplicate_key_update({same.name: same, **changed})
        changed[same.name] = func.if_(literal_column(note_met(row.name), Text).is_(None), same, same)
        has_met = literal_column(is_met(row.name), Boolean)
        met: Any = changed_it if where is None else func.if_(where, changed_it, left)
        met = func.if_(has_met, met, new)
        return statement.on_duplicate_key_update(changed).returning(met, *returning)

    def newest(self, query: Select[Any]) -> Select[Any]:
        has_key = literal_column("live_key") == jobs.c.unique_key
        by_key = query.where(has_key).with_hint(jobs, "FORCE INDEX (jobs_live_key)", "mariadb")
        # a snapshot may be older; guard: who-was-met-is-read-anew
        return by_key.prefix_with("STRAIGHT_JOIN").with_for_update(read=True)

    def lock(
        self, conn: Connection, query: Select[Any], parameters: Any = None, *, waits: bool = False
    ) -> Sequence[Any]:
        way, ids = locking(query, waits), None
        if way.chooses is not None:
            ids = list(conn.scalars(way.chooses, parameters))
            if not ids:
                return []
            parameters = {**(parameters or {}), "sqlq_ids": sorted(ids)}
        rows = conn.execute(way.locks, parameters).all()
        if ids is None or way.place is None:
            return rows
        order = {id: place for place, id in enumerate(ids)}
        return sorted(rows, key=lambda row: order[row[way.place]])

    def change(self, conn: Connection, change: Change, parameters: Any = None) -> Sequence[Any]:
        plan = plan_of(self, change)
        rows = self.lock(conn, plan.chosen, parameters, waits=plan.waits)
        if not rows:
            return []
        ids = {"sqlq_ids": sorted(row[0] for row in rows)}
        given = {**(parameters or {}), **ids}
        if plan.given is not None:
            some = [row[: len(plan.given.columns)] for row in sorted(rows, key=lambda row: row[0])]
            given |= self.batch_parameters(plan.given, some)
        if plan.changes is None:
            self.delete(conn, change.key, ids["sqlq_ids"])
        else:
            conn.execute(plan.changes, {name: given[name] for name in plan.takes})
        if plan.returns is not None:
            return conn.execute(plan.returns, ids).all()
        return [plan.row(row[plan.returned_from :]) for row in rows]

    def delete(self, conn: Connection, column: Any, values: Sequence[Any], *where: Condition) -> None:
        if where:  # whose subqueries would lock the rows that they read
            values = conn.scalars(select(column).where(column.in_(values), *where)).all()
        if values:
            batch, statement = deletion(self, column)
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
        copy, query = copying(self, batch, target)
        mine = self.lock(conn, query, self.batch_parameters(batch, rows), waits=waits)
        rights = {(row[0], row[-1]) for row in mine}
        if rights:
            conn.execute(
                copy, self.batch_parameters(batch, [row for row in rows if tuple(row[:2]) in rights])
            )
            self.delete(conn, jobs.c.id, [id for id, _ in rights])
        return rights

    # -- claim -----------------------------------------------------------------------------------------------

    def claim(self, ask: Ask, wanted: ClaimRequest, by: Claimant) -> RawRows:
        find = self._due_beyond if wanted.positions else self._due
        return reserved(ask, find(ask, wanted), by)

    def _due(self, ask: Ask, wanted: ClaimRequest) -> RawRows:
        names, limit, order, _ = wanted
        first = sql.due(newest_first=order == "newest")
        at_level = sql.due(given_level=True, newest_first=order == "newest")
        statements = (first, at_level, sql.NEXT_LEVEL)
        due: list[Any] = []
        if len(names) > 1:  # one statement for all finds those that are worth one of their own
            ready = {queue for queue, ms, _ in self.due_in(ask, names) if ms is not None and ms <= 0}
            names = [name for name in names if name in ready]
        for name in names:
            if len(due) < limit:
                due += self._due_in_one(ask, statements, name, limit - len(due), PLACE["priority"])
        return due

    def _due_beyond(self, ask: Ask, wanted: ClaimRequest) -> RawRows:
        due: list[Any] = []
        places = [
            (queue, priority, moment := time_of(due_us), moment, id)
            for queue, priority, due_us, id in wanted.positions
        ]
        if len(places) > 1:  # one statement for all finds those that are worth one of their own
            rows = ask(sql.due_beyond(len(places)), tuple(chain.from_iterable(places)))
            places = [places[i] for i in sorted(place for (place,) in rows)]
        for place in places:
            if len(due) < wanted.limit:
                due += ask(sql.due(given_level=True, beyond=True), (*place, wanted.limit - len(due)))
        return due

    def due_in(self, ask: Ask, names: Sequence[str], after: str | None = None) -> RawRows:
        if after is None and not names:
            return []
        # A loose scan cannot begin behind a queue: MariaDB would read all jobs there. So it reads all queues.
        number, given = (len(names), tuple(names)) if after is None else (None, ())
        rows = ask(sql.due_in(number), given)
        if any(queue is None for queue, _ in rows):
            ask(_REFUSE_STANDBY, None)  # guard: an-empty-look-is-a-primarys-mariadb
        beyond = [] if after is None else sorted(queue for queue, _ in rows if queue > after)
        places = {queue: place for place, queue in enumerate(beyond[:LARGEST_WINDOW], 1)}
        known = {*names}
        return [(queue, ms, places.get(queue)) for queue, ms in rows if queue in places or queue in known]

    def look(self, ask: Ask, wanted: LookWanted) -> RawRows:
        due = [(*row, *[None] * 7) for row in self.due_in(ask, wanted.names, wanted.after)]
        services = (wanted.maintenance,) * 2
        given = (wanted.hosts_within_ms, wanted.hosts_within_ms, *services, *wanted.workers)
        return [*due, *ask(sql.look(len(wanted.workers)), given)]

    # -- batches ---------------------------------------------------------------------------------------------

    def batch_table(self, batch: Batch) -> FromClause:
        columns = ", ".join(
            f"`{name}` {_json_type(kind)} PATH '$[{i}]'"
            for i, (name, kind) in enumerate(batch.columns.items())
        )
        return _json_table("batch", columns, batch.columns)

    def portions(self, rows: Sequence[T], texts: Callable[[T], Iterable[Any]]) -> Iterable[Sequence[T]]:
        begin = size = 0
        for i, row in enumerate(rows):
            own = sum(len(text) for text in texts(row) if isinstance(text, str))
            # guard: a-statement-fits-its-packet
            if size + own > MOST_CHARACTERS and i > begin:
                yield rows[begin:i]
                begin, size = i, 0
            size += own
        if rows:
            yield rows[begin:]

    def texts(self) -> FromClause:
        columns = f"place FOR ORDINALITY, value {_TEXT} PATH '$'"
        return _json_table("texts", columns, {"place": Integer, "value": mysql.LONGTEXT})

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

    def migrator(self, conn: Connection, schema: str | None) -> str | None:
        row = conn.execute(_MIGRATOR, {"name": _lock_of(conn, schema)}).one_or_none()
        if row is None:
            return None
        return f"{row[1] or 'a user'} in session {row[0]}, which KILL {row[0]} ends"

    def unlock_for_migration(self, conn: Connection, schema: str | None) -> None:
        with suppress(DBAPIError, PendingRollbackError):  # a lost session holds no lock
            conn.scalar(_UNLOCK, {"name": _lock_of(conn, schema)})

    def migrate_beside_traffic(self, conn: Connection, lock_ms: int) -> None:
        conn.detach()  # no pool gets a session with these settings
        self.limit_time(conn, lock_ms=lock_ms)

    def lock_tables(self, conn: Connection, tables: Iterable[str]) -> None:
        conn.exec_driver_sql(f"LOCK TABLES {', '.join(f'{table} WRITE' for table in tables)}")

    def refuses_newer_rows(self, conn: Connection) -> str | None:
        level = self.stricter_isolation(conn)
        if level != "REPEATABLE READ":
            return level
        # a write, and a read that locks, are of the newest rows, but for this setting of later versions
        kept = conn.exec_driver_sql("SHOW VARIABLES LIKE 'innodb_snapshot_isolation'").first()
        return level if kept is not None and kept[1] == "ON" else None  # guard: a-snapshot-that-is-kept-to

    def lock_key(self, conn: Connection, id: int) -> None:
        ask = ask_on(conn)
        for key in ask(sql.KEY_OF, (id,)):
            ask(sql.LOCK_KEY, tuple(key))  # guard: the-key-before-its-job

    def commits_at_once(self, pooled: Any) -> bool:
        driver = pooled.dbapi_connection
        return bool(driver.get_autocommit()) and not self.run(driver, _IN_TRANSACTION, ())[0][0]

    def has_lost_transaction(self, conn: Connection) -> bool:
        return not conn.exec_driver_sql(_IN_TRANSACTION).scalar()

    def is_cut_off(self, driver: Any) -> bool:
        sock = getattr(driver, "_sock", None)
        return sock is None or is_readable(sock.fileno())

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
            only_reads=code in _READ_ONLY,
            is_useless=lost or code in _USELESS,
            advice=f"{health.LAST_ID}: {health.LOWER_IDS}" if code == _NO_ID else None,
        )

    def is_sound(self, engine: Engine, driver: Any) -> bool:
        return bool(self.run(driver, _IS_SOUND, ())[0][0])

    def prepare(self, engine: Engine, patience: Patience, *, plans_once: bool) -> None:
        setattr(engine.dialect, compiler.IS_OWN, True)
        settings = [_SESSION]

        def settle_in(driver: Any, record: Any) -> None:
            driver.set_character_set("utf8mb4")  # guard: own-sessions-speak-utf8mb4
            with driver.cursor() as cursor:
                cursor.execute(", ".join(settings))

        # before SQLAlchemy queries the version on a first connection
        @event.listens_for(engine, "connect", insert=True)
        def _connected(dbapi_connection: Any, record: Any) -> None:
            bound(dbapi_connection, patience)
            dbapi_connection.use_unicode = True  # PyMySQL's, even if the URL forbids it
            is_first = engine.dialect.server_version_info is None
            if is_first:  # perhaps to MySQL, which has other settings
                ((said,),) = self.run(dbapi_connection, "SELECT VERSION()", ())
                _require_mariadb(said, engine.url)
            settle_in(dbapi_connection, record)
            if is_first and self.run(dbapi_connection, "SHOW VARIABLES LIKE 'wsrep_retry_autocommit'", ()):
                settings[1:] = [_NO_REPETITION]

        event.listen(engine, "connect", settle_in)  # after a caller's hooks

        @event.listens_for(engine, "begin")
        def _began(conn: Connection) -> None:
            options = conn.get_execution_options()
            if options.get(BEGINS) and options.get("isolation_level") != "AUTOCOMMIT":
                conn.exec_driver_sql("BEGIN")

        @event.listens_for(engine, "checkin")
        def _rests(dbapi_connection: Any, record: Any) -> None:
            if dbapi_connection is not None and record.info.pop(_LIMITED, False):
                settle_in(dbapi_connection, record)

        if engine.dialect.driver == "pymysql":
            event.listen(engine, "do_connect", lambda *given: _pymysql()(*given[2], **given[3]))


def _json_type(kind: type[Any]) -> str:
    return next((said for known, said in _TYPES.items() if issubclass(kind, known)), _TEXT)


_TYPES = {BigInteger: "BIGINT", Integer: "INT", Moment: "DATETIME(6)", Double: "DOUBLE"}


def _json_table(name: str, columns: str, types: dict[str, Any]) -> FromClause:
    """Return a table of the rows of a JSON array, a parameter of this name."""
    rows = text(f"SELECT * FROM JSON_TABLE(:{name}, '$[*]' COLUMNS ({columns})) AS given")
    return rows.bindparams(bindparam(name, type_=mysql.LONGTEXT)).columns(**types).subquery(name)


@cache
def _pymysql() -> Any:
    """Return PyMySQL's class of connections, with one TLS context for all without TLS options. Such a context
    trusts any certificate, and still loads those of the system, in 40 ms of processor time."""
    from pymysql.connections import Connection

    base: Any = Connection

    class Shared(base):  # type: ignore[misc]  # its stubs lack the method below
        context: Any = None

        def _create_ssl_ctx(self, options: Any) -> Any:
            if options:
                return super()._create_ssl_ctx(options)
            Shared.context = Shared.context or super()._create_ssl_ctx(options)
            return Shared.context

    return Shared


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


_MIGRATOR = text(
    "SELECT IS_USED_LOCK(:name), "
    "(SELECT user FROM information_schema.processlist WHERE id = IS_USED_LOCK(:name)) "
    "FROM DUAL WHERE IS_USED_LOCK(:name) IS NOT NULL"
)


def _lock_of(conn: Connection, schema: str | None) -> str:
    """Return the name of the migrators' lock: one for each database, since the server has one for each
    name."""
    return f"sqlq migrates {version.effective_schema(conn, schema)}"


_LIMITED = "sqlq_limited"
# guard: workers-read-committed-mariadb
_SESSION = (
    "SET SESSION autocommit = 1, tx_isolation = 'READ-COMMITTED', "
    "wait_timeout = GREATEST(@@wait_timeout, 600), "
    f"innodb_lock_wait_timeout = {LOCK_WAIT_SECONDS}, lock_wait_timeout = {LOCK_WAIT_SECONDS}, "
    f"idle_transaction_timeout = {IDLE_TRANSACTION_MS // 1000}, "  # guard: idle-transactions-end-mariadb
    "idle_readonly_transaction_timeout = 0, idle_write_transaction_timeout = 0, "
    "max_statement_time = 0, time_zone = '+00:00', default_storage_engine = InnoDB, completion_type = 0, "
    "sql_select_limit = 18446744073709551615, sql_safe_updates = 0, sql_big_selects = 1, "
    "sql_auto_is_null = 0, unique_checks = 1, group_concat_max_len = 1048576, sql_mode = "
    "'STRICT_ALL_TABLES,ERROR_FOR_DIVISION_BY_ZERO,NO_ENGINE_SUBSTITUTION,SIMULTANEOUS_ASSIGNMENT'"
)
"""The settings of sqlq's own sessions. An UPDATE sets all its columns at once, as in standard SQL."""
_NO_REPETITION = "wsrep_retry_autocommit = 0"
"""A node of Galera would repeat an INSERT … RETURNING that lost to another node, and return the rows of both
attempts."""
# guard: a-session-stays-as-it-was-made
_IS_SOUND = "SELECT @@tx_isolation = 'READ-COMMITTED' AND @@autocommit AND NOT @@in_transaction"
"""A proxy between here and the server may have given the connection another session."""
