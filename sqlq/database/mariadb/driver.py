"""Connections to MariaDB, the meaning of its errors, and how statements are written there."""

from __future__ import annotations

from functools import cache
from typing import Any

from sqlalchemy import URL, Connection, Engine, event
from sqlalchemy.dialects.mysql.mariadb import MariaDBDialect

from sqlq.config.constants import IDLE_TRANSACTION_MS
from sqlq.config.urls import masked
from sqlq.database.dialect import Driver
from sqlq.database.mariadb import health
from sqlq.database.pool import is_readable
from sqlq.database.timeouts import LOOPS, AnswerTimeout, bound
from sqlq.database.values import Problem
from sqlq.errors import UnsupportedDatabaseError
from sqlq.schema import qualify

BEGINS = "sqlq_begins"
"""The execution option of connections whose statements are transactions of several."""
_OWN_OPTIONS = {BEGINS: True}
LOCK_WAIT_SECONDS = 5
OLDEST = (10, 11)
_ROLLED_BACK = {1213, 1020, 1205, 1305}
"""Deadlock; a row that changed since the snapshot (innodb_snapshot_isolation); timeout of a wait for a
lock; a savepoint that went with its transaction."""
_NO_ID = 167
_READ_ONLY = {1290, 1792, 1836}
REFUSE_STANDBY = """
BEGIN NOT ATOMIC IF @@global.read_only THEN
  SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = 1290, MESSAGE_TEXT = 'the server is read-only';
END IF; END"""
_NO_ROOM = {3, 1021, 1026, 1030, 1041, 1114}
_ENDED = {1053, 1077, 1079, 1080, 1152, 1158, 1159, 1160, 1161, 1184, 1927, 4031}
"""The server ends, or has ended the connection."""
_LOST = {0, 2006, 2013, 2014, 2045, 2055, *_ENDED}
_AWAY = {*_LOST, 1040, 1047, 1129, 1135, 1203, 2001, 2002, 2003, 2004, 2005, 2012, *_READ_ONLY, *_NO_ROOM}
_USELESS = {*_LOST, *_READ_ONLY, 1047}
"""The server may lead to another one by now: the next connection finds it."""


class MariaDBDriver(Driver):
    sqlalchemy = MariaDBDialect
    packages = ("pymysql", "MySQLdb", "asyncmy")
    own_options = _OWN_OPTIONS
    begins = "BEGIN"
    refuses_standby = REFUSE_STANDBY
    isolation = "SELECT @@tx_isolation"
    # a write, and a read that locks, are of the newest rows, but for this setting of later versions
    keeps_snapshot = "SHOW VARIABLES LIKE 'innodb_snapshot_isolation'"
    in_transaction = "SELECT @@in_transaction"
    """The drivers' own status may be that of an earlier answer."""
    server = "SELECT DATABASE(), @@server_uid"

    def limit_time(self, conn: Connection, of: str, ms: int) -> None:
        limits = f"max_statement_time = {ms / 1000}"
        if of == "lock":
            seconds = max(1, round(ms / 1000))
            limits = f"innodb_lock_wait_timeout = {seconds}, lock_wait_timeout = {seconds}"
        conn.connection.info[_LIMITED] = True
        conn.exec_driver_sql(f"SET SESSION {limits}")

    def ends(self, url: URL, connect_seconds: int) -> dict[str, Any]:
        # PyMySQL's connections are bound afterwards; those of mysqlclient keep these timeouts
        silent = connect_seconds if "pymysql" in url.drivername else round(LOOPS.max_answer_seconds)
        timeouts = {"connect_timeout": connect_seconds, "read_timeout": silent, "write_timeout": silent}
        return {name: seconds for name, seconds in timeouts.items() if name not in url.query}

    def commits_at_once(self, pooled: Any) -> bool:
        driver = pooled.dbapi_connection
        return bool(driver.get_autocommit()) and not self.run(driver, self.in_transaction, ())[0][0]

    def problem(self, error: BaseException) -> Problem:
        cause = getattr(error, "orig", None) or error
        is_drivers = type(cause).__module__.partition(".")[0] in self.packages
        code = cause.args[0] if is_drivers and cause.args and isinstance(cause.args[0], int) else None
        # an error without a code is the driver's own: it cannot read the answer
        lost = (
            getattr(error, "connection_invalidated", False)
            or code in _LOST
            or (is_drivers and code is None and type(cause).__name__ in ("InternalError", "InterfaceError"))
        )
        return Problem(
            is_away=code in _AWAY or lost,
            rolled_back=code in _ROLLED_BACK,
            refused=code is not None and not (code in _AWAY or lost or code in _ROLLED_BACK),
            takes_no_writes=code in _READ_ONLY or code in _NO_ROOM,
            only_reads=code in _READ_ONLY,
            is_useless=lost or code in _USELESS,
            advice=f"{health.LAST_ID}: {health.LOWER_IDS}" if code == _NO_ID else None,
        )

    def is_sound(self, engine: Engine, driver: Any, *, pings: bool) -> bool:
        sock = getattr(driver, "_sock", None)
        if sock is None or is_readable(sock.fileno()):
            return False
        return not pings or bool(self.run(driver, _IS_SOUND, ())[0][0])

    def prepare(self, engine: Engine, timeout: AnswerTimeout, *, plans_once: bool) -> None:
        setattr(engine.dialect, _IS_OWN, True)
        settings = [_SESSION]

        def settle_in(driver: Any, record: Any) -> None:
            driver.set_character_set("utf8mb4")  # guard: own-sessions-speak-utf8mb4
            with driver.cursor() as cursor:
                cursor.execute(", ".join(settings))

        # before SQLAlchemy queries the version on a first connection
        @event.listens_for(engine, "connect", insert=True)
        def _connected(dbapi_connection: Any, record: Any) -> None:
            bound(dbapi_connection, timeout)
            dbapi_connection.use_unicode = True  # PyMySQL's, even if the URL forbids it
            is_first = engine.dialect.server_version_info is None
            if is_first:  # perhaps to MySQL, which has other settings
                ((version,),) = self.run(dbapi_connection, "SELECT VERSION()", ())
                if "mariadb" not in version.lower():
                    raise UnsupportedDatabaseError(
                        f"sqlq runs on MariaDB, and {masked(engine.url)} leads to MySQL {version}"
                    )
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
        def _returned(dbapi_connection: Any, record: Any) -> None:
            if dbapi_connection is not None and record.info.pop(_LIMITED, False):
                settle_in(dbapi_connection, record)

        if engine.dialect.driver == "pymysql":
            event.listen(engine, "do_connect", lambda *arguments: _pymysql()(*arguments[2], **arguments[3]))


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
# guard: changed-session-is-replaced
_IS_SOUND = "SELECT @@tx_isolation = 'READ-COMMITTED' AND @@autocommit AND NOT @@in_transaction"
"""A proxy between here and the server may have given the connection another session."""


_IS_OWN = "sqlq_is_own"
"""The attribute of a dialect whose connections are sqlq's own."""


class _Compiler(qualify.COMPILER):  # type: ignore[misc]  # COMPILER is Any: see there
    """Writes statements of the store so that they find the rows they change by the primary key."""

    def visit_length_func(self, function: Any, **kw: Any) -> str:
        return f"CHAR_LENGTH{self.function_argspec(function, **kw)}"

    def visit_if__func(self, function: Any, **kw: Any) -> str:
        return f"IF{self.function_argspec(function, **kw)}"

    def visit_update(self, update: Any, *args: Any, **kw: Any) -> str:
        return self._without_waits(super().visit_update(update, *args, **kw))

    def visit_delete(self, delete: Any, *args: Any, **kw: Any) -> str:
        return self._without_waits(super().visit_delete(delete, *args, **kw))

    def _without_waits(self, cause: str) -> str:
        """Write a change of rows that are locked already so that it waits for nothing. Producers lock a
        unique key before its job, workers the job before its key. So only one of them may wait. A handler
        that completes its job in a transaction of its own is no worker."""
        # guard: workers-wait-for-no-key
        is_locked = _IS_OWN in vars(self.dialect) and not self.binds.keys().isdisjoint(("sqlq_ids", "batch"))
        return f"SET STATEMENT innodb_lock_wait_timeout = 0 FOR {cause}" if is_locked else cause

    def update_tables_clause(self, update: Any, table: Any, others: Any, **kw: Any) -> str:
        tables = [self.process(each, asfrom=True, **kw) for each in (*others, table)]
        # guard: rows-are-changed-by-their-ids
        return f"{' STRAIGHT_JOIN '.join(tables)} FORCE INDEX (PRIMARY)"

    def delete_table_clause(self, delete: Any, table: Any, others: Any, **kw: Any) -> str:
        return str(self.process(table, asfrom=True, **kw))

    def delete_extra_from_clause(self, delete: Any, table: Any, others: Any, hints: Any, **kw: Any) -> str:
        return f"USING {self.update_tables_clause(delete, table, others, **kw)}"


qualify.COMPILERS["mariadb"] = _Compiler
