"""The views, and the tables of ended jobs, as SQLAlchemy Tables to select from and to join with your own:

    select(Order, job_states.c.state).join(job_states, job_states.c.id == Order.job_id)

For reading only: sqlq's migrations make and change them. They are in a MetaData of their own, so that your
Alembic does not see them. On PostgreSQL they are found by the search_path. Where the tables are in a schema
that is not on it, take copies that name it:

    job_states = sqlq.tables.job_states.to_metadata(MetaData(), schema="queue")
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, NoReturn

from sqlalchemy import (
    TIMESTAMP,
    BigInteger,
    Column,
    Dialect,
    Float,
    Integer,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    TypeDecorator,
    event,
)
from sqlalchemy.types import TypeEngine

from sqlq.errors import ConfigurationError
from sqlq.schema import tables
from sqlq.schema.types import naive

__all__ = ["failed_jobs", "finished_jobs", "job_states", "queue_stats"]


class ShownMoment(TypeDecorator[datetime]):
    """An instant as the views show it: `timestamptz`, on MariaDB DATETIME(6) in UTC, or on SQLite ISO 8601
    text in UTC."""

    impl = TIMESTAMP(timezone=True)
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        if dialect.name == "mariadb":
            from sqlalchemy.dialects.mysql import DATETIME

            return dialect.type_descriptor(DATETIME(fsp=6))
        shown = String() if dialect.name == "sqlite" else TIMESTAMP(timezone=True)
        return dialect.type_descriptor(shown)

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> Any:
        if value is None or dialect.name == "postgresql":
            return value
        if dialect.name == "mariadb":
            return naive(value)
        return value.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        if isinstance(value, datetime) and value.tzinfo is None:
            return value.replace(tzinfo=UTC)
        return datetime.fromisoformat(value) if isinstance(value, str) else value


_metadata = MetaData()

job_states = Table(
    "job_states",
    _metadata,
    Column("id", BigInteger, primary_key=True),
    Column("queue", String, nullable=False),
    Column("task", String, nullable=False),
    Column("state", String, nullable=False),
    Column("priority", SmallInteger, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("max_attempts", Integer),
    Column("created_at", ShownMoment, nullable=False),
    Column("available_at", ShownMoment),
    Column("reserved_at", ShownMoment),
    Column("reserved_by", String),
    Column("ended_at", ShownMoment),
    Column("wait_seconds", Float),
    Column("error", Text),
    Column("label", String),
    Column("headers", Text),
    Column("progress", Float),
    Column("progress_of", Float),
    Column("progress_note", Text),
    Column("schedule", String),
    Column("scheduled_for", ShownMoment),
    Column("start_by", ShownMoment),
    Column("flow_id", BigInteger),
    Column("limit_key", String),
    Column("blocked_by", String),
    Column("replay_of", BigInteger),
    Column("group_key", String),
)
"""The view with one row for every job, whatever its state."""

queue_stats = Table(
    "queue_stats",
    _metadata,
    Column("queue", String, primary_key=True),
    Column("available", BigInteger, nullable=False),
    Column("scheduled", BigInteger, nullable=False),
    Column("blocked", BigInteger, nullable=False),
    Column("running", BigInteger, nullable=False),
    Column("failed", BigInteger, nullable=False),
    Column("oldest_available_at", ShownMoment),
    Column("oldest_wait_seconds", Float),
    Column("paused", Integer, nullable=False),
)
"""The view with one row for every queue that holds waiting, running or failed jobs."""

finished_jobs = tables.finished_jobs.to_metadata(_metadata, schema=None)  # type: ignore[arg-type]  # none
"""The table of jobs that finished or were cancelled, with their results. Unlike a view it may change in a
minor version."""

failed_jobs = tables.failed_jobs.to_metadata(_metadata, schema=None)  # type: ignore[arg-type]  # none
"""The table of jobs that failed for good, with their errors. Unlike a view it may change in a minor
version."""


@event.listens_for(_metadata, "before_create")
@event.listens_for(_metadata, "before_drop")
def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise ConfigurationError(
        "sqlq's tables and views are made and removed by `sqlq migrate`, not by this MetaData"
    )
