"""The tables, as statements need them. The migrations have their rules, defaults, indexes and views.

Every table stands in the token schema `__sqlq__`. Each statement (or, on connections of sqlq's own, the
engine) replaces the token by the schema of the tables. So neither a caller's `schema_translate_map` nor a
`search_path` can send jobs elsewhere.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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


class _OrNull(NamedTuple):
    """The type of a column that may be NULL."""

    type: Any


def _columns(**types: Any) -> list[Column[Any]]:
    return [
        Column(name, kind.type) if isinstance(kind, _OrNull) else Column(name, kind, nullable=False)
        for name, kind in types.items()
    ]


def _id() -> Column[int]:
    """Return the column of an id that the database gives."""
    return Column("id", BigInteger().with_variant(Integer(), "sqlite"), Identity(), primary_key=True)


jobs = Table(
    "jobs",
    metadata,
    _id(),
    *_columns(
        queue=NAME,
        task=NAME,
        payload=Text,
        priority=SmallInteger,
        attempts=Integer,
        max_attempts=_OrNull(Integer),
        available_at=Moment,
        reserved_at=_OrNull(Moment),
        reserved_by=_OrNull(String(36)),
        lease_expires_at=_OrNull(Moment),
        lease_token=BigInteger,
        unique_key=_OrNull(NAME),
        unique_until=String(6),
        on_success=_OrNull(Text),
        on_failure=_OrNull(Text),
        timeout_ms=_OrNull(BigInteger),
        releases=Integer,
        losses=Integer,
        unknown_since=_OrNull(Moment),
        cancel_requested_at=_OrNull(Moment),
        errors=_OrNull(Text),
        headers=_OrNull(Text),
        label=_OrNull(NAME),
        group_key=_OrNull(NAME),
        backoff=_OrNull(Text),
        retention_ms=_OrNull(BigInteger),
        progress=_OrNull(DOUBLE_PRECISION),
        progress_of=_OrNull(DOUBLE_PRECISION),
        progress_note=_OrNull(Text),
        schedule=_OrNull(NAME),
        scheduled_for=_OrNull(Moment),
        cursor=_OrNull(Text),
        start_by=_OrNull(Moment),
        flow_id=_OrNull(BigInteger),
        limit_key=_OrNull(NAME),
        blocked_by=_OrNull(String(5)),
        due_at=_OrNull(Moment),
        replay_of=_OrNull(BigInteger),
        created_at=Moment,
    ),
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


def _ended(name: str, **own: Any) -> Table:
    """A table of ended jobs: the columns from the row in jobs, its own ones, and those that only an ended job
    has.

    `start_ms` is the time from its last claim to the start of the attempt, unless that was its first claim.
    `expires_at` is the end of a retention of its own, generated by the database.
    """
    carried = [
        Column(c.name, c.type, primary_key=c.primary_key, nullable=c.nullable, autoincrement=False)
        for c in (jobs.c[name] for name in CARRIED)
    ]
    return Table(
        name, metadata, *carried, *_columns(**own, start_ms=_OrNull(BigInteger), expires_at=_OrNull(Moment))
    )


HOLDS_KEY_TO_THE_END = "unique_until = 'pruned'"
"""Which ended rows still hold their unique key."""


finished_jobs = _ended(
    "finished_jobs", outcome=String(9), result=_OrNull(Text), reason=_OrNull(Text), finished_at=Moment
)
failed_jobs = _ended(
    "failed_jobs",
    reason=String(13),
    exception=_OrNull(Text),
    message=_OrNull(Text),
    traceback=_OrNull(Text),
    failed_at=Moment,
)
workers = Table(
    "sqlq_workers",
    metadata,
    Column("id", String(36), primary_key=True),
    *_columns(
        host=Text,
        pid=Integer,
        supervisor_pid=_OrNull(Integer),
        version=Text,
        queues=_OrNull(Text),
        concurrency=Integer,
        started_at=Moment,
        seen_at=Moment,
        name=_OrNull(Text),
        state=Text,
        state_at=Moment,
        asked=_OrNull(Text),
        asked_at=_OrNull(Moment),
        cancels_at=_OrNull(Moment),
    ),
)

queues = Table(
    "sqlq_queues",
    metadata,
    Column("queue", NAME, primary_key=True),
    *_columns(
        paused_at=_OrNull(Moment),
        paused_until=_OrNull(Moment),
    ),
)

audit = Table(
    "sqlq_audit",
    metadata,
    _id(),
    *_columns(
        at=Moment,
        actor=Text,
        action=Text,
        target=Text,
        number=_OrNull(BigInteger),
        database_user=_OrNull(Text),
    ),
)
"""The actions of operators. `target` is the command that does the same. `number` is NULL until the action
has ended. `database_user` is written by the database: an operator's role may not."""

schedules = Table(
    "sqlq_schedules",
    metadata,
    Column("name", NAME, primary_key=True),
    *_columns(
        service=_OrNull(NAME),
        task=NAME,
        queue=NAME,
        payload=Text,
        options=Text,
        plan=Text,
        declared_at=_OrNull(Moment),
        paused_at=_OrNull(Moment),
        retired_at=_OrNull(Moment),
        last_at=Moment,
        next_at=_OrNull(Moment),
        ticks=Integer,
        skipped=Integer,
        recent_jobs=Text,
        error=_OrNull(Text),
        error_at=_OrNull(Moment),
        created_at=Moment,
    ),
)

flows = Table(
    "sqlq_flows",
    metadata,
    _id(),
    *_columns(
        name=_OrNull(NAME),
        created_at=Moment,
    ),
)

edges = Table(
    "sqlq_edges",
    metadata,
    Column("job_id", BigInteger, primary_key=True, autoincrement=False),
    Column("depends_on", BigInteger, primary_key=True, autoincrement=False),
    *_columns(
        on_outcome=String(7),
        place=Integer,
    ),
)
"""A wait of a step for the job `depends_on`, which has to end with `on_outcome`. `place` is its place among
the steps before, whose results come in this order. An edge stays as it is for as long as its job has a
row."""


def _definition() -> list[Any]:
    """The columns of a limit's rule; a wake carries the rule of the job's task. `in_order`: one job at a
    time, in the order of their ids; with `holds` none after one that has failed."""
    return _columns(
        max_running=_OrNull(Integer),
        rate=_OrNull(Integer),
        period_ms=_OrNull(BigInteger),
        in_order=Boolean,
        holds=Boolean,
    )


limits = Table(
    "sqlq_limits",
    metadata,
    Column("limit_key", NAME, primary_key=True),
    *_definition(),
    *_columns(
        next_free_at=_OrNull(Moment),
        pinned_at=_OrNull(Moment),
        used_at=Moment,
    ),
)
"""One row for each key of a limit in recent use; admissions of a key take turns by its lock. `pinned_at`: an
operator has overridden the rule, and the task's does not count. `used_at`: the last look at it, to about a
day."""

wakes = Table(
    "sqlq_wakes",
    metadata,
    _id(),
    *_columns(
        at=Moment,
        limit_key=NAME,
    ),
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
