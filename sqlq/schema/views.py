"""The views: the stable read contract over tables that may change.

One text serves every database, with templates for the differences: the clock, a duration in seconds, a
readable time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sqlq.schema.types import FAR, POSTGRESQL_NOW, SQLITE_NOW, milliseconds_of


class _Words(NamedTuple):
    """The SQL of one database for the views; each a template over column names."""

    now: str
    time: str
    seconds: str
    far: str


_WORDS = {
    "postgresql": _Words(
        now=POSTGRESQL_NOW,
        time="{0}",
        seconds="CAST(EXTRACT(EPOCH FROM ({1} - {0})) AS DOUBLE PRECISION)",
        far=f"timestamptz '{FAR}'",
    ),
    "sqlite": _Words(
        now=SQLITE_NOW,
        time="strftime('%Y-%m-%dT%H:%M:%fZ', {0} / 1000.0, 'unixepoch')",
        seconds="(({1} - {0}) / 1000.0)",
        far=str(milliseconds_of(FAR)),
    ),
}

_JOB_STATES = """
CREATE VIEW {prefix}job_states AS
SELECT id, queue, task,
       CASE WHEN reserved_at IS NOT NULL THEN 'running'
            WHEN blocked_by IS NOT NULL THEN 'blocked'
            WHEN available_at <= {now} THEN 'available'
            ELSE 'scheduled' END AS state,
       priority, attempts, max_attempts,
       {created_at} AS created_at, {available_at} AS available_at, {reserved_at} AS reserved_at, reserved_by,
       {null_time} AS ended_at,
       CASE WHEN reserved_at IS NOT NULL THEN {waited}
            WHEN available_at <= {now} THEN {waiting} END AS wait_seconds,
       CAST(NULL AS TEXT) AS error,
       label, headers, progress, progress_of, progress_note,
       schedule, {scheduled_for} AS scheduled_for, {start_by} AS start_by,
       flow_id, limit_key, blocked_by, replay_of
  FROM {prefix}jobs
UNION ALL
SELECT id, queue, task,
       CASE outcome WHEN 'completed' THEN 'finished' ELSE 'cancelled' END,
       priority, attempts, max_attempts,
       {created_at}, {available_at}, {reserved_at}, reserved_by,
       {finished_at}, {waited}, reason,
       label, headers, progress, progress_of, progress_note,
       schedule, {scheduled_for}, {start_by},
       flow_id, limit_key, NULL, replay_of
  FROM {prefix}finished_jobs
UNION ALL
SELECT id, queue, task, 'failed',
       priority, attempts, max_attempts,
       {created_at}, {available_at}, {reserved_at}, reserved_by,
       {failed_at}, {waited},
       CASE WHEN exception IS NULL THEN reason ELSE exception || ': ' || COALESCE(message, '') END,
       label, headers, progress, progress_of, progress_note,
       schedule, {scheduled_for}, {start_by},
       flow_id, limit_key, NULL, replay_of
  FROM {prefix}failed_jobs
"""

_QUEUE_STATS = """
CREATE VIEW {prefix}queue_stats AS
SELECT queue,
       CAST(SUM(available) AS BIGINT) AS available,
       CAST(SUM(scheduled) AS BIGINT) AS scheduled,
       CAST(SUM(blocked) AS BIGINT) AS blocked,
       CAST(SUM(running) AS BIGINT) AS running,
       CAST(SUM(failed) AS BIGINT) AS failed,
       {oldest} AS oldest_available_at,
       {oldest_wait} AS oldest_wait_seconds,
       CASE WHEN EXISTS (SELECT 1 FROM {prefix}sqlq_queues q
                          WHERE q.queue IN (counted.queue, '') AND q.paused_at IS NOT NULL)
            THEN 1 ELSE 0 END AS paused
  FROM (SELECT queue,
               COUNT(CASE WHEN reserved_at IS NULL AND available_at <= {now} THEN 1 END) AS available,
               COUNT(CASE WHEN reserved_at IS NULL AND blocked_by IS NULL AND available_at > {now}
                          THEN 1 END) AS scheduled,
               COUNT(blocked_by) AS blocked,
               COUNT(CASE WHEN reserved_at IS NOT NULL THEN 1 END) AS running,
               0 AS failed,
               MIN(CASE WHEN reserved_at IS NULL AND available_at <= {now} THEN available_at END) AS oldest
          FROM {prefix}jobs
         GROUP BY queue
        UNION ALL
        SELECT queue, 0, 0, 0, 0, COUNT(*), NULL
          FROM {prefix}failed_jobs
         GROUP BY queue) AS counted
 GROUP BY queue
"""

NAMES = ("queue_stats", "job_states")
"""In an order in which they can be dropped."""


def create_views(dialect: str, prefix: str = "", names: Sequence[str] = NAMES) -> list[str]:
    """Return the CREATE VIEW statements for a database.

    `prefix` is the quoted schema with its dot, or empty. Only migrations run it. A user's views may depend on
    these, which then cannot be dropped, or only with the user's. So a revision recreates a view only if it
    changes its definition, and names it, as in `views = ("queue_stats",)`.
    """
    words = _WORDS[dialect]

    def time(column: str) -> str:
        return words.time.format(column)

    return [
        template.format(
            prefix=prefix,
            now=words.now,
            null_time=time("NULL") if dialect == "sqlite" else "CAST(NULL AS TIMESTAMP WITH TIME ZONE)",
            waited=words.seconds.format("available_at", "reserved_at"),
            waiting=words.seconds.format("available_at", words.now),
            oldest=time("MIN(oldest)"),
            oldest_wait=words.seconds.format("MIN(oldest)", words.now),
            **{
                column: time(column)
                for column in (
                    *("created_at", "reserved_at", "finished_at", "failed_at"),
                    *("scheduled_for", "start_by"),
                )
            },
            # A blocked job has no due time.
            available_at=time(f"NULLIF(available_at, {words.far})"),
        ).strip()
        for name, template in (("job_states", _JOB_STATES), ("queue_stats", _QUEUE_STATS))
        if name in names
    ]


def drop_views(prefix: str = "", names: Sequence[str] = NAMES) -> list[str]:
    """Return the DROP VIEW statements; a view that is not there is no error."""
    return [f"DROP VIEW IF EXISTS {prefix}{name}" for name in NAMES if name in names]
