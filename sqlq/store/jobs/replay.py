"""Replays: copies of ended jobs under new ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, select, union_all

from sqlq.database.dialects import dialect_of
from sqlq.schema.tables import failed_jobs, finished_jobs, jobs
from sqlq.schema.types import now
from sqlq.store.jobs.lookup import BATCH, Selection
from sqlq.store.jobs.rows import in_line, slices
from sqlq.store.limits.wakes import Wake, write
from sqlq.store.workers import notify

COPIED = (
    *("queue", "task", "payload", "priority", "max_attempts", "timeout_ms", "on_success", "on_failure"),
    *("headers", "label", "backoff", "retention_ms", "schedule", "scheduled_for", "limit_key"),
    "group_key",
)
"""The columns that a replay takes from the original job. It has no unique key, which stood for the original
work; no `start_by`, which is over; and no cursor."""
_ENDED = ((finished_jobs, finished_jobs.c.finished_at), (failed_jobs, failed_jobs.c.failed_at))


class Replay(NamedTuple):
    """A replay that was enqueued."""

    id: int
    replay_of: int
    task: str
    queue: str
    label: str | None
    max_attempts: int | None
    limit_key: str | None


def replay(
    conn: Connection,
    selections: Sequence[Selection],
    since: ColumnElement[Any] | None,
    until: ColumnElement[Any] | None,
) -> list[Replay]:
    """Enqueue copies of the selected jobs that ended within a time; return them in the order of their ids.

    Without ids it leaves out cancelled jobs. A replay under a limit waits in its line, as any new job.
    """
    ids: list[int] = []
    for chosen in selections:
        for table, ended_at in _ENDED:
            query = (
                select(table.c.id)
                .where(
                    chosen.where(table),
                    table.c.flow_id.is_(None),  # guard: steps-are-not-replayed
                    *([] if chosen.ids or table is failed_jobs else [table.c.outcome == "completed"]),
                    *([] if since is None else [ended_at >= since]),
                    *([] if until is None else [ended_at < until]),
                )
                .order_by(table.c.id)
                .limit(BATCH)
            )
            some: Sequence[int] = [0]
            while some:
                rows = conn.scalars(query.where(table.c.id > some[-1])).all()
                ids += rows
                some = rows if len(rows) == BATCH else []
    ids.sort()
    # several statements, since the time for an answer is bounded
    replays = [each for some in slices(ids, BATCH) for each in _copy(conn, some)]
    keys = {each.limit_key for each in replays if each.limit_key is not None}
    write(conn, map(Wake, keys))  # guard: a-limited-replay-is-looked-at
    if replays:
        notify.wake_others(conn)
    return replays


def _copy(conn: Connection, ids: Sequence[int]) -> list[Replay]:
    """Insert copies of jobs, in the order of their ids."""
    ended = union_all(
        *(
            select(table.c.id, *(table.c[name] for name in COPIED)).where(table.c.id.in_(ids))
            for table, _ in _ENDED
        )
    ).subquery("ended")
    columns: dict[str, ColumnElement[Any]] = {name: ended.c[name] for name in COPIED}
    columns |= {"replay_of": ended.c.id, **in_line(ended.c.limit_key.is_not(None), now())}
    returning = [jobs.c[name] for name in Replay._fields]
    copy = dialect_of(conn).insert(jobs, columns, order_by=ended.c.id, returning=returning)
    return sorted(Replay(*row) for row in conn.execute(copy))
