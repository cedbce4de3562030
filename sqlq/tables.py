"""The views, and the tables of ended jobs, as SQLAlchemy Tables to select from and to join with your own:

    select(Order, job_states.c.state).join(job_states, job_states.c.id == Order.job_id)

For reading only: sqlq's migrations make and change them. They are in a MetaData of their own, so that your
Alembic does not see them. On PostgreSQL they are found by the search_path. Where the tables are in a schema
that is not on it, take copies that name it:

    job_states = sqlq.tables.job_states.to_metadata(MetaData(), schema="queue")
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Dialect,
    Float,
    Integer,
    MetaData,
    String,
    Table,
    Text,
)
from sqlalchemy.types import TypeEngine

from sqlq.schema import tables
from sqlq.schema.types import Moment

__all__ = ["failed_jobs", "finished_jobs", "job_states", "queue_stats"]


class ShownMoment(Moment):
    """An instant as the views show it: `timestamptz`, on MariaDB DATETIME(6) in UTC, or on SQLite ISO 8601
    text in UTC."""

    cache_ok = True
    on_sqlite = String()

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> Any:
        if value is None or dialect.name != "sqlite":
            return super().process_bind_param(value, dialect)
        return value.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        if isinstance(value, datetime) and value.tzinfo is None:
            return value.replace(tzinfo=UTC)
        return datetime.fromisoformat(value) if isinstance(value, str) else value


_metadata = MetaData()


def _view(name: str, key: Column[Any], *columns: Column[Any], **types: type[TypeEngine[Any]]) -> Table:
    return Table(name, _metadata, key, *columns, *(Column(*other) for other in types.items()))


job_states = _view(
    "job_states",
    Column("id", BigInteger, primary_key=True),
    *(
        Column(column.name, ShownMoment if isinstance(column.type, Moment) else column.type)
        for column in tables.columns_of("viewed")
    ),
    state=String,
    ended_at=ShownMoment,
    wait_seconds=Float,
    error=Text,
)
"""The view with one row for every job, whatever its state."""

queue_stats = _view(
    "queue_stats",
    Column("queue", String, primary_key=True),
    available=BigInteger,
    scheduled=BigInteger,
    blocked=BigInteger,
    running=BigInteger,
    failed=BigInteger,
    oldest_available_at=ShownMoment,
    oldest_wait_seconds=Float,
    paused=Integer,
)
"""The view with one row for every queue that holds waiting, running or failed jobs."""

finished_jobs = tables.finished_jobs.to_metadata(_metadata, schema=None)  # type: ignore[arg-type]  # none
"""The table of jobs that finished or were cancelled, with their results. Unlike a view it may change in a
minor version."""

failed_jobs = tables.failed_jobs.to_metadata(_metadata, schema=None)  # type: ignore[arg-type]  # none
"""The table of jobs that failed for good, with their errors. Unlike a view it may change in a minor
version."""
