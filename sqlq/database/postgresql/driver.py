"""Connections to PostgreSQL, and the meaning of its errors."""

from __future__ import annotations

import os
import sys
from typing import Any, cast

from sqlalchemy import URL, Connection, Engine, event, text
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg

from sqlq.config.constants import IDLE_TRANSACTION_MS
from sqlq.database.dialect import Driver
from sqlq.database.pool import is_in_transaction, is_readable
from sqlq.database.postgresql.online import sqlstate
from sqlq.database.timeouts import AnswerTimeout, bound
from sqlq.database.values import Problem, RawRows
from sqlq.schema.qualify import in_catalog

_ROLLED_BACK = {"40001", "40P01", "55P03"}
"""serialization_failure, deadlock_detected, lock_not_available"""

_LIMIT_EXCEEDED = "54000"
"""program_limit_exceeded: NOTIFY raises it when a listener in an endless transaction blocks the queue of
notifications"""

_AWAY_CLASSES = ("08", "25P03", "25P04", "53", "57P", "58")
"""connection exceptions, a transaction that was idle or open for too long, insufficient resources, operator
intervention (57P: shutdown, crash), system errors"""

_READ_ONLY = "25006"
"""A standby: the primary is elsewhere, or this server is about to become it."""

_DISK_FULL = "53100"

_USELESS = ("08", "25P03", "25P04", "57P", _READ_ONLY, "0A000")  # guard: useless-connection-is-replaced
"""A connection with such an error is useless. Its server stops, or it leads to a standby, where a new one may
lead to the primary. With feature_not_supported, a migration has changed a column that a prepared statement
returns."""


_OWN_OPTIONS = {"isolation_level": "READ COMMITTED"}  # guard: read-committed
# guard: isolated-primary-is-refused
REFUSE_STANDBY = """
DO $$ BEGIN
  IF pg_catalog.current_setting('transaction_read_only') OPERATOR(pg_catalog.=) 'on' THEN
    RAISE SQLSTATE '25006' USING MESSAGE = 'the server is read-only';
  END IF;
  PERFORM pg_catalog.pg_logical_emit_message(true, 'sqlq', '');
END $$"""
"""Also writes some bytes to the log, so that its COMMIT waits for a standby where commits do. A primary that
was frozen, and woke after another was promoted, has no standby: its answer does not come."""


class PostgreSQLDriver(Driver):
    # psycopg's, because it declares the type of each parameter, which the server may not infer
    sqlalchemy = PGDialect_psycopg
    own_options = _OWN_OPTIONS
    refuses_standby = REFUSE_STANDBY
    isolation = "SELECT pg_catalog.current_setting('transaction_isolation')"
    default_isolation = "SHOW default_transaction_isolation"
    server = in_catalog("SELECT current_database(), pg_postmaster_start_time()")

    def limit_time(self, conn: Connection, of: str, ms: int) -> None:
        conn.execute(_SET, {"setting": f"{of}_timeout", "ms": str(ms)})

    def commits_at_once(self, pooled: Any) -> bool:
        is_in_autocommit = bool(getattr(pooled.dbapi_connection, "autocommit", False))
        return is_in_autocommit and not is_in_transaction(pooled.driver_connection)

    def problem(self, error: BaseException) -> Problem:
        cause = getattr(error, "orig", None) or error
        state = sqlstate(error)
        # an error without a state is the client's: it could not connect, or the connection broke
        broken = getattr(error, "connection_invalidated", False) or (
            not state and type(cause).__name__ in ("OperationalError", "InterfaceError", "ConnectionTimeout")
        )
        is_temporary = state.startswith(_AWAY_CLASSES) or state == _READ_ONLY
        rolled_back = state in _ROLLED_BACK
        return Problem(
            is_away=is_temporary or broken,
            rolled_back=rolled_back,
            refused=bool(state) and not (is_temporary or rolled_back),
            takes_no_writes=state in (_READ_ONLY, _DISK_FULL),
            only_reads=state == _READ_ONLY,
            has_no_room=state == _LIMIT_EXCEEDED,
            is_useless=state.startswith(_USELESS),
        )

    def run(self, driver: Any, statement: str, parameters: Any) -> RawRows:
        with driver.cursor() as cursor:
            options = {"prepare": True} if hasattr(driver, "prepare_threshold") else {}
            cursor.execute(statement, parameters, **options)
            return cast("RawRows", cursor.fetchall())

    def ends(self, url: URL, connect_seconds: int) -> dict[str, Any]:
        if (
            url.drivername not in ("postgresql+psycopg", "postgresql+psycopg2")
            or "service" in url.query
            or "PGSERVICE" in os.environ
        ):
            return {}
        ends = {name: value for name, value in _TCP_ENDS.items() if name not in url.query}
        if "connect_timeout" not in url.query and "PGCONNECT_TIMEOUT" not in os.environ:
            ends["connect_timeout"] = connect_seconds
        return ends

    def is_sound(self, engine: Engine, driver: Any, *, pings: bool) -> bool:
        if is_readable(driver.fileno()):
            return False
        return not pings or bool(engine.dialect.do_ping(driver))

    def prepare(self, engine: Engine, timeout: AnswerTimeout, *, plans_once: bool) -> None:
        # before SQLAlchemy queries the version on a first connection
        @event.listens_for(engine, "connect", insert=True)
        def _connected(dbapi_connection: Any, record: Any) -> None:
            bound(dbapi_connection, timeout)  # guard: every-wait-has-an-end
            _settle_in(dbapi_connection)

        # and after a caller's hooks
        @event.listens_for(engine, "connect")
        def _hooked(dbapi_connection: Any, record: Any) -> None:
            record.info[_POOLED] = not _settle_in(dbapi_connection, plans_once=plans_once)

        @event.listens_for(engine, "begin")
        def _began(conn: Connection) -> None:
            options = conn.get_execution_options()
            if conn.info.get(_POOLED) and options.get("isolation_level") == "READ COMMITTED":
                conn.exec_driver_sql(_BOUND_IDLE)  # guard: idle-transactions-end-behind-a-pooler

        if plans_once:
            event.listen(engine, "do_execute", _execute)
        _follow_hosts(engine)


def _execute(cursor: Any, statement: str, parameters: Any, context: Any) -> bool:
    """Prepare a statement that is a transaction by itself: on these connections each has one text."""
    prepares = cursor.connection.autocommit and hasattr(cursor.connection, "prepare_threshold")
    if prepares:
        cursor.execute(statement, parameters, prepare=True)
    return bool(prepares)


_HOST = "sqlq_host"
"""The key under which a pooled connection keeps its host and port."""


def _follow_hosts(engine: Engine) -> None:
    """Try the host of the last connection first, and one whose connection broke last.

    libpq tries them as they are listed. One that is frozen takes the whole connect timeout, for each
    connection anew, before the next one has its turn.
    """
    order: list[tuple[str, str]] = []

    def move(host: tuple[str, str] | None, *, first: bool) -> None:
        if host in order:
            # in one step: other threads read the list, and move hosts
            order[:] = sorted(order, key=lambda each: (each == host) != first)

    @event.listens_for(engine, "do_connect")
    def arrange(dialect: Any, record: Any, arguments: Any, parameters: dict[str, Any]) -> None:
        hosts = str(parameters.get("host", "")).split(",")
        if len(hosts) == 1 or not parameters.keys().isdisjoint(("hostaddr", "load_balance_hosts")):
            return
        ports = str(parameters.get("port", "")).split(",")
        if not order:
            order[:] = zip(hosts, ports * len(hosts) if len(ports) == 1 else ports, strict=False)
        names, numbers = (",".join(each) for each in zip(*order, strict=True))
        parameters["host"] = names
        if "port" in parameters:  # guard: missing-port-is-left-to-libpq
            parameters["port"] = numbers

    @event.listens_for(engine, "connect")
    def note(connection: Any, record: Any) -> None:
        if order:
            host, port = connection.info.host, str(connection.info.port)
            record.info[_HOST] = (host, port if (host, port) in order else "")
            move(record.info[_HOST], first=True)  # guard: the-host-that-answers-is-first

    @event.listens_for(engine, "invalidate")
    def leave(connection: Any, record: Any, error: Any) -> None:
        move(record.info.pop(_HOST, None), first=False)  # guard: a-lost-host-is-tried-last


ONLY_ON_REQUEST = sys.maxsize
"""The number of runs after which psycopg prepares a statement by itself: never. See `Driver.prepare`."""


def leads_to_one_server(driver: Any) -> bool:
    """Whether a psycopg connection ends at the server process that takes its statements.

    A pooler such as PgBouncer in transaction mode passes statements to any process. The process may never
    have prepared them, or another of the same name. It gives its clients a process number of its own, to find
    the target of a cancel request.
    """
    return bool(_at_once(driver, in_catalog("SELECT pg_backend_pid()")) == driver.info.backend_pid)


def _settle_in(driver: Any, *, plans_once: bool = False) -> bool:
    """Make a connection's session as sqlq needs it, whatever the URL, the environment, the role, the database
    or a caller's hook has set. Return whether it leads to one server process."""
    if hasattr(driver, "set_client_encoding"):  # psycopg2 does not see the setting change
        driver.set_client_encoding("UTF8")
    prepares = getattr(driver, "prepare_threshold", None) is not None  # psycopg 3, if its user permits it
    # some poolers keep a server process for a client that sets anything
    followed = {
        name: value for name, value in _FOLLOWED.items() if driver.info.parameter_status(name) != value
    }
    own = followed | _OF_SESSION
    if driver.info.server_version >= 170000:
        own["transaction_timeout"] = "0"
    if plans_once and prepares:
        own |= _PLAN_ONCE
    # guard: statements-end-with-their-client
    checks = _CHECKS_CLIENT if driver.info.server_version >= 140000 else "NULL"
    statement = (
        f"SELECT CASE WHEN pg_backend_pid() = {driver.info.backend_pid} "
        f"THEN concat({checks}, {_set(own)}) IS NOT NULL ELSE {_set(followed)} IS NULL END"
    )
    direct = bool(_at_once(driver, in_catalog(statement)))  # guard: own-sessions-have-own-settings
    if prepares:
        # guard: nothing-prepared-through-a-pooler
        driver.prepare_threshold = ONLY_ON_REQUEST if direct else None
    return direct


def _at_once(driver: Any, statement: str) -> Any:
    """Run a statement outside any transaction, and return its value."""
    autocommit, driver.autocommit = driver.autocommit, True
    with driver.cursor() as cursor:
        cursor.execute(statement)
        (value,) = cursor.fetchone()
    driver.autocommit = autocommit
    return value


def _set(settings: dict[str, str]) -> str:
    calls = [f"set_config('{name}', '{value}', false)" for name, value in settings.items()]
    return f"concat({', '.join(calls) or 'NULL'})"


_POOLED = "sqlq_pooled"
_FOLLOWED = {
    "client_encoding": "UTF8",
    "DateStyle": "ISO, MDY",
    "TimeZone": "UTC",
    "standard_conforming_strings": "on",
}
"""The settings that a pooler follows, and gives each server process before a client's transaction."""
_IDLE = "idle_in_transaction_session_timeout"
_OF_SESSION = {
    _IDLE: str(IDLE_TRANSACTION_MS),  # guard: idle-transactions-end
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_session_timeout": "0",
    "array_nulls": "on",
}
# A server of another system may refuse it.
_CHECKS_CLIENT = """set_config('client_connection_check_interval',
    CASE WHEN strpos(version(), '-linux') > 0 THEN '2s' ELSE '0' END, false)"""
_BOUND_IDLE = f"SET LOCAL {_IDLE} = {IDLE_TRANSACTION_MS}"
_PLAN_ONCE = {
    "plan_cache_mode": "force_generic_plan",
    # a plan for any LIMIT expects many rows, so PostgreSQL would JIT-compile it each time
    **dict.fromkeys(("enable_seqscan", "enable_bitmapscan", "enable_sort", "jit"), "off"),
}


_TCP_ENDS = {
    "keepalives_idle": 10,
    "keepalives_interval": 3,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}
"""The connection detects a lost host within 20 s when idle, and within 10 s after a send. On systems without
one of these options libpq ignores it."""
_SET = text("SELECT pg_catalog.set_config(:setting, :ms, true)")
