"""The tables, as statements need them. Migrations have their rules, NOT NULL, defaults, indexes and views.

Every table stands in the token schema `__sqlq__`. Each statement (or, on connections of sqlq's own, the
engine) replaces the token by the schema of the tables. So neither a caller's `schema_translate_map` nor a
`search_path` can send jobs elsewhere.
"""

from __future__ import annotations

from typing import Any, Literal

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

from sqlq.config.constants import MAX_ATTEMPTS, MAX_NAME
from sqlq.schema.types import Moment

TOKEN_SCHEMA = "__sqlq__"

metadata = MetaData(schema=TOKEN_SCHEMA)

NAME = String(MAX_NAME)
"""The type of the name of a queue or task, and of a key."""

MAX_COUNT = 1_000_000_000
LARGEST_TOKEN = 4_000_000_000_000_000_000
"""Far below the limits of their types; see `one_more` and `next_token`."""


def _columns(**types: Any) -> list[Column[Any]]:
    return [Column(name, kind) for name, kind in types.items()]


def _id() -> Column[int]:
    """Return the column of an id that the database gives."""
    return Column("id", BigInteger().with_variant(Integer(), "sqlite"), Identity(), primary_key=True)


Use = Literal[
    "option", "written", "plain", "replaced", "forgotten", "copied", "reset", "live", "viewed", "waited"
]
"""A writer of a column of jobs, or a copy of a job that has its value.

- option: `NewJob` has a field of its name, which an enqueue writes.
- written: an enqueue computes it.
- plain: an untrusted producer may set it, too. It concerns one job alone: it is no key, no place in a flow or
  a line, and no follow-up.
- replaced: a job that replaces the waiting one with its unique key sets it.
- forgotten: a replaced job begins without it.
- copied: a replay takes it from its original.
- reset: an operator's retry does not keep it.
- live: a job that ends leaves it behind.
- viewed: the view job_states has it.
- waited: others may wait for a job that has a value, so the call that ends the job returns it.
"""
USUAL: tuple[Use, ...] = ("option", "replaced", "copied")
"""The uses of most options."""


def _of_job(name: str, kind: Any, *uses: Use) -> Column[Any]:
    return Column(name, kind, info={"uses": uses})


jobs = Table(
    "jobs",
    metadata,
    _id(),
    _of_job("queue", NAME, "option", "plain", "copied", "viewed"),
    _of_job("task", NAME, *USUAL, "plain", "viewed"),
    _of_job("payload", Text, *USUAL, "plain"),
    _of_job("priority", SmallInteger, *USUAL, "plain", "viewed"),
    _of_job("attempts", Integer, "forgotten", "reset", "viewed"),
    _of_job("max_attempts", Integer, *USUAL, "plain", "viewed"),
    _of_job("available_at", Moment, "written", "plain", "reset", "viewed"),
    _of_job("reserved_at", Moment, "reset", "viewed"),
    _of_job("reserved_by", String(36), "reset", "viewed"),
    _of_job("lease_expires_at", Moment, "live"),
    _of_job("lease_token", BigInteger),  # guard: retry-keeps-the-token
    _of_job("unique_key", NAME, "option"),
    _of_job("unique_until", String(6), "option"),
    _of_job("on_success", Text, *USUAL),
    _of_job("on_failure", Text, *USUAL),
    _of_job("timeout_ms", BigInteger, *USUAL, "plain"),
    _of_job("releases", Integer, "forgotten", "reset"),
    _of_job("losses", Integer, "forgotten", "live"),
    _of_job("unknown_since", Moment, "forgotten", "live"),
    _of_job("cancel_requested_at", Moment, "forgotten", "live"),
    _of_job("errors", Text, "forgotten", "reset"),
    _of_job("headers", Text, *USUAL, "plain", "viewed"),
    _of_job("label", NAME, *USUAL, "plain", "viewed"),
    _of_job("batch_key", NAME, *USUAL, "viewed"),
    _of_job("backoff", Text, *USUAL, "plain"),
    _of_job("retention_ms", BigInteger, *USUAL, "plain"),
    _of_job("progress", DOUBLE_PRECISION, "forgotten", "reset", "viewed"),
    _of_job("progress_of", DOUBLE_PRECISION, "forgotten", "reset", "viewed"),
    _of_job("progress_note", Text, "forgotten", "reset", "viewed"),
    _of_job("schedule", NAME, "option", "copied", "viewed"),
    _of_job("scheduled_for", Moment, "option", "copied", "viewed"),
    _of_job("cursor", Text, "forgotten"),
    _of_job("start_by", Moment, "written", "plain", "replaced", "reset", "viewed"),
    _of_job("flow_id", BigInteger, "written", "viewed", "waited"),
    _of_job("limit_key", NAME, "written", "copied", "viewed", "waited"),
    _of_job("blocked_by", String(5), "written", "live", "viewed"),
    _of_job("due_at", Moment, "written", "live"),
    _of_job("replay_of", BigInteger, "viewed"),
    _of_job("created_at", Moment, "viewed"),
)
"""Each column is declared here, once. `NewJob`, `JobDetails` and `ClaimedJob` name those that they have."""


def columns_of(*uses: Use) -> list[Column[Any]]:
    """Return the columns of jobs with at least one of these uses."""
    return [column for column in jobs.columns if not {*uses}.isdisjoint(column.info.get("uses", ()))]


def names_of(*uses: Use) -> tuple[str, ...]:
    """Return the names of these columns. They are plain strings: Python finds attributes by them twice as
    fast as by SQLAlchemy's `quoted_name`."""
    return tuple(str(column.name) for column in columns_of(*uses))


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
    return case((counter < MAX_COUNT, counter + 1), else_=counter)


def next_token(token: ColumnElement[int]) -> ColumnElement[int]:
    """The lease token after this one, which is never 0; after the largest it begins anew."""
    return case((token < LARGEST_TOKEN, token + 1), else_=1)


CARRIED = tuple(c.name for c in jobs.columns if c.name not in names_of("live"))
"""The columns that a job takes along to finished_jobs or failed_jobs, and back from failed_jobs."""


def _ended(name: str, **own: Any) -> Table:
    """A table of ended jobs: the columns from the row in jobs, its own ones, and those that only an ended job
    has.

    `start_ms` is the time from its last claim to the start of the attempt, unless that was its first claim.
    `expires_at` is the end of a retention of its own, generated by the database.
    """
    carried = [
        Column(c.name, c.type, primary_key=c.primary_key, autoincrement=False)
        for c in (jobs.c[name] for name in CARRIED)
    ]
    return Table(name, metadata, *carried, *_columns(**own, start_ms=BigInteger, expires_at=Moment))


HOLDS_KEY_TO_THE_END = "unique_until = 'pruned'"
"""Which ended rows still hold their unique key."""


finished_jobs = _ended("finished_jobs", outcome=String(9), result=Text, reason=Text, finished_at=Moment)
failed_jobs = _ended(
    "failed_jobs",
    reason=String(13),
    exception=Text,
    message=Text,
    traceback=Text,
    fingerprint=String(12),
    failed_at=Moment,
)
workers = Table(
    "sqlq_workers",
    metadata,
    Column("id", String(36), primary_key=True),
    *_columns(
        host=Text,
        pid=Integer,
        supervisor_pid=Integer,
        version=Text,
        queues=Text,
        concurrency=Integer,
        started_at=Moment,
        seen_at=Moment,
        name=Text,
        state=Text,
        state_at=Moment,
        asked=Text,
        asked_at=Moment,
        cancels_at=Moment,
        clock_at=Moment,
        start_error=Text,
    ),
)

queues = Table(
    "sqlq_queues",
    metadata,
    Column("queue", NAME, primary_key=True),
    *_columns(
        paused_at=Moment,
        paused_until=Moment,
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
        number=BigInteger,
        database_user=Text,
        seen_at=Moment,
        stopped_at=Moment,
        ended_at=Moment,
    ),
)
"""The actions of operators. `target` is the command that does the same. An action in batches writes its
`number` and `seen_at` after each, and ends where `stopped_at` is set. `database_user` is written by the
database: an operator's role may not."""

schedules = Table(
    "sqlq_schedules",
    metadata,
    Column("name", NAME, primary_key=True),
    *_columns(
        service=NAME,
        task=NAME,
        queue=NAME,
        payload=Text,
        options=Text,
        plan=Text,
        declared_at=Moment,
        paused_at=Moment,
        retired_at=Moment,
        last_at=Moment,
        next_at=Moment,
        ticks=Integer,
        skipped=Integer,
        recent_jobs=Text,
        error=Text,
        error_at=Moment,
        created_at=Moment,
    ),
)

flows = Table(
    "sqlq_flows",
    metadata,
    _id(),
    *_columns(
        name=NAME,
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
the steps before, whose results come in this order. An edge stays for as long as its job has a row. An
unblock rewrites that of an optional step which has finished, and of a skipped one."""


def _definition() -> list[Any]:
    """The columns of a limit's rule; a wake carries the rule of the job's task. `in_order`: one job at a
    time, in the order of their ids; with `holds` none after one that has failed."""
    return _columns(
        max_running=Integer,
        rate=Integer,
        period_ms=BigInteger,
        in_order=Boolean,
        holds=Boolean,
    )


limits = Table(
    "sqlq_limits",
    metadata,
    Column("limit_key", NAME, primary_key=True),
    *_definition(),
    *_columns(
        next_free_at=Moment,
        pinned_at=Moment,
        used_at=Moment,
        closed_until=Moment,
    ),
)
"""One row for each key of a limit in recent use; admissions of a key take turns by its lock. `pinned_at`: an
operator has overridden the rule, and the task's does not count. `used_at`: the last look at it, to about a
day. `closed_until`: no job of the key starts before."""

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

signals = Table(
    "sqlq_signals",
    metadata,
    Column("name", NAME, primary_key=True),
    *_columns(
        value=Text,
        created_at=Moment,
        expires_at=Moment,
        look_at=Moment,
    ),
)
"""The first signal of each name, until it expires. `look_at`: no worker has looked for its waits yet."""

waits = Table(
    "sqlq_waits",
    metadata,
    Column("job_id", BigInteger, primary_key=True, autoincrement=False),
    *_columns(
        name=NAME,
        until=Moment,
        look_at=Moment,
        outcome=String(7),
        value=Text,
    ),
)
"""The jobs that wait for a signal of this name, and those that have waited and read its value. `look_at`: the
time of the next look."""

TABLE_NAMES = [table.name for table in metadata.tables.values()]
VIEWS = ("queue_stats", "job_states")
"""The stable read contract over tables that may change, in an order in which they can be dropped.

A user's views may depend on these, which then cannot be dropped, or only with the user's. So a revision
replaces a view only if it changes its definition.
"""

INDEXES = frozenset(
    (
        *("jobs_claim", "jobs_unique_key", "jobs_rescue", "jobs_flow", "jobs_batch"),
        *(
            "jobs_admitted",
            "jobs_line",
            "jobs_line_by_id",
            "failed_jobs_limit",
            "failed_jobs_error",
            "failed_jobs_sample",
        ),
        *("sqlq_schedules_due", "sqlq_edges_parent", "sqlq_limits_used", "sqlq_wakes_at"),
        *("sqlq_signals_look", "sqlq_signals_expire", "sqlq_waits_look", "sqlq_waits_name"),
        *(
            f"{ended}_jobs_{by}"
            for ended in ("finished", "failed")
            for by in ("prune", "expire", "unique_key", "unblock", "flow", "batch")
        ),
    )
)
"""The names of the indexes; MariaDB has some others."""
