"""The tables as SQLAlchemy sees them, the types of their columns, and the database's clock.

Every table stands in the token schema `__sqlq__`. The token is replaced per statement (or, on connections of
sqlq's own, per engine) by the schema the tables really live in, so that neither a caller's
`schema_translate_map` nor a `search_path` can send jobs elsewhere.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import (
    DOUBLE_PRECISION,
    TIMESTAMP,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ColumnElement,
    Computed,
    Dialect,
    Float,
    Identity,
    Index,
    Integer,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    TypeDecorator,
    case,
    column,
    func,
    literal_column,
    text,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.expression import FunctionElement
from sqlalchemy.types import TypeEngine

from sqlq.clock import LONGEST_MS
from sqlq.settings import MAX_ATTEMPTS

TOKEN_SCHEMA = "__sqlq__"
LONGEST_NAME = 255
"""Characters in the name of a queue or task, or in a unique key."""

MOST_COUNTED = 1_000_000_000
LARGEST_TOKEN = 4_000_000_000_000_000_000

UNIQUE_UNTIL = ("finish", "start", "pruned")
FAILURE_REASONS = ("error", "timeout", "worker_lost", "unknown_task", "bad_payload", "bad_signature")
OUTCOMES = ("completed", "cancelled")
BLOCKED_BY = ("flow", "limit")
ON_OUTCOMES = ("success", "failure", "ended")

FAR = datetime(9998, 1, 1, tzinfo=UTC)
"""When a blocked job is due: it lies behind every job that a claim may take, so that a claim neither takes
nor reads it. (NULL would say so, too, and `available_at` takes none.)"""

metadata = MetaData(schema=TOKEN_SCHEMA)


class Moment(TypeDecorator[datetime]):
    """An instant: `timestamptz`, or on SQLite whole milliseconds since 1970 as an INTEGER.

    SQLite has no timestamp type: text loses the offset or compares wrongly with other text, so the only
    storage in which `<=` means "not later" is an integer.
    """

    impl = TIMESTAMP(timezone=True)
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        return dialect.type_descriptor(Integer() if dialect.name == "sqlite" else TIMESTAMP(timezone=True))

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> Any:
        if value is None or dialect.name != "sqlite":
            return value
        return milliseconds_of(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        if value is None or dialect.name != "sqlite":
            return value  # type: ignore[no-any-return]  # the driver's own datetime
        return moment_of(value)


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)


def milliseconds_of(moment: datetime) -> int:
    """Return a moment as SQLite stores it."""
    return (moment - _EPOCH) // _MILLISECOND


def moment_of(milliseconds: int) -> datetime:
    """Return a moment that SQLite has stored."""
    return _EPOCH + int(milliseconds) * _MILLISECOND


SQLITE_NOW = "CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)"
"""Milliseconds since 1970 by SQLite's clock, the one definition of it; constant within a statement."""

POSTGRESQL_NOW = "statement_timestamp()"
"""`now()` is the start of the transaction: in a long one it would stamp a lease that has already expired.
`clock_timestamp()` changes from row to row and so cannot bound an index scan."""


class now(FunctionElement[datetime]):
    """The database's clock."""

    type = Moment()
    inherit_cache = True


@compiles(now, "postgresql")
def _now_postgresql(element: now, compiler: Any, **kw: Any) -> str:
    return POSTGRESQL_NOW


@compiles(now, "sqlite")
def _now_sqlite(element: now, compiler: Any, **kw: Any) -> str:
    return f"({SQLITE_NOW})"


class after(FunctionElement[datetime]):
    """The database's clock plus a number of milliseconds (minus, where it is negative)."""

    type = Moment()
    inherit_cache = True

    def __init__(self, ms: ColumnElement[int]) -> None:
        super().__init__(ms)


@compiles(after, "postgresql")
def _after_postgresql(element: after, compiler: Any, **kw: Any) -> str:
    return f"({POSTGRESQL_NOW} + {compiler.process(element.clauses, **kw)} * interval '1 millisecond')"


@compiles(after, "sqlite")
def _after_sqlite(element: after, compiler: Any, **kw: Any) -> str:
    return f"({SQLITE_NOW} + {compiler.process(element.clauses, **kw)})"


class moment_after(FunctionElement[datetime]):
    """A moment plus a number of milliseconds, both columns of the row: the same whatever the session's time
    zone, so that it may be a column itself. (PostgreSQL has no such sum of a `timestamptz`.)"""

    type = Moment()
    inherit_cache = True


@compiles(moment_after, "postgresql")
def _moment_after_postgresql(element: moment_after, compiler: Any, **kw: Any) -> str:
    moment, ms = (compiler.process(clause, **kw) for clause in element.clauses)
    return f"(({moment} AT TIME ZONE 'UTC') + {ms} * interval '1 millisecond') AT TIME ZONE 'UTC'"


@compiles(moment_after, "sqlite")
def _moment_after_sqlite(element: moment_after, compiler: Any, **kw: Any) -> str:
    moment, ms = (compiler.process(clause, **kw) for clause in element.clauses)
    return f"{moment} + {ms}"


class far(FunctionElement[datetime]):
    """`FAR`, written out, so that a statement needs no parameter for it."""

    type = Moment()
    inherit_cache = True


@compiles(far, "postgresql")
def _far_postgresql(element: far, compiler: Any, **kw: Any) -> str:
    return f"timestamptz '{FAR}'"


@compiles(far, "sqlite")
def _far_sqlite(element: far, compiler: Any, **kw: Any) -> str:
    return str(milliseconds_of(FAR))


class epoch_ms(FunctionElement[float]):
    """A moment as milliseconds since 1970 with their fractions: read much faster than a timestamp."""

    type = Float()
    inherit_cache = True


@compiles(epoch_ms, "postgresql")
def _epoch_ms_postgresql(element: epoch_ms, compiler: Any, **kw: Any) -> str:
    return f"CAST(EXTRACT(EPOCH FROM {compiler.process(element.clauses, **kw)}) * 1000 AS DOUBLE PRECISION)"


@compiles(epoch_ms, "sqlite")
def _epoch_ms_sqlite(element: epoch_ms, compiler: Any, **kw: Any) -> str:
    return str(compiler.process(element.clauses, **kw))


class since_ms(FunctionElement[int]):
    """Whole milliseconds from a moment to the database's clock."""

    type = BigInteger()
    inherit_cache = True


@compiles(since_ms, "postgresql")
def _since_ms_postgresql(element: since_ms, compiler: Any, **kw: Any) -> str:
    return (
        f"CAST(EXTRACT(EPOCH FROM {POSTGRESQL_NOW} - {compiler.process(element.clauses, **kw)}) * 1000 "
        "AS BIGINT)"
    )


@compiles(since_ms, "sqlite")
def _since_ms_sqlite(element: since_ms, compiler: Any, **kw: Any) -> str:
    return f"({SQLITE_NOW} - {compiler.process(element.clauses, **kw)})"


def _name(*, nullable: bool = False, **kw: Any) -> dict[str, Any]:
    return {"type_": String(LONGEST_NAME), "nullable": nullable, **kw}


def _one_of(column: str, values: tuple[str, ...]) -> str:
    return f"{column} IN ({', '.join(repr(v) for v in values)})"


DOMAINS = {
    "moment": (
        "TIMESTAMP WITH TIME ZONE",
        "VALUE >= '1970-01-01 00:00:00+00' AND VALUE < '9999-01-01 00:00:00+00'",
    ),
    "priority": ("SMALLINT", "VALUE BETWEEN -100 AND 100"),
    "count": ("INTEGER", f"VALUE BETWEEN 0 AND {MOST_COUNTED}"),
    "most": ("INTEGER", f"VALUE BETWEEN 1 AND {MOST_COUNTED}"),
    "token": ("BIGINT", f"VALUE BETWEEN 0 AND {LARGEST_TOKEN}"),
    "timeout": ("BIGINT", f"VALUE BETWEEN 0 AND {LONGEST_MS}"),
    "errors": ("TEXT", "length(VALUE) >= 2"),
    "until": ("VARCHAR(6)", _one_of("VALUE", UNIQUE_UNTIL)),
    "outcome": ("VARCHAR(9)", _one_of("VALUE", OUTCOMES)),
    "reason": ("VARCHAR(13)", _one_of("VALUE", FAILURE_REASONS)),
    "blocked": ("VARCHAR(5)", _one_of("VALUE", BLOCKED_BY)),
    "on_outcome": ("VARCHAR(7)", _one_of("VALUE", ON_OUTCOMES)),
}
"""The types of columns that have a rule, each a domain `sqlq_…` on PostgreSQL.

As CHECKs of the tables the same rules cost two fifths of a single INSERT: PostgreSQL reads the text of a
CHECK anew for each statement, and keeps that of a domain. On SQLite they are CHECKs.
"""


def _in_domain(name: str) -> dict[str, Any]:
    """Mark a column as one of a domain. Statements know its plain type; moments are in theirs unmarked."""
    return {"info": {"domain": name}}


def _on_sqlite(rule: str, name: str) -> CheckConstraint:
    return CheckConstraint(rule, name=name).ddl_if(dialect="sqlite")


def _of_type(column: str, kind: str) -> str:
    """So written it takes half the time of `typeof(…) IN ('integer', 'null')`, for each column of each
    row."""
    return f"({column} IS NULL OR typeof({column}) = '{kind}')"


def _integer_times(table: str, *columns: str) -> CheckConstraint:
    """On SQLite any column takes any type, and a text date compares greater than every integer: never due,
    for ever."""
    rule = " AND ".join(_of_type(c, "integer") for c in columns)
    return _on_sqlite(rule, f"{table}_times_are_integers")


def _integers(table: str, *columns: str) -> CheckConstraint:
    """The same for numbers: text counts as larger than any limit."""
    rule = " AND ".join(_of_type(c, "integer") for c in columns)
    return _on_sqlite(rule, f"{table}_numbers_are_integers")


def _texts(table: str, *columns: str) -> CheckConstraint:
    """The same for texts, among which bytes could not be shown."""
    rule = " AND ".join(_of_type(c, "text") for c in columns)
    return _on_sqlite(rule, f"{table}_texts_are_text")


def _moments_in_range(table: str, *columns: str) -> CheckConstraint:
    """Refuse moments that Python cannot read back: one such row would stop every claim of its queue, or every
    listing. NULL passes, where the column takes it."""
    rule = " AND ".join(f"{c} >= 0 AND {c} < 253370764800000" for c in columns)
    return _on_sqlite(rule, f"{table}_moments_in_range")


jobs = Table(
    "jobs",
    metadata,
    Column("id", BigInteger().with_variant(Integer(), "sqlite"), Identity(always=False), primary_key=True),
    Column("queue", **_name(), server_default="default"),
    Column("task", **_name()),
    Column("payload", Text, nullable=False, server_default="{}"),
    Column("priority", SmallInteger, nullable=False, server_default=text("0"), **_in_domain("priority")),
    Column("attempts", Integer, nullable=False, server_default=text("0"), **_in_domain("count")),
    Column("max_attempts", Integer, **_in_domain("most")),
    Column("available_at", Moment, nullable=False, server_default=now()),
    Column("reserved_at", Moment),
    Column("reserved_by", String(36)),
    Column("lease_expires_at", Moment),
    Column("lease_token", BigInteger, nullable=False, server_default=text("0"), **_in_domain("token")),
    Column("unique_key", **_name(nullable=True)),
    Column("unique_until", String(6), nullable=False, server_default="finish", **_in_domain("until")),
    Column("on_success", Text),
    Column("on_failure", Text),
    Column("timeout_ms", BigInteger, **_in_domain("timeout")),
    Column("releases", Integer, nullable=False, server_default=text("0"), **_in_domain("count")),
    Column("losses", Integer, nullable=False, server_default=text("0"), **_in_domain("count")),
    Column("unknown_since", Moment),
    Column("cancel_requested_at", Moment),
    Column("errors", Text, **_in_domain("errors")),
    Column("headers", Text),
    Column("label", **_name(nullable=True)),
    Column("backoff", Text),
    Column("retention_ms", BigInteger, **_in_domain("timeout")),
    Column("progress", DOUBLE_PRECISION),
    Column("progress_of", DOUBLE_PRECISION),
    Column("progress_note", Text),
    Column("schedule", **_name(nullable=True)),
    Column("scheduled_for", Moment),
    Column("cursor", Text),
    Column("start_by", Moment),
    Column("flow_id", BigInteger),
    Column("limit_key", **_name(nullable=True)),
    Column("blocked_by", String(5), **_in_domain("blocked")),
    Column("due_at", Moment),
    Column("replay_of", BigInteger),
    Column("created_at", Moment, nullable=False, server_default=now()),
    # Where the largest id there can be was once given by hand, SQLite gives no more. (0 and less are no job's
    # id.)
    _on_sqlite("id BETWEEN 1 AND 4000000000000000000", "jobs_id_in_range"),
    _on_sqlite("priority BETWEEN -100 AND 100", "jobs_priority_in_range"),
    # Far below the limits of their types; see `one_more` and `next_token`.
    _on_sqlite(
        f"attempts BETWEEN 0 AND {MOST_COUNTED} AND max_attempts BETWEEN 1 AND {MOST_COUNTED}"
        f" AND releases BETWEEN 0 AND {MOST_COUNTED} AND losses BETWEEN 0 AND {MOST_COUNTED}"
        f" AND lease_token BETWEEN 0 AND {LARGEST_TOKEN}",
        "jobs_attempts_in_range",
    ),
    # No time limit, or one that a thread can wait for; a retention likewise.
    _on_sqlite(
        f"timeout_ms BETWEEN 0 AND {LONGEST_MS} AND retention_ms BETWEEN 0 AND {LONGEST_MS}",
        "jobs_timeout_in_range",
    ),
    _on_sqlite("length(errors) >= 2", "jobs_errors_are_an_array"),
    _on_sqlite(_one_of("unique_until", UNIQUE_UNTIL), "jobs_unique_until_known"),
    _on_sqlite(_one_of("blocked_by", BLOCKED_BY), "jobs_blocked_by_known"),
    # What is blocked no claim may find, and what is not blocked nobody would ever unblock.
    _on_sqlite(f"(blocked_by IS NULL) = (available_at < {milliseconds_of(FAR)})", "jobs_blocked_is_far"),
    _on_sqlite(
        "(reserved_at IS NULL) = (reserved_by IS NULL) AND (reserved_at IS NULL) = (lease_expires_at IS "
        "NULL)",
        "jobs_reservation_is_whole",
    ),
    _moments_in_range(
        "jobs",
        "available_at",
        "reserved_at",
        "lease_expires_at",
        "unknown_since",
        "cancel_requested_at",
        "scheduled_for",
        "start_by",
        "due_at",
        "created_at",
    ),
    _integer_times(
        "jobs",
        "available_at",
        "reserved_at",
        "lease_expires_at",
        "unknown_since",
        "cancel_requested_at",
        "scheduled_for",
        "start_by",
        "due_at",
        "created_at",
    ),
    _integers(
        "jobs",
        "priority",
        "attempts",
        "max_attempts",
        "lease_token",
        "timeout_ms",
        "retention_ms",
        "releases",
        "losses",
        "flow_id",
        "replay_of",
    ),
    sqlite_autoincrement=True,
)

Index(
    "jobs_claim",
    jobs.c.queue,
    jobs.c.priority.desc(),
    jobs.c.available_at,
    jobs.c.id,
    postgresql_where=jobs.c.reserved_at.is_(None),
    sqlite_where=jobs.c.reserved_at.is_(None),
)

HOLDS_KEY = "unique_key IS NOT NULL AND (unique_until <> 'start' OR lease_token = 0)"
"""Which live rows hold their unique key. With "start" the key is let go at the first claim, for which the
token is the only lasting mark: it never returns to 0, so no retry can collide with a newer job."""

Index(
    "jobs_unique_key",
    jobs.c.queue,
    jobs.c.unique_key,
    unique=True,
    postgresql_where=text(HOLDS_KEY),
    sqlite_where=text(HOLDS_KEY),
)

Index(
    "jobs_rescue",
    jobs.c.id,
    postgresql_where=jobs.c.reserved_at.is_not(None),
    sqlite_where=jobs.c.reserved_at.is_not(None),
)

IN_TIME_ONLY = "start_by IS NOT NULL AND reserved_at IS NULL AND attempts = 0"
"""Which rows end when their time is over: those that wait and have not been started yet."""

Index(
    "jobs_start_by",
    jobs.c.start_by,
    jobs.c.id,
    postgresql_where=text(IN_TIME_ONLY),
    sqlite_where=text(IN_TIME_ONLY),
)

IN_FLOW = "flow_id IS NOT NULL"


def _flow_index(table: Table) -> None:
    """Index the jobs of each flow. Ordinary jobs are in none of these indexes."""
    rule = text(IN_FLOW)
    Index(f"{table.name}_flow", table.c.flow_id, table.c.id, postgresql_where=rule, sqlite_where=rule)


_flow_index(jobs)

ADMITTED = "limit_key IS NOT NULL AND blocked_by IS NULL"
IN_LINE = "blocked_by = 'limit'"

Index("jobs_admitted", jobs.c.limit_key, postgresql_where=text(ADMITTED), sqlite_where=text(ADMITTED))
"""The slots of a limit that are taken: one row for each."""

Index(
    "jobs_line",
    jobs.c.limit_key,
    jobs.c.priority.desc(),
    jobs.c.due_at,
    jobs.c.id,
    postgresql_where=text(IN_LINE),
    sqlite_where=text(IN_LINE),
)

Index(
    "jobs_line_by_id",
    jobs.c.limit_key,
    jobs.c.id,
    postgresql_where=text(IN_LINE),
    sqlite_where=text(IN_LINE),
)

attempts_allowed = func.coalesce(jobs.c.max_attempts, literal_column(str(MAX_ATTEMPTS)))
"""How often a job may be tried. A row inserted by SQL need not say it: then its task does, when a worker that
knows the task claims the row; until then the default counts."""


def one_more(counter: ColumnElement[int]) -> ColumnElement[int]:
    """A counter plus one, up to the largest it can be: a row that was written there by hand must not make the
    statement fail that it is written in with others."""
    return case((counter < MOST_COUNTED, counter + 1), else_=counter)


def next_token(token: ColumnElement[int]) -> ColumnElement[int]:
    """The lease token after this one, which is never 0; after the largest it begins anew."""
    return case((token < LARGEST_TOKEN, token + 1), else_=1)


CARRIED = (
    "id",
    "queue",
    "task",
    "payload",
    "priority",
    "attempts",
    "max_attempts",
    "available_at",
    "reserved_at",
    "reserved_by",
    "lease_token",
    "unique_key",
    "unique_until",
    "on_success",
    "on_failure",
    "timeout_ms",
    "releases",
    "errors",
    "headers",
    "label",
    "backoff",
    "retention_ms",
    "progress",
    "progress_of",
    "progress_note",
    "schedule",
    "scheduled_for",
    "cursor",
    "start_by",
    "flow_id",
    "limit_key",
    "replay_of",
    "created_at",
)
"""What a job takes along to finished_jobs or failed_jobs, and from failed_jobs back."""


def _carried() -> list[Column[Any]]:
    """The columns of an ended job; no defaults, for every value comes from the row in jobs."""
    return [
        Column(
            c.name, c.type, primary_key=c.primary_key, nullable=c.nullable, autoincrement=False, info=c.info
        )
        for c in (jobs.c[name] for name in CARRIED)
    ]


def _of_the_end() -> list[Column[Any]]:
    """What is known of a job only when it has ended: how long after its claim its last attempt began, where
    it was not its first claim, and as which job it was replayed."""
    return [Column("start_ms", BigInteger), Column("replayed_as", BigInteger)]


def _expires(ended_at: str) -> Column[Any]:
    """The end of a retention of the job's own; NULL where it has none."""
    return Column(
        "expires_at", Moment, Computed(moment_after(column(ended_at), column("retention_ms")), persisted=True)
    )


def _prune_indexes(table: Table, ended_at: str) -> None:
    """Index ended jobs by when they may be deleted: most by their age, those with a retention of their own by
    its end. Each job is in one of the two, so that a prune reads what it deletes and nothing else."""
    expires_at = table.c.expires_at
    for name, first, rule in (
        ("prune", table.c[ended_at], expires_at.is_(None)),
        ("expire", expires_at, expires_at.is_not(None)),
    ):
        Index(f"{table.name}_{name}", first, table.c.id, postgresql_where=rule, sqlite_where=rule)


ENDED_IN_A_FLOW_OR_LIMIT = "flow_id IS NOT NULL OR limit_key IS NOT NULL"


HOLDS_KEY_TO_THE_END = "unique_until = 'pruned'"
"""Which ended rows still hold their unique key."""


def _key_index(table: Table) -> None:
    """Index ended jobs by the unique keys that they hold until they are pruned."""
    rule = text(HOLDS_KEY_TO_THE_END)
    columns = (table.c.queue, table.c.unique_key)
    Index(f"{table.name}_unique_key", *columns, postgresql_where=rule, sqlite_where=rule)


def _unblock_indexes(table: Table, ended_at: str) -> None:
    """Index ended jobs that others may have waited for, by when they ended, and those of each flow."""
    rule = text(ENDED_IN_A_FLOW_OR_LIMIT)
    Index(f"{table.name}_unblock", table.c[ended_at], postgresql_where=rule, sqlite_where=rule)
    _flow_index(table)


finished_jobs = Table(
    "finished_jobs",
    metadata,
    *_carried(),
    Column("outcome", String(9), nullable=False, **_in_domain("outcome")),
    Column("result", Text),
    Column("reason", Text),
    Column("finished_at", Moment, nullable=False, server_default=now()),
    *_of_the_end(),
    _expires("finished_at"),
    _on_sqlite(_one_of("outcome", OUTCOMES), "finished_jobs_outcome_known"),
    _integer_times(
        "finished_jobs",
        "available_at",
        "reserved_at",
        "scheduled_for",
        "start_by",
        "created_at",
        "finished_at",
    ),
)
_prune_indexes(finished_jobs, "finished_at")
_unblock_indexes(finished_jobs, "finished_at")
_key_index(finished_jobs)

failed_jobs = Table(
    "failed_jobs",
    metadata,
    *_carried(),
    Column("reason", String(13), nullable=False, **_in_domain("reason")),
    Column("exception", Text),
    Column("message", Text),
    Column("traceback", Text),
    Column("failed_at", Moment, nullable=False, server_default=now()),
    *_of_the_end(),
    _expires("failed_at"),
    _on_sqlite(_one_of("reason", FAILURE_REASONS), "failed_jobs_reason_known"),
    _integer_times(
        "failed_jobs", "available_at", "reserved_at", "scheduled_for", "start_by", "created_at", "failed_at"
    ),
)
_prune_indexes(failed_jobs, "failed_at")
_unblock_indexes(failed_jobs, "failed_at")
_key_index(failed_jobs)

HELD = "limit_key IS NOT NULL"

Index(
    "failed_jobs_limit",
    failed_jobs.c.limit_key,
    failed_jobs.c.id,
    postgresql_where=text(HELD),
    sqlite_where=text(HELD),
)
"""What holds the keys of those limits that a failed job holds."""

_WORKER_MOMENTS = ("started_at", "seen_at", "state_at", "asked_at", "cancels_at")

workers = Table(
    "sqlq_workers",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("host", Text, nullable=False),
    Column("pid", Integer, nullable=False),
    Column("supervisor_pid", Integer),
    Column("version", Text, nullable=False),
    Column("queues", Text),
    Column("concurrency", Integer, nullable=False),
    Column("unstarted", Integer, nullable=False, server_default=text("0")),
    Column("held_jobs", Text),
    Column("started_at", Moment, nullable=False, server_default=now()),
    Column("seen_at", Moment, nullable=False, server_default=now()),
    Column("name", Text),
    Column("state", Text, nullable=False, server_default="working"),
    Column("state_at", Moment, nullable=False, server_default=now()),
    Column("asked", Text),
    Column("asked_at", Moment),
    Column("cancels_at", Moment),
    _moments_in_range("sqlq_workers", *_WORKER_MOMENTS),
    _integer_times("sqlq_workers", *_WORKER_MOMENTS),
    _integers("sqlq_workers", "pid", "supervisor_pid", "concurrency", "unstarted"),
    _texts("sqlq_workers", "id", "host", "version", "queues", "held_jobs", "name", "state", "asked"),
)

queues = Table(
    "sqlq_queues",
    metadata,
    Column("queue", String(LONGEST_NAME), primary_key=True),
    Column("paused_at", Moment),
    Column("paused_until", Moment),
    _moments_in_range("sqlq_queues", "paused_at", "paused_until"),
    _integer_times("sqlq_queues", "paused_at", "paused_until"),
    _texts("sqlq_queues", "queue"),
)

_SCHEDULE_MOMENTS = ("declared_at", "pinned_at", "paused_at", "retired_at", "last_at", "next_at", "error_at")

schedules = Table(
    "sqlq_schedules",
    metadata,
    Column("name", String(LONGEST_NAME), primary_key=True),
    Column("service", String(LONGEST_NAME)),
    Column("task", **_name()),
    Column("queue", **_name()),
    Column("payload", Text, nullable=False),
    Column("options", Text, nullable=False, server_default="{}"),
    Column("plan", Text, nullable=False),
    Column("declared_plan", Text),
    Column("declared_at", Moment),
    Column("pinned_at", Moment),
    Column("paused_at", Moment),
    Column("retired_at", Moment),
    Column("last_at", Moment, nullable=False, server_default=now()),
    Column("next_at", Moment),
    Column("ticks", Integer, nullable=False, server_default=text("0"), **_in_domain("count")),
    Column("skipped", Integer, nullable=False, server_default=text("0"), **_in_domain("count")),
    Column("recent_jobs", Text, nullable=False, server_default="[]"),
    Column("error", Text),
    Column("error_at", Moment),
    Column("created_at", Moment, nullable=False, server_default=now()),
    _on_sqlite(
        f"ticks BETWEEN 0 AND {MOST_COUNTED} AND skipped BETWEEN 0 AND {MOST_COUNTED}",
        "sqlq_schedules_counts_in_range",
    ),
    _moments_in_range("sqlq_schedules", *_SCHEDULE_MOMENTS, "created_at"),
    _integer_times("sqlq_schedules", *_SCHEDULE_MOMENTS, "created_at"),
    _integers("sqlq_schedules", "ticks", "skipped"),
    _texts("sqlq_schedules", "name", "service", "task", "queue", "payload", "options", "plan", "recent_jobs"),
)

Index(
    "sqlq_schedules_due",
    schedules.c.next_at,
    schedules.c.name,
    postgresql_where=schedules.c.next_at.is_not(None),
    sqlite_where=schedules.c.next_at.is_not(None),
)
flows = Table(
    "sqlq_flows",
    metadata,
    Column("id", BigInteger().with_variant(Integer(), "sqlite"), Identity(always=False), primary_key=True),
    Column("name", **_name(nullable=True)),
    Column("created_at", Moment, nullable=False, server_default=now()),
    _moments_in_range("sqlq_flows", "created_at"),
    _integer_times("sqlq_flows", "created_at"),
    _texts("sqlq_flows", "name"),
    sqlite_autoincrement=True,
)

edges = Table(
    "sqlq_edges",
    metadata,
    Column("job_id", BigInteger, primary_key=True, autoincrement=False),
    Column("depends_on", BigInteger, primary_key=True, autoincrement=False),
    Column("on_outcome", String(7), nullable=False, server_default="success", **_in_domain("on_outcome")),
    Column("place", Integer, nullable=False, server_default=text("0")),
    _on_sqlite(_one_of("on_outcome", ON_OUTCOMES), "sqlq_edges_on_outcome_known"),
    _integers("sqlq_edges", "job_id", "depends_on", "place"),
    sqlite_with_rowid=False,
)
"""What a step waits for: the job `depends_on`, which has to end so. `place` is its place among the steps
before, whose results come in this order. An edge stays as it is for as long as its job has a row."""

Index("sqlq_edges_parent", edges.c.depends_on, edges.c.job_id)


def _definition() -> list[Column[Any]]:
    """The columns of what a limit says; with a wake they travel as the job's task has them. `in_order`: one
    job at a time, in the order of their ids; with `holds` none after one that has failed."""
    return [
        Column("max_running", Integer, **_in_domain("most")),
        Column("rate", Integer, **_in_domain("most")),
        Column("period_ms", BigInteger, **_in_domain("timeout")),
        Column("in_order", Boolean(create_constraint=False), nullable=False, server_default=text("false")),
        Column("holds", Boolean(create_constraint=False), nullable=False, server_default=text("false")),
    ]


limits = Table(
    "sqlq_limits",
    metadata,
    Column("limit_key", String(LONGEST_NAME), primary_key=True),
    *_definition(),
    Column("next_free_at", Moment),
    Column("pinned_at", Moment),
    _on_sqlite(
        f"max_running BETWEEN 1 AND {MOST_COUNTED} AND rate BETWEEN 1 AND {MOST_COUNTED}"
        f" AND period_ms BETWEEN 0 AND {LONGEST_MS}",
        "sqlq_limits_in_range",
    ),
    _moments_in_range("sqlq_limits", "next_free_at", "pinned_at"),
    _integer_times("sqlq_limits", "next_free_at", "pinned_at"),
    _integers("sqlq_limits", "max_running", "rate", "period_ms"),
    _texts("sqlq_limits", "limit_key"),
)
"""One row for each key of a limit that was ever looked at; its lock is what admissions of the key take in
turn. `pinned_at`: an operator has said it, and what a task says does not count."""

wakes = Table(
    "sqlq_wakes",
    metadata,
    Column("id", BigInteger().with_variant(Integer(), "sqlite"), Identity(always=False), primary_key=True),
    Column("at", Moment, nullable=False, server_default=now()),
    Column("limit_key", String(LONGEST_NAME), nullable=False),
    *_definition(),
    _on_sqlite(
        f"max_running BETWEEN 1 AND {MOST_COUNTED} AND rate BETWEEN 1 AND {MOST_COUNTED}"
        f" AND period_ms BETWEEN 0 AND {LONGEST_MS}",
        "sqlq_wakes_in_range",
    ),
    _moments_in_range("sqlq_wakes", "at"),
    _integer_times("sqlq_wakes", "at"),
    _integers("sqlq_wakes", "max_running", "rate", "period_ms"),
    _texts("sqlq_wakes", "limit_key"),
    sqlite_autoincrement=True,
)
"""Which key to look at, and when: written in the transaction that blocks a job by its limit, since nothing
else would ever look at a key of which nothing runs."""

Index("sqlq_wakes_at", wakes.c.at, wakes.c.id)
