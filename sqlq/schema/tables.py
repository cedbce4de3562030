"""The tables as SQLAlchemy sees them.

Every table stands in the token schema `__sqlq__`. Each statement (or, on connections of sqlq's own, the
engine) replaces the token by the schema of the tables. So neither a caller's `schema_translate_map` nor a
`search_path` can send jobs elsewhere.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    DOUBLE_PRECISION,
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Computed,
    Identity,
    Integer,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    case,
    column,
    func,
    literal_column,
    text,
)

from sqlq.config.constants import MAX_ATTEMPTS
from sqlq.config.durations import LONGEST_MS
from sqlq.schema.rules import (
    BLOCKED_BY,
    FAILURE_REASONS,
    LARGEST_TOKEN,
    LONGEST_NAME,
    MOST_COUNTED,
    ON_OUTCOMES,
    OUTCOMES,
    UNIQUE_UNTIL,
    in_domain,
    named,
    of_their_types,
    on_sqlite,
    one_of,
)
from sqlq.schema.types import FAR, Moment, milliseconds_of, moment_after, now

TOKEN_SCHEMA = "__sqlq__"

metadata = MetaData(schema=TOKEN_SCHEMA)


def _table(name: str, *items: Any, numbers: str = "", texts: str = "", **kw: Any) -> Table:
    """Describe a table. On SQLite its timestamps and the named columns hold only values of their types."""
    moments = [item for item in items if isinstance(item, Column) and isinstance(item.type, Moment)]
    return Table(name, metadata, *items, *of_their_types(name, moments, numbers, texts), **kw)


jobs = _table(
    "jobs",
    Column("id", BigInteger().with_variant(Integer(), "sqlite"), Identity(always=False), primary_key=True),
    Column("queue", **named(), server_default="default"),
    Column("task", **named()),
    Column("payload", Text, nullable=False, server_default="{}"),
    Column("priority", SmallInteger, nullable=False, server_default=text("0"), **in_domain("priority")),
    Column("attempts", Integer, nullable=False, server_default=text("0"), **in_domain("count")),
    Column("max_attempts", Integer, **in_domain("most")),
    Column("available_at", Moment, nullable=False, server_default=now()),
    Column("reserved_at", Moment),
    Column("reserved_by", String(36)),
    Column("lease_expires_at", Moment),
    Column("lease_token", BigInteger, nullable=False, server_default=text("0"), **in_domain("token")),
    Column("unique_key", **named(nullable=True)),
    Column("unique_until", String(6), nullable=False, server_default="finish", **in_domain("until")),
    Column("on_success", Text),
    Column("on_failure", Text),
    Column("timeout_ms", BigInteger, **in_domain("timeout")),
    Column("releases", Integer, nullable=False, server_default=text("0"), **in_domain("count")),
    Column("losses", Integer, nullable=False, server_default=text("0"), **in_domain("count")),
    Column("unknown_since", Moment),
    Column("cancel_requested_at", Moment),
    Column("errors", Text, **in_domain("errors")),
    Column("headers", Text),
    Column("label", **named(nullable=True)),
    Column("group_key", **named(nullable=True)),
    Column("backoff", Text),
    Column("retention_ms", BigInteger, **in_domain("timeout")),
    Column("progress", DOUBLE_PRECISION),
    Column("progress_of", DOUBLE_PRECISION),
    Column("progress_note", Text),
    Column("schedule", **named(nullable=True)),
    Column("scheduled_for", Moment),
    Column("cursor", Text),
    Column("start_by", Moment),
    Column("flow_id", BigInteger),
    Column("limit_key", **named(nullable=True)),
    Column("blocked_by", String(5), **in_domain("blocked")),
    Column("due_at", Moment),
    Column("replay_of", BigInteger),
    Column("created_at", Moment, nullable=False, server_default=now()),
    # Where the largest id there can be was once given by hand, SQLite gives no more. (0 and less are no job's
    # id.)
    on_sqlite("id BETWEEN 1 AND 4000000000000000000", "jobs_id_in_range"),
    on_sqlite("priority BETWEEN -100 AND 100", "jobs_priority_in_range"),
    # Far below the limits of their types; see `one_more` and `next_token`.
    on_sqlite(
        f"attempts BETWEEN 0 AND {MOST_COUNTED} AND max_attempts BETWEEN 1 AND {MOST_COUNTED}"
        f" AND releases BETWEEN 0 AND {MOST_COUNTED} AND losses BETWEEN 0 AND {MOST_COUNTED}"
        f" AND lease_token BETWEEN 0 AND {LARGEST_TOKEN}",
        "jobs_attempts_in_range",
    ),
    # No time limit, or one that a thread can wait for; a retention likewise.
    on_sqlite(
        f"timeout_ms BETWEEN 0 AND {LONGEST_MS} AND retention_ms BETWEEN 0 AND {LONGEST_MS}",
        "jobs_timeout_in_range",
    ),
    on_sqlite("length(errors) >= 2", "jobs_errors_are_an_array"),
    on_sqlite(one_of("unique_until", UNIQUE_UNTIL), "jobs_unique_until_known"),
    on_sqlite(one_of("blocked_by", BLOCKED_BY), "jobs_blocked_by_known"),
    # A claim must not find a blocked job, and nothing would ever unblock a job that is not marked as blocked.
    on_sqlite(f"(blocked_by IS NULL) = (available_at < {milliseconds_of(FAR)})", "jobs_blocked_is_far"),
    on_sqlite(
        "(reserved_at IS NULL) = (reserved_by IS NULL) AND (reserved_at IS NULL) = (lease_expires_at IS "
        "NULL)",
        "jobs_reservation_is_whole",
    ),
    numbers="priority attempts max_attempts lease_token timeout_ms retention_ms releases losses flow_id "
    "replay_of",
    sqlite_autoincrement=True,
)

HOLDS_KEY = "unique_key IS NOT NULL AND (unique_until <> 'start' OR lease_token = 0)"
"""Which live rows hold their unique key. With "start" the first claim releases the key. The token is the only
permanent mark of a claim. It never returns to 0, so no retry can collide with a newer job."""

IN_TIME_ONLY = "start_by IS NOT NULL AND reserved_at IS NULL AND attempts = 0"
"""Which rows end when their time is over: those that wait and have not been started yet."""

attempts_allowed = func.coalesce(jobs.c.max_attempts, literal_column(str(MAX_ATTEMPTS)))
"""The number of attempts that a job may have. A row inserted by SQL may have none; then the claim of a worker
that knows the task writes the task's. Until then the default counts."""


def one_more(counter: ColumnElement[int]) -> ColumnElement[int]:
    """A counter plus one, up to its maximum. So a row that SQL set to the maximum does not fail a statement
    that writes it together with others."""
    return case((counter < MOST_COUNTED, counter + 1), else_=counter)


def next_token(token: ColumnElement[int]) -> ColumnElement[int]:
    """The lease token after this one, which is never 0; after the largest it begins anew."""
    return case((token < LARGEST_TOKEN, token + 1), else_=1)


_LEFT_BEHIND = ("lease_expires_at", "losses", "unknown_since", "cancel_requested_at", "blocked_by", "due_at")
CARRIED = tuple(c.name for c in jobs.columns if c.name not in _LEFT_BEHIND)
"""The columns that a job takes along to finished_jobs or failed_jobs, and back from failed_jobs."""


def _carried() -> list[Column[Any]]:
    """The columns of an ended job; no defaults, for every value comes from the row in jobs."""
    return [
        Column(
            c.name, c.type, primary_key=c.primary_key, nullable=c.nullable, autoincrement=False, info=c.info
        )
        for c in (jobs.c[name] for name in CARRIED)
    ]


def _of_the_end() -> list[Column[Any]]:
    """The columns that only an ended job has. `start_ms` is the time from its last claim to the start of the
    attempt, unless that was its first claim. `replayed_as` is the id of its replay."""
    return [Column("start_ms", BigInteger), Column("replayed_as", BigInteger)]


def _expires(ended_at: str) -> Column[Any]:
    """The end of a retention of the job's own; NULL where it has none."""
    return Column(
        "expires_at", Moment, Computed(moment_after(column(ended_at), column("retention_ms")), persisted=True)
    )


HOLDS_KEY_TO_THE_END = "unique_until = 'pruned'"
"""Which ended rows still hold their unique key."""


finished_jobs = _table(
    "finished_jobs",
    *_carried(),
    Column("outcome", String(9), nullable=False, **in_domain("outcome")),
    Column("result", Text),
    Column("reason", Text),
    Column("finished_at", Moment, nullable=False, server_default=now()),
    *_of_the_end(),
    _expires("finished_at"),
    on_sqlite(one_of("outcome", OUTCOMES), "finished_jobs_outcome_known"),
)
failed_jobs = _table(
    "failed_jobs",
    *_carried(),
    Column("reason", String(13), nullable=False, **in_domain("reason")),
    Column("exception", Text),
    Column("message", Text),
    Column("traceback", Text),
    Column("failed_at", Moment, nullable=False, server_default=now()),
    *_of_the_end(),
    _expires("failed_at"),
    on_sqlite(one_of("reason", FAILURE_REASONS), "failed_jobs_reason_known"),
)
workers = _table(
    "sqlq_workers",
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
    numbers="pid supervisor_pid concurrency unstarted",
    texts="id host version queues held_jobs name state asked",
)

queues = _table(
    "sqlq_queues",
    Column("queue", String(LONGEST_NAME), primary_key=True),
    Column("paused_at", Moment),
    Column("paused_until", Moment),
    texts="queue",
)

tasks = _table(
    "sqlq_tasks",
    Column("task", String(LONGEST_NAME), primary_key=True),
    Column("paused_at", Moment),
    Column("paused_until", Moment),
    texts="task",
)

audit = _table(
    "sqlq_audit",
    Column("id", BigInteger().with_variant(Integer(), "sqlite"), Identity(always=False), primary_key=True),
    Column("at", Moment, nullable=False, server_default=now()),
    Column("actor", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("target", Text, nullable=False),
    Column("number", BigInteger),
    numbers="number",
    texts="actor action target",
    sqlite_autoincrement=True,
)
"""The actions of operators. `target` is the command that does the same. `number` is NULL until the action
has ended."""

schedules = _table(
    "sqlq_schedules",
    Column("name", String(LONGEST_NAME), primary_key=True),
    Column("service", String(LONGEST_NAME)),
    Column("task", **named()),
    Column("queue", **named()),
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
    Column("ticks", Integer, nullable=False, server_default=text("0"), **in_domain("count")),
    Column("skipped", Integer, nullable=False, server_default=text("0"), **in_domain("count")),
    Column("recent_jobs", Text, nullable=False, server_default="[]"),
    Column("error", Text),
    Column("error_at", Moment),
    Column("created_at", Moment, nullable=False, server_default=now()),
    on_sqlite(
        f"ticks BETWEEN 0 AND {MOST_COUNTED} AND skipped BETWEEN 0 AND {MOST_COUNTED}",
        "sqlq_schedules_counts_in_range",
    ),
    numbers="ticks skipped",
    texts="name service task queue payload options plan recent_jobs",
)

flows = _table(
    "sqlq_flows",
    Column("id", BigInteger().with_variant(Integer(), "sqlite"), Identity(always=False), primary_key=True),
    Column("name", **named(nullable=True)),
    Column("created_at", Moment, nullable=False, server_default=now()),
    texts="name",
    sqlite_autoincrement=True,
)

edges = _table(
    "sqlq_edges",
    Column("job_id", BigInteger, primary_key=True, autoincrement=False),
    Column("depends_on", BigInteger, primary_key=True, autoincrement=False),
    Column("on_outcome", String(7), nullable=False, server_default="success", **in_domain("on_outcome")),
    Column("place", Integer, nullable=False, server_default=text("0")),
    on_sqlite(one_of("on_outcome", ON_OUTCOMES), "sqlq_edges_on_outcome_known"),
    numbers="job_id depends_on place",
    sqlite_with_rowid=False,
)
"""A wait of a step for the job `depends_on`, which has to end with `on_outcome`. `place` is its place among
the steps before, whose results come in this order. An edge stays as it is for as long as its job has a
row."""


def _definition(table: str) -> list[Any]:
    """The columns of a limit's rule; a wake carries the rule of the job's task. `in_order`: one job at a
    time, in the order of their ids; with `holds` none after one that has failed."""
    return [
        Column("max_running", Integer, **in_domain("most")),
        Column("rate", Integer, **in_domain("most")),
        Column("period_ms", BigInteger, **in_domain("timeout")),
        Column("in_order", Boolean(create_constraint=False), nullable=False, server_default=text("false")),
        Column("holds", Boolean(create_constraint=False), nullable=False, server_default=text("false")),
        on_sqlite(
            f"max_running BETWEEN 1 AND {MOST_COUNTED} AND rate BETWEEN 1 AND {MOST_COUNTED}"
            f" AND period_ms BETWEEN 0 AND {LONGEST_MS}",
            f"{table}_in_range",
        ),
    ]


limits = _table(
    "sqlq_limits",
    Column("limit_key", String(LONGEST_NAME), primary_key=True),
    *_definition("sqlq_limits"),
    Column("next_free_at", Moment),
    Column("pinned_at", Moment),
    Column("used_at", Moment, nullable=False, server_default=now()),
    numbers="max_running rate period_ms",
    texts="limit_key",
)
"""One row for each key of a limit in recent use; admissions of a key take turns by its lock. `pinned_at`: an
operator has overridden the rule, and the task's does not count. `used_at`: the last look at it, to about a
day."""

wakes = _table(
    "sqlq_wakes",
    Column("id", BigInteger().with_variant(Integer(), "sqlite"), Identity(always=False), primary_key=True),
    Column("at", Moment, nullable=False, server_default=now()),
    Column("limit_key", String(LONGEST_NAME), nullable=False),
    *_definition("sqlq_wakes"),
    numbers="max_running rate period_ms",
    texts="limit_key",
    sqlite_autoincrement=True,
)
"""Which key to look at, and when. The transaction that blocks a job by its limit writes it. Without running
jobs, nothing else would ever look at the key."""
