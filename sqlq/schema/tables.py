"""The tables, as statements need them. The migrations have their rules, defaults, indexes and views.

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
    Identity,
    Integer,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    case,
    func,
    literal_column,
)

from sqlq.config.constants import LONGEST_NAME, MAX_ATTEMPTS
from sqlq.schema.types import Moment

TOKEN_SCHEMA = "__sqlq__"

metadata = MetaData(schema=TOKEN_SCHEMA)

NAME = String(LONGEST_NAME)
"""The type of the name of a queue or task, and of a key."""

MOST_COUNTED = 1_000_000_000
LARGEST_TOKEN = 4_000_000_000_000_000_000
"""Far below the limits of their types; see `one_more` and `next_token`."""


def _id() -> Column[int]:
    """Return the column of an id that the database gives."""
    return Column("id", BigInteger().with_variant(Integer(), "sqlite"), Identity(), primary_key=True)


jobs = Table(
    "jobs",
    metadata,
    _id(),
    Column("queue", NAME, nullable=False),
    Column("task", NAME, nullable=False),
    Column("payload", Text, nullable=False),
    Column("priority", SmallInteger, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("max_attempts", Integer),
    Column("available_at", Moment, nullable=False),
    Column("reserved_at", Moment),
    Column("reserved_by", String(36)),
    Column("lease_expires_at", Moment),
    Column("lease_token", BigInteger, nullable=False),
    Column("unique_key", NAME),
    Column("unique_until", String(6), nullable=False),
    Column("on_success", Text),
    Column("on_failure", Text),
    Column("timeout_ms", BigInteger),
    Column("releases", Integer, nullable=False),
    Column("losses", Integer, nullable=False),
    Column("unknown_since", Moment),
    Column("cancel_requested_at", Moment),
    Column("errors", Text),
    Column("headers", Text),
    Column("label", NAME),
    Column("group_key", NAME),
    Column("backoff", Text),
    Column("retention_ms", BigInteger),
    Column("progress", DOUBLE_PRECISION),
    Column("progress_of", DOUBLE_PRECISION),
    Column("progress_note", Text),
    Column("schedule", NAME),
    Column("scheduled_for", Moment),
    Column("cursor", Text),
    Column("start_by", Moment),
    Column("flow_id", BigInteger),
    Column("limit_key", NAME),
    Column("blocked_by", String(5)),
    Column("due_at", Moment),
    Column("replay_of", BigInteger),
    Column("created_at", Moment, nullable=False),
)

IS_RESERVED, IS_UNRESERVED = jobs.c.reserved_at.is_not(None), jobs.c.reserved_at.is_(None)

HOLDS_KEY = "unique_key IS NOT NULL AND (unique_until <> 'start' OR lease_token = 0)"
"""Which live rows hold their unique key. With "start" the first claim releases the key. The token is the only
permanent mark of a claim. It never returns to 0, so no retry can collide with a newer job."""

attempts_allowed = func.coalesce(jobs.c.max_attempts, literal_column(str(MAX_ATTEMPTS)))
"""The number of attempts that a job may have. A row inserted by SQL may have none; then the claim of a worker
that knows the task writes the task's. Until then the default counts."""


def blocked_by(reason: str) -> ColumnElement[bool]:
    """The jobs that wait for this reason. It is a literal, since a generic plan finds no partial index by a
    parameter."""
    return jobs.c.blocked_by == literal_column(f"'{reason}'")  # guard: partial-indexes-need-literals


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
    """The columns that an ended job has from the row in jobs."""
    return [
        Column(c.name, c.type, primary_key=c.primary_key, nullable=c.nullable, autoincrement=False)
        for c in (jobs.c[name] for name in CARRIED)
    ]


def _of_the_end() -> list[Column[Any]]:
    """The columns that only an ended job has. `start_ms` is the time from its last claim to the start of the
    attempt, unless that was its first claim. `expires_at` is the end of a retention of its own, generated by
    the database."""
    return [Column("start_ms", BigInteger), Column("expires_at", Moment)]


HOLDS_KEY_TO_THE_END = "unique_until = 'pruned'"
"""Which ended rows still hold their unique key."""


finished_jobs = Table(
    "finished_jobs",
    metadata,
    *_carried(),
    Column("outcome", String(9), nullable=False),
    Column("result", Text),
    Column("reason", Text),
    Column("finished_at", Moment, nullable=False),
    *_of_the_end(),
)
failed_jobs = Table(
    "failed_jobs",
    metadata,
    *_carried(),
    Column("reason", String(13), nullable=False),
    Column("exception", Text),
    Column("message", Text),
    Column("traceback", Text),
    Column("failed_at", Moment, nullable=False),
    *_of_the_end(),
)
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
    Column("started_at", Moment, nullable=False),
    Column("seen_at", Moment, nullable=False),
    Column("name", Text),
    Column("state", Text, nullable=False),
    Column("state_at", Moment, nullable=False),
    Column("asked", Text),
    Column("asked_at", Moment),
    Column("cancels_at", Moment),
)

queues = Table(
    "sqlq_queues",
    metadata,
    Column("queue", NAME, primary_key=True),
    Column("paused_at", Moment),
    Column("paused_until", Moment),
)

audit = Table(
    "sqlq_audit",
    metadata,
    _id(),
    Column("at", Moment, nullable=False),
    Column("actor", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("target", Text, nullable=False),
    Column("number", BigInteger),
    Column("database_user", Text),
)
"""The actions of operators. `target` is the command that does the same. `number` is NULL until the action
has ended. `database_user` is written by the database: an operator's role may not."""

schedules = Table(
    "sqlq_schedules",
    metadata,
    Column("name", NAME, primary_key=True),
    Column("service", NAME),
    Column("task", NAME, nullable=False),
    Column("queue", NAME, nullable=False),
    Column("payload", Text, nullable=False),
    Column("options", Text, nullable=False),
    Column("plan", Text, nullable=False),
    Column("declared_at", Moment),
    Column("paused_at", Moment),
    Column("retired_at", Moment),
    Column("last_at", Moment, nullable=False),
    Column("next_at", Moment),
    Column("ticks", Integer, nullable=False),
    Column("skipped", Integer, nullable=False),
    Column("recent_jobs", Text, nullable=False),
    Column("error", Text),
    Column("error_at", Moment),
    Column("created_at", Moment, nullable=False),
)

flows = Table(
    "sqlq_flows",
    metadata,
    _id(),
    Column("name", NAME),
    Column("created_at", Moment, nullable=False),
)

edges = Table(
    "sqlq_edges",
    metadata,
    Column("job_id", BigInteger, primary_key=True, autoincrement=False),
    Column("depends_on", BigInteger, primary_key=True, autoincrement=False),
    Column("on_outcome", String(7), nullable=False),
    Column("place", Integer, nullable=False),
)
"""A wait of a step for the job `depends_on`, which has to end with `on_outcome`. `place` is its place among
the steps before, whose results come in this order. An edge stays as it is for as long as its job has a
row."""


def _definition() -> list[Any]:
    """The columns of a limit's rule; a wake carries the rule of the job's task. `in_order`: one job at a
    time, in the order of their ids; with `holds` none after one that has failed."""
    return [
        Column("max_running", Integer),
        Column("rate", Integer),
        Column("period_ms", BigInteger),
        Column("in_order", Boolean, nullable=False),
        Column("holds", Boolean, nullable=False),
    ]


limits = Table(
    "sqlq_limits",
    metadata,
    Column("limit_key", NAME, primary_key=True),
    *_definition(),
    Column("next_free_at", Moment),
    Column("pinned_at", Moment),
    Column("used_at", Moment, nullable=False),
)
"""One row for each key of a limit in recent use; admissions of a key take turns by its lock. `pinned_at`: an
operator has overridden the rule, and the task's does not count. `used_at`: the last look at it, to about a
day."""

wakes = Table(
    "sqlq_wakes",
    metadata,
    _id(),
    Column("at", Moment, nullable=False),
    Column("limit_key", NAME, nullable=False),
    *_definition(),
)
"""Which key to look at, and when. The transaction that blocks a job by its limit writes it. Without running
jobs, nothing else would ever look at the key."""

VIEWS = ("queue_stats", "job_states")
"""The stable read contract over tables that may change, in an order in which they can be dropped.

A user's views may depend on these, which then cannot be dropped, or only with the user's. So a revision
replaces a view only if it changes its definition.
"""

INDEXES = frozenset(
    (
        *("jobs_claim", "jobs_unique_key", "jobs_rescue", "jobs_flow", "jobs_group"),
        *("jobs_admitted", "jobs_line", "jobs_line_by_id", "failed_jobs_limit"),
        *("sqlq_schedules_due", "sqlq_edges_parent", "sqlq_limits_used", "sqlq_wakes_at"),
        *(
            f"{ended}_jobs_{by}"
            for ended in ("finished", "failed")
            for by in ("prune", "expire", "unique_key", "unblock", "flow", "group")
        ),
    )
)
"""The names of the indexes; MariaDB has some others."""
