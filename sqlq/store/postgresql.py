"""PostgreSQL: one statement where the portable form takes several, and its own words for trouble."""

from __future__ import annotations

import select as select_module
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from sqlalchemy import (
    Connection,
    Engine,
    Integer,
    Table,
    Text,
    bindparam,
    cast,
    delete,
    event,
    func,
    insert,
    literal_column,
    select,
    text,
)
from sqlalchemy import column as sql_column
from sqlalchemy.dialects import postgresql
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import DBAPIError, DisconnectionError
from sqlalchemy.pool import ConnectionPoolEntry
from sqlalchemy.sql.dml import Insert
from sqlalchemy.sql.selectable import FromClause

from sqlq.schema.rules import LARGEST_TOKEN, MOST_COUNTED
from sqlq.schema.tables import CARRIED, TOKEN_SCHEMA, jobs
from sqlq.store.dialect import (
    NO_OPTIONS,
    Ask,
    Batch,
    Dialect,
    Line,
    Place,
    Position,
    Right,
    Verdict,
    claimed_columns,
    held,
    rights,
)
from sqlq.store.driver import RESTS_SINCE
from sqlq.store.patience import Patience, bound

_ROLLED_BACK = {"40001", "40P01", "55P03"}
"""serialization_failure, deadlock_detected, lock_not_available"""

_LIMIT_EXCEEDED = "54000"
"""program_limit_exceeded: so says NOTIFY, when a listener in a transaction without end keeps the
notifications from going"""

_AWAY_CLASSES = ("08", "53", "57P", "58")
"""connection exceptions, insufficient resources, operator intervention (57P: shutdown, crash), system
errors"""

_READ_ONLY = "25006"
"""A standby: the primary is elsewhere, or about to be here."""

_DISK_FULL = "53100"

_USELESS = ("08", "57P", _READ_ONLY, "0A000")  # guard: useless-connections
"""A connection that says so is of no use any more: its server goes, or it leads to a standby, where a new one
may lead to the primary, or (feature_not_supported) a migration has changed a column that a statement prepared
on it returns."""


_SEPARATOR = "\x1f"
"""Stands in no JSON: within its strings control characters are escaped. An array of texts takes a driver
twice as long."""


class PostgreSQL(Dialect):
    name = "postgresql"
    notifies = True
    changes_in_queries = True
    insert = staticmethod(postgresql.insert)
    is_new = literal_column("xmax = 0")  # of a row that a statement has met and updated it is its transaction

    def for_parameters(self, style: Any) -> Any:
        # psycopg's, because it says the type of each parameter, which the server may not find out by itself
        return PGDialect_psycopg(paramstyle=style)  # type: ignore[no-untyped-call]  # SQLAlchemy's own

    def claim(
        self,
        ask: Ask,
        schema: str | None,
        names: Sequence[str],
        limit: int,
        owner: str,
        lease_ms: int,
        max_attempts: str,
        follow_ups: str | None = None,
        *,
        newest_first: bool = False,
    ) -> list[Sequence[Any]]:
        wanted = {"names": list(names), "most": limit}
        given = _given(owner, lease_ms, max_attempts, follow_ups)
        return ask(_claim(schema, follow_ups is not None, newest_first), {**wanted, **given})

    def due_in(self, ask: Ask, schema: str | None, names: Sequence[str] | None) -> list[Sequence[Any]]:
        return ask(_due_in(schema, names is None), {} if names is None else {"names": list(names)})

    def look(
        self,
        ask: Ask,
        schema: str | None,
        names: Sequence[str] | None,
        channel: str,
        hosts_within_ms: int | None,
        leases: bool,
        workers: Sequence[str] = (),
    ) -> list[Sequence[Any]]:
        asked: dict[str, Any] = {
            "channel": channel,
            "hosts_within_ms": hosts_within_ms,
            "leases": leases,
            "workers": list(workers),
        }
        return ask(_look(schema, names is None), asked if names is None else {**asked, "names": list(names)})

    def claim_beyond(
        self,
        ask: Ask,
        schema: str | None,
        positions: Sequence[Position],
        limit: int,
        owner: str,
        lease_ms: int,
        max_attempts: str,
        follow_ups: str | None = None,
    ) -> list[Sequence[Any]]:
        queues, priorities, moments, ids = map(list, zip(*positions, strict=True))
        wanted = {
            "queues": queues,
            "priorities": _numbers(priorities),
            "moments": _numbers(moments),
            "ids": _numbers(ids),
            "most": limit,
        }
        given = _given(owner, lease_ms, max_attempts, follow_ups)
        return ask(_claim_beyond(schema, follow_ups is not None), {**wanted, **given})

    def rows(self, batch: Batch) -> FromClause:
        arrays = (
            cast(bindparam(f"batch_{name}", type_=Text), postgresql.ARRAY(kind))
            if issubclass(kind, Integer)
            else bindparam(f"batch_{name}", type_=postgresql.ARRAY(kind))
            for name, kind in batch.columns.items()
        )
        columns = (sql_column(name, kind) for name, kind in batch.columns.items())
        return func.unnest(*arrays).table_valued(*columns, name="batch").render_derived()

    def parameters(self, batch: Batch, rows: Sequence[Sequence[Any]]) -> dict[str, Any]:
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
        rows: Sequence[Sequence[Any]],
        target: Table,
        *,
        skip_locked: bool = True,
        options: Mapping[str, Any] = NO_OPTIONS,
    ) -> set[Right]:
        parameters = self.parameters(batch, rows)
        return rights(
            conn.execute(_move(self, batch, target, skip_locked), parameters, execution_options=options)
        )

    def refuse_standby(self, conn: Connection) -> None:
        conn.execute(_TRANSACTION_ID)  # which a standby has none of, and so refuses as it refuses a write

    def stricter_isolation(self, conn: Connection) -> str | None:
        level = str(conn.scalar(text("SELECT current_setting('transaction_isolation')")))
        return None if level in ("read committed", "read uncommitted") else level.upper()

    def commits_at_once(self, pooled: Any) -> bool:
        automatic = getattr(pooled.dbapi_connection, "autocommit", False)
        return bool(automatic) and not is_in_transaction(pooled.driver_connection)

    def rolled_back(self, error: DBAPIError) -> bool:
        return _state(error) in _ROLLED_BACK

    def is_away(self, error: DBAPIError) -> bool:
        state = _state(error)
        if state is None:  # the client's own words: it could not connect, or the connection broke
            return error.connection_invalidated or type(error.orig).__name__ in (
                "OperationalError",
                "InterfaceError",
                "ConnectionTimeout",
            )
        return state.startswith(_AWAY_CLASSES) or state == _READ_ONLY or error.connection_invalidated

    def takes_no_writes(self, error: BaseException) -> bool:
        return is_read_only(error) or _state_of(getattr(error, "orig", error)) == _DISK_FULL

    def has_no_room(self, error: DBAPIError) -> bool:
        return _state(error) == _LIMIT_EXCEEDED

    def is_useless(self, error: BaseException) -> bool:
        return _state_of(error).startswith(_USELESS)

    def run(self, driver: Any, statement: str, parameters: Any) -> list[Sequence[Any]]:
        with driver.cursor() as cursor:
            cursor.execute(
                statement, parameters, **({"prepare": True} if hasattr(driver, "prepare_threshold") else {})
            )
            rows: list[Sequence[Any]] = cursor.fetchall()
            return rows

    def unblock(
        self, ask: Ask, schema: str | None, ids: Sequence[int], *, are_steps: bool, most: int, reason: str
    ) -> Verdict:
        given: dict[str, Any] = {"ids": _numbers(ids), "reason": reason}
        rows = ask(_unblock(schema, are_steps), given if are_steps else {**given, "most": most})
        found = {what: [id for id, kind in rows if kind == what] for what in ("found", "free", "cancelled")}
        return Verdict(found["found"][0], found["free"], found["cancelled"])

    def waiting_for(self, ask: Ask, schema: str | None, ended: Sequence[int]) -> list[int]:
        return [id for (id,) in ask(_waiting_for(schema), {"ids": _numbers(ended)})]

    def waiting_for_recent(self, ask: Ask, schema: str | None, within_ms: int) -> list[int]:
        return [id for (id,) in ask(_waiting_for_recent(schema), {"ms": within_ms})]

    def steps_beyond(self, ask: Ask, schema: str | None, place: Place, most: int) -> list[Sequence[Any]]:
        return ask(_steps_beyond(schema), {"flow": place[0], "id": place[1], "most": most})

    def has_flows(self, ask: Ask, schema: str | None) -> bool:
        return bool(ask(f"SELECT EXISTS (SELECT 1 FROM {_prefix(schema)}.sqlq_flows)", {})[0][0])

    def pick(
        self, conn: Connection, lines: Sequence[Line], served: Sequence[str] | None
    ) -> Iterable[tuple[int, str]]:
        schema = conn.get_execution_options()["schema_translate_map"][TOKEN_SCHEMA]
        for in_order in (False, True):
            if some := [line for line in lines if line.in_order is in_order]:
                given = {
                    "keys": [line.key for line in some],
                    "running": _numbers([line.running for line in some]),
                    "most": _numbers([line.most for line in some]),
                    "holds": [line.holds for line in some],
                    "served": None if served is None else list(served),
                }
                yield from conn.exec_driver_sql(_pick(schema, in_order), given)

    def is_cut_off(self, driver: Any) -> bool:
        looker = select_module.poll()
        looker.register(driver.fileno(), select_module.POLLIN)
        return bool(looker.poll(0))  # readable, though nothing was asked

    def look_at_idle_connections(self, engine: Engine) -> None:
        @event.listens_for(engine, "checkin")
        def _rests(dbapi_connection: Any, record: ConnectionPoolEntry) -> None:
            record.info.setdefault(RESTS_SINCE, time.monotonic())  # guard: rest-since-the-first

        @event.listens_for(engine, "checkout")
        def _wakes(dbapi_connection: Any, record: ConnectionPoolEntry, proxy: Any) -> None:
            since = record.info.pop(RESTS_SINCE, None)
            if since is None:
                return
            try:
                fresh = time.monotonic() - since < IDLE_SECONDS
                sound = not self.is_cut_off(dbapi_connection) and (
                    fresh or engine.dialect.do_ping(dbapi_connection)
                )
            except Exception as error:  # the driver's, whose class depends on it
                raise DisconnectionError from error
            if not sound:
                raise DisconnectionError

    def plan_once(self, engine: Engine) -> None:
        @event.listens_for(engine, "connect")
        def _connected(dbapi_connection: Any, record: Any) -> None:
            if getattr(dbapi_connection, "prepare_threshold", None) == ONLY_ON_REQUEST:
                _at_once(dbapi_connection, _PLAN_ONCE)

    def prepare(self, engine: Engine, patience: Patience) -> None:
        # before SQLAlchemy asks a first connection for its version
        @event.listens_for(engine, "connect", insert=True)
        def _connected(dbapi_connection: Any, record: Any) -> None:
            bound(dbapi_connection, patience)  # guard: every-wait-has-an-end
            # psycopg 3, and its user has nothing against it
            if getattr(dbapi_connection, "prepare_threshold", None) is not None:
                # guard: nothing-prepared-through-a-pooler
                dbapi_connection.prepare_threshold = (
                    ONLY_ON_REQUEST if leads_to_one_server(dbapi_connection) else None
                )

        @event.listens_for(engine, "handle_error")
        def _failed(context: ExceptionContext) -> None:
            if context.connection is None:
                patience.start_over()
            elif self.is_useless(context.original_exception):
                context.is_disconnect = True


IDLE_SECONDS = 10.0
"""After so long a connection is asked for a sign of life before it is used."""
ONLY_ON_REQUEST = sys.maxsize
"""How often psycopg has to see a statement before it prepares it unasked. Never: see `plan_once`."""


def leads_to_one_server(driver: Any) -> bool:
    """Whether a psycopg connection ends at the server process that takes its statements.

    A pooler such as PgBouncer in transaction mode hands statements to processes that never saw them prepared,
    or saw another of the same name. It gives its clients a process number of its own, so that it can find out
    whom a cancel request means.
    """
    return bool(_at_once(driver, "SELECT pg_backend_pid()") == driver.info.backend_pid)


def _at_once(driver: Any, statement: str) -> Any:
    """Run a statement outside any transaction, and return the value it has."""
    autocommit, driver.autocommit = driver.autocommit, True
    (value,) = driver.execute(statement).fetchone()
    driver.autocommit = autocommit
    return value


_PLAN_ONCE = "SELECT set_config('plan_cache_mode', 'force_generic_plan', false) || " + " || ".join(
    f"set_config('{setting}', 'off', false)"
    # a plan for any LIMIT is one for many rows, which would be dear enough to be compiled each time it is run
    for setting in ("enable_seqscan", "enable_bitmapscan", "enable_sort", "jit")
)


def _numbers(values: Sequence[int | None]) -> str:
    """Return an array of numbers as text, which costs a driver a hundredth of what a list does."""
    return "{" + ",".join(map(str, values)).replace("None", "NULL") + "}"


def is_in_transaction(driver: Any) -> bool:
    """Whether a transaction is open on a connection of psycopg, psycopg2 or asyncpg, from any thread; False
    where it cannot be told."""
    try:
        return bool(driver.info.transaction_status if hasattr(driver, "info") else driver.is_in_transaction())
    except Exception:  # closed meanwhile, or another driver's
        return False


def is_read_only(error: BaseException) -> bool:
    """Whether a database refused to write because it is a standby."""
    return _state_of(getattr(error, "orig", error)) == _READ_ONLY


_TRANSACTION_ID = text("SELECT txid_current()")


def _state(error: DBAPIError) -> str | None:
    return _state_of(error.orig) or None


def _state_of(error: BaseException | None) -> str:
    return getattr(error, "sqlstate", None) or getattr(error, "pgcode", None) or ""


@cache
def _claim(schema: str | None, follow_ups: bool, newest_first: bool = False) -> str:
    """Claim from the queues named, in their order and whatever priorities are in them.

    Queues, and the priorities found in one, stepping from each to the next lower by the claim index, are
    nested loops: what is not claimed is not read.
    """
    prefix = _prefix(schema)
    # guard: pause-postgresql
    levels = f"""unnest(CAST(%(names)s AS varchar[])) WITH ORDINALITY AS wanted (queue, place)
      CROSS JOIN LATERAL (
            WITH RECURSIVE levels (priority) AS (
                  (SELECT priority FROM {prefix}.jobs
                    WHERE queue = wanted.queue AND reserved_at IS NULL
                      AND NOT EXISTS (SELECT 1 FROM {prefix}.sqlq_queues q
                                       WHERE q.queue = wanted.queue AND q.paused_at IS NOT NULL)
                    ORDER BY priority DESC LIMIT 1)
                  UNION ALL
                  SELECT (SELECT j.priority FROM {prefix}.jobs j
                           WHERE j.queue = wanted.queue AND j.reserved_at IS NULL
                             AND j.priority < levels.priority
                           ORDER BY j.priority DESC LIMIT 1)
                    FROM levels WHERE levels.priority IS NOT NULL)
            SELECT wanted.queue, priority FROM levels WHERE priority IS NOT NULL) AS level"""
    order = "available_at DESC, id DESC" if newest_first else "available_at, id"
    return _claim_from(prefix, levels, follow_ups=follow_ups, order=order)


@cache
def _claim_beyond(schema: str | None, follow_ups: bool) -> str:
    """Claim from known queues and priorities, in each from a place on: nothing before it is read."""
    prefix = _prefix(schema)
    levels = """unnest(CAST(%(queues)s AS varchar[]), CAST(%(priorities)s AS smallint[]),
                   CAST(%(moments)s AS bigint[]), CAST(%(ids)s AS bigint[]))
      WITH ORDINALITY AS level (queue, priority, moment, id, place)"""
    # guard: claim-beyond-a-place
    beyond = f"""
               AND (available_at, id)
                   > (timestamptz 'epoch' + level.moment * interval '1 microsecond', level.id)
               AND NOT EXISTS (SELECT 1 FROM {prefix}.sqlq_queues q
                                WHERE q.queue = level.queue AND q.paused_at IS NOT NULL)"""
    return _claim_from(prefix, levels, beyond, follow_ups=follow_ups)


@cache
def _due_in(schema: str | None, all_queues: bool) -> str:
    """Step through queues and priorities as a claim does, and read the first row of each."""
    prefix = _prefix(schema)
    each = f"""
      SELECT min(queue)::text FROM {prefix}.jobs WHERE reserved_at IS NULL
      UNION ALL
      SELECT (SELECT min(j.queue)::text FROM {prefix}.jobs j
               WHERE j.reserved_at IS NULL AND j.queue > names.queue)
        FROM names WHERE names.queue IS NOT NULL"""
    first = f"""
           SELECT queue, priority, available_at FROM {prefix}.jobs
            WHERE queue = {{name}} AND reserved_at IS NULL {{lower}}
            ORDER BY priority DESC, available_at, id LIMIT 1"""
    return f"""
WITH RECURSIVE names (queue) AS (
      {each if all_queues else "SELECT unnest(CAST(%(names)s AS varchar[]))"}),
levels (queue, priority, available_at) AS (
      SELECT found.* FROM names CROSS JOIN LATERAL ({first.format(name="names.queue", lower="")}) AS found
      UNION ALL
      SELECT found.* FROM levels CROSS JOIN LATERAL (
           {first.format(name="levels.queue", lower="AND priority < levels.priority")}) AS found)
SELECT queue, CAST(EXTRACT(EPOCH FROM min(available_at) - statement_timestamp()) * 1000 AS double precision)
  FROM levels
 WHERE NOT EXISTS (SELECT 1 FROM {prefix}.sqlq_queues q
                    WHERE q.queue = levels.queue AND q.paused_at IS NOT NULL)
 GROUP BY queue
"""


def _given(owner: str, lease_ms: int, max_attempts: str, follow_ups: str | None) -> dict[str, Any]:
    given = {"owner": owner, "lease_ms": lease_ms, "max_attempts": max_attempts}
    return given if follow_ups is None else {**given, "follow_ups": follow_ups}


_FOLLOW_UPS = "".join(
    f""",
       {column} = coalesce({column}, CAST(%(follow_ups)s AS json) -> task ->> '{column}')"""
    for column in ("on_success", "on_failure")
)


@cache
def _look(schema: str | None, all_queues: bool) -> str:
    """Ask all that a host asks about once a second at once: one statement costs as much as the other."""
    prefix = _prefix(schema)
    return f"""
SELECT queue, ms, NULL::boolean AS listens, NULL::bigint AS hosts, NULL::boolean AS expired,
       NULL::text AS asked, NULL::boolean AS all_paused, NULL::double precision AS pause_ms
  FROM ({_due_in(schema, all_queues)}) AS due (queue, ms)
 UNION ALL
SELECT NULL, (SELECT CAST(EXTRACT(EPOCH FROM min(next_at) - statement_timestamp()) * 1000 AS double precision)
                FROM {prefix}.sqlq_schedules WHERE next_at IS NOT NULL),
       %(channel)s IN (SELECT pg_listening_channels()),
       CASE WHEN CAST(%(hosts_within_ms)s AS bigint) IS NOT NULL THEN (
            SELECT count(DISTINCT (host, coalesce(supervisor_pid, pid))) FROM {prefix}.sqlq_workers
             WHERE seen_at > statement_timestamp()
                             - CAST(%(hosts_within_ms)s AS bigint) * interval '1 millisecond') END,
       CASE WHEN CAST(%(leases)s AS boolean) THEN EXISTS (
            SELECT 1 FROM {prefix}.jobs
             WHERE reserved_at IS NOT NULL AND lease_expires_at < statement_timestamp()) END,
       (SELECT json_agg(json_build_array(
                 id, asked, {_microseconds("asked_at")}, {_microseconds("cancels_at")}))
          FROM {prefix}.sqlq_workers
         WHERE id = ANY(CAST(%(workers)s AS varchar[]))
           AND (asked_at IS NOT NULL OR cancels_at IS NOT NULL))::text,
       EXISTS (SELECT 1 FROM {prefix}.sqlq_queues WHERE queue = '' AND paused_at IS NOT NULL),
       (SELECT CAST(EXTRACT(EPOCH FROM min(paused_until) - statement_timestamp()) * 1000 AS double precision)
          FROM {prefix}.sqlq_queues)
"""


def _microseconds(column: str) -> str:
    return f"CAST(EXTRACT(EPOCH FROM {column}) * 1000000 AS bigint)"


def _claim_from(
    prefix: str, levels: str, beyond: str = "", *, follow_ups: bool, order: str = "available_at, id"
) -> str:
    """Choose, lock and reserve in one statement, level by level under one LIMIT, so that what is not claimed
    is not locked.

    MATERIALIZED, because a plan may run a plain subquery again, lock other rows, and claim more than the
    limit; and an array, for which each row is found by its primary key, where a join would read the whole
    table for a large batch.
    """
    dialect = postgresql.dialect()  # type: ignore[no-untyped-call]  # SQLAlchemy's own
    also = _FOLLOW_UPS if follow_ups else ""
    # guard: claim-postgresql
    return f"""
WITH due AS MATERIALIZED (
     SELECT ready.id
       FROM {levels}
      CROSS JOIN LATERAL (
            SELECT id FROM {prefix}.jobs
             WHERE queue = level.queue AND priority = level.priority
               AND reserved_at IS NULL AND available_at <= statement_timestamp(){beyond}
             ORDER BY {order}
             LIMIT %(most)s
               FOR UPDATE SKIP LOCKED) AS ready
      LIMIT %(most)s)
UPDATE {prefix}.jobs
   SET reserved_at = statement_timestamp(),
       reserved_by = %(owner)s,
       lease_expires_at = statement_timestamp() + CAST(%(lease_ms)s AS bigint) * interval '1 millisecond',
       lease_token = CASE WHEN lease_token < {LARGEST_TOKEN} THEN lease_token + 1 ELSE 1 END,
       attempts = least(attempts + 1, {MOST_COUNTED}),
       max_attempts = coalesce(max_attempts, CAST(CAST(%(max_attempts)s AS json) ->> task AS integer)){also}
 WHERE id = ANY(ARRAY(SELECT id FROM due))
RETURNING {claimed_columns(dialect)}
"""


@cache
def _unblock(schema: str | None, are_steps: bool) -> str:
    """Judge steps in one statement, and so by one snapshot, in which a job before them is in one table and
    not between two.

    The steps before one are looked at from the youngest on: of a wide join one that is live is found at once.
    Every row is found by a key in hand, by an array or a subquery of its own: a join of tables would be
    planned without knowing how few there are, and could read an index from end to end.
    """
    prefix = _prefix(schema)
    carried = ", ".join(CARRIED)
    given = "CAST(%(ids)s AS bigint[])"
    wanted = f"SELECT unnest({given}) AS id" if are_steps else f"{_waiting_for(schema)} LIMIT %(most)s"
    live = f"SELECT id FROM {prefix}.jobs WHERE id = edge.depends_on"  # guard: live-is-waited-for-postgresql
    return f"""
WITH step AS MATERIALIZED ({wanted}),
quiet AS MATERIALIZED (
     SELECT step.id FROM step
      WHERE NOT EXISTS (
            SELECT 1
              FROM (SELECT depends_on FROM {prefix}.sqlq_edges
                     WHERE job_id = step.id ORDER BY depends_on DESC OFFSET 0) AS edge
             WHERE ({live}) IS NOT NULL)),
verdict AS MATERIALIZED (
     SELECT quiet.id,
            bool_or(failed IS NULL AND on_outcome <> 'ended'
                    AND (on_outcome = 'failure' OR finished IS DISTINCT FROM 'completed')) AS never,
            bool_or(failed IS NOT NULL AND on_outcome = 'success') AS waits
       FROM quiet
      CROSS JOIN LATERAL (
            SELECT edge.on_outcome,
                   (SELECT outcome FROM {prefix}.finished_jobs WHERE id = edge.depends_on) AS finished,
                   (SELECT id FROM {prefix}.failed_jobs WHERE id = edge.depends_on) AS failed
              FROM {prefix}.sqlq_edges AS edge WHERE edge.job_id = quiet.id OFFSET 0) AS before
      GROUP BY quiet.id),
locked AS MATERIALIZED (
     SELECT id FROM {prefix}.jobs
      WHERE id = ANY(ARRAY(SELECT id FROM verdict WHERE never OR NOT waits))
        AND blocked_by = 'flow' AND reserved_at IS NULL
        FOR UPDATE SKIP LOCKED),
free AS (
     UPDATE {prefix}.jobs
        SET available_at = CASE WHEN limit_key IS NULL THEN greatest(statement_timestamp(), due_at)
                                ELSE available_at END,
            blocked_by = CASE WHEN limit_key IS NOT NULL THEN 'limit' END,
            due_at = CASE WHEN limit_key IS NOT NULL THEN greatest(statement_timestamp(), due_at) END
      WHERE id = ANY(ARRAY(SELECT id FROM locked NATURAL JOIN verdict WHERE NOT never))
  RETURNING id, limit_key),
woken AS (
     INSERT INTO {prefix}.sqlq_wakes (limit_key)
     SELECT DISTINCT limit_key FROM free WHERE limit_key IS NOT NULL),
gone AS (
     DELETE FROM {prefix}.jobs
      WHERE id = ANY(ARRAY(SELECT id FROM locked NATURAL JOIN verdict WHERE never))
  RETURNING {carried}),
cancelled AS (
     INSERT INTO {prefix}.finished_jobs ({carried}, outcome, reason)
     SELECT {carried}, 'cancelled', %(reason)s FROM gone
  RETURNING id)
SELECT id, 'free' FROM free
 UNION ALL
SELECT id, 'cancelled' FROM cancelled
 UNION ALL
SELECT count(*), 'found' FROM step
"""


def _blocked_among(prefix: str, ended: str) -> str:
    """Choose the blocked steps that wait for the jobs of a FROM clause that names them `ended`.

    What waits for the success of one that has failed waits on, and is not looked at: there may be many.
    """
    return f"""
     SELECT id FROM {prefix}.jobs
      WHERE id = ANY(ARRAY(
            SELECT edge.job_id
              FROM {ended}
             CROSS JOIN LATERAL (SELECT job_id FROM {prefix}.sqlq_edges
                                  WHERE depends_on = ended.id
                                    AND (on_outcome <> 'success' OR (
                                         SELECT id FROM {prefix}.failed_jobs WHERE id = ended.id) IS NULL)
                                 OFFSET 0) AS edge))
        AND blocked_by = 'flow'"""


@cache
def _waiting_for(schema: str | None) -> str:
    return _blocked_among(_prefix(schema), "unnest(CAST(%(ids)s AS bigint[])) AS ended (id)")


@cache
def _waiting_for_recent(schema: str | None) -> str:
    prefix = _prefix(schema)
    return " UNION ".join(
        _blocked_among(
            prefix,
            f"""(SELECT id FROM {prefix}.{table}
                     WHERE {ended_at} > statement_timestamp()
                                        - CAST(%(ms)s AS bigint) * interval '1 millisecond'
                       AND (flow_id IS NOT NULL OR limit_key IS NOT NULL) OFFSET 0) AS ended""",
        )
        for table, ended_at in (("finished_jobs", "finished_at"), ("failed_jobs", "failed_at"))
    )


@cache
def _steps_beyond(schema: str | None) -> str:
    return f"""
SELECT flow_id, id, blocked_by = 'flow' FROM {_prefix(schema)}.jobs
 WHERE flow_id IS NOT NULL AND (flow_id, id) > (CAST(%(flow)s AS bigint), CAST(%(id)s AS bigint))
 ORDER BY flow_id, id
 LIMIT %(most)s
"""


@cache
def _pick(schema: str | None, in_order: bool) -> str:
    """Choose from each line what may run. Counted is here and now, and so by a snapshot that is younger than
    the locks on the keys."""
    prefix = _prefix(schema)
    # guard: only-what-is-served-is-admitted-postgresql
    served = "(CAST(%(served)s AS varchar[]) IS NULL OR queue = ANY(CAST(%(served)s AS varchar[])))"
    is_open = f"""queue NOT IN (SELECT queue FROM {prefix}.sqlq_queues WHERE paused_at IS NOT NULL)
               AND {served}"""
    first = f"""
            SELECT id FROM {prefix}.jobs
             WHERE limit_key = free.limit_key AND blocked_by = 'limit' AND due_at <= statement_timestamp()
               AND {is_open}
             ORDER BY priority DESC, due_at, id
             LIMIT greatest(free.number, 0)
               FOR UPDATE SKIP LOCKED"""
    # guard: the-head-of-a-line-postgresql
    head = f"""
            SELECT head.id
              FROM (SELECT id, queue, due_at FROM {prefix}.jobs
                     WHERE limit_key = free.limit_key AND blocked_by = 'limit'
                     ORDER BY id LIMIT 1) AS head
             WHERE free.number > 0 AND head.due_at <= statement_timestamp()
               AND {is_open}
               AND NOT (free.holds AND EXISTS (SELECT 1 FROM {prefix}.failed_jobs
                                                WHERE limit_key = free.limit_key AND id < head.id))"""
    # guard: slots-are-counted-postgresql
    admitted = f"""SELECT 1 FROM {prefix}.jobs
                WHERE limit_key = line.limit_key AND blocked_by IS NULL LIMIT coalesce(line.running, 0)"""
    return f"""
WITH free AS MATERIALIZED (
     SELECT line.limit_key, line.holds,
            least(line.most, line.running - (SELECT count(*) FROM ({admitted}) AS admitted)) AS number
       FROM unnest(CAST(%(keys)s AS varchar[]), CAST(%(running)s AS integer[]),
                   CAST(%(most)s AS integer[]), CAST(%(holds)s AS boolean[]))
            AS line (limit_key, running, most, holds))
SELECT picked.id, free.limit_key
  FROM free CROSS JOIN LATERAL ({head if in_order else first}) AS picked
"""


def _prefix(schema: str | None) -> str:
    dialect = postgresql.dialect()  # type: ignore[no-untyped-call]  # SQLAlchemy's own
    quoted: str = dialect.identifier_preparer.quote_schema(str(schema))  # doubles %, as drivers want it
    return quoted


@cache
def _move(dialect: Dialect, batch: Batch, target: Table, skip_locked: bool) -> Insert:
    found = held(dialect, batch, skip_locked=skip_locked)
    # all that the row takes along is returned by the DELETE itself: joining its rows to `held` again costs
    # the square of a batch
    carried = (*(jobs.c[name] for name in CARRIED), *batch.carried(found))
    gone = delete(jobs).where(jobs.c.id == found.c.id).returning(*carried).cte("gone")
    source = select(*(gone.c[name] for name in (*CARRIED, *batch.extra)))
    return (
        insert(target)
        .from_select([*CARRIED, *batch.extra], source)
        .returning(target.c.id, target.c.lease_token)
    )
