"""The statements for PostgreSQL that are written as text, each made once for a schema: claims, polls, and
verdicts on blocked jobs."""

from __future__ import annotations

from sqlalchemy.dialects import postgresql

from sqlq.database.values import LARGEST_WINDOW, claimed_columns
from sqlq.schema.qualify import in_catalog, written
from sqlq.schema.tables import LARGEST_TOKEN, MAX_COUNT


@written
def claim(newest_first: bool) -> str:
    """Claim from the queues named, in their order, with any priorities in them.

    Nested loops go over the queues and their priorities, and step to the next lower priority by the claim
    index. So the statement reads only the rows that it claims.
    """
    # guard: pause-postgresql
    levels = """unnest(CAST(%(names)s AS varchar[])) WITH ORDINALITY AS wanted (queue, place)
      CROSS JOIN LATERAL (
            WITH RECURSIVE levels (priority) AS (
                  (SELECT priority FROM __sqlq__.jobs
                    WHERE queue = wanted.queue AND reserved_at IS NULL
                      AND NOT EXISTS (SELECT 1 FROM __sqlq__.sqlq_queues q
                                       WHERE q.queue = wanted.queue AND q.paused_at IS NOT NULL)
                    ORDER BY priority DESC LIMIT 1)
                  UNION ALL
                  SELECT (SELECT j.priority FROM __sqlq__.jobs j
                           WHERE j.queue = wanted.queue AND j.reserved_at IS NULL
                             AND j.priority < levels.priority
                           ORDER BY j.priority DESC LIMIT 1)
                    FROM levels WHERE levels.priority IS NOT NULL)
            SELECT wanted.queue, priority FROM levels WHERE priority IS NOT NULL) AS level"""
    return _claim_from(levels, order="available_at DESC, id DESC" if newest_first else "available_at, id")


@written
def claim_beyond() -> str:
    """Claim from known queues and priorities, in each after a position, without reading rows before it."""
    levels = """ROWS FROM (unnest(CAST(%(queues)s AS varchar[])), unnest(CAST(%(priorities)s AS smallint[])),
                       unnest(CAST(%(moments)s AS bigint[])), unnest(CAST(%(ids)s AS bigint[])))
      WITH ORDINALITY AS level (queue, priority, moment, id, place)"""
    # guard: claim-starts-at-its-cursor
    beyond = """
               AND (available_at, id)
                   > (TIMESTAMP WITH TIME ZONE 'epoch' + (level.moment * interval '1 microsecond'), level.id)
               AND NOT EXISTS (SELECT 1 FROM __sqlq__.sqlq_queues q
                                WHERE q.queue = level.queue AND q.paused_at IS NOT NULL)"""
    return _claim_from(levels, beyond)


@written
def due_in(has_window: bool) -> str:
    """Step through queues and priorities as a claim does, and read the first row of each.

    Refused forms, as measured with 60,000 due jobs in three queues: GROUP BY took 15 ms instead of 0.5, and
    min(available_at) of each queue 13.
    """
    window = """
each (queue) AS (
      SELECT min(queue)::varchar FROM __sqlq__.jobs WHERE reserved_at IS NULL AND queue > %(after)s
      UNION ALL
      SELECT (SELECT min(j.queue)::varchar FROM __sqlq__.jobs j
               WHERE j.reserved_at IS NULL AND j.queue > each.queue)
        FROM each WHERE each.queue IS NOT NULL),"""
    in_window = f"""
        UNION ALL
       SELECT queue, row_number() OVER () FROM (
              SELECT queue FROM each WHERE queue IS NOT NULL LIMIT {LARGEST_WINDOW}) AS in_window"""
    first = """
           SELECT queue, {place} AS place, priority, available_at FROM __sqlq__.jobs
            WHERE queue = {name} AND reserved_at IS NULL {lower}
            ORDER BY priority DESC, available_at, id LIMIT 1"""
    lower = first.format(place="levels.place", name="levels.queue", lower="AND priority < levels.priority")
    return f"""
WITH RECURSIVE{window if has_window else ""}
names (queue, place) AS (
      SELECT queue, max(place) FROM (
             SELECT unnest(CAST(%(names)s AS varchar[])) AS queue, CAST(NULL AS bigint) AS place
             {in_window if has_window else ""}) AS named
       GROUP BY queue),
levels (queue, place, priority, available_at) AS (
      SELECT found.* FROM names CROSS JOIN LATERAL (
           {first.format(place="names.place", name="names.queue", lower="")}) AS found
      UNION ALL
      SELECT found.* FROM levels CROSS JOIN LATERAL (
           {lower}) AS found)
SELECT queue,
       CASE WHEN NOT EXISTS (SELECT 1 FROM __sqlq__.sqlq_queues q
                              WHERE q.queue = levels.queue AND q.paused_at IS NOT NULL)
            THEN CAST(EXTRACT(EPOCH FROM min(available_at) - statement_timestamp()) * 1000
                      AS double precision) END,
       max(place)
  FROM levels
 GROUP BY queue
"""


IF_READ_ONLY = in_catalog(
    " UNION ALL SELECT NULL, NULL, NULL WHERE current_setting('transaction_read_only') = 'on'\n"
)
"""Adds a row without a queue where the server takes no writes, so that its look may be out of date."""


@written
def look(has_window: bool) -> str:
    """Poll everything that a host needs once a second in one statement, which costs as much as a poll of one
    thing."""
    # guard: look-reports-what-a-rescue-takes
    return f"""
SELECT queue, ms, place, NULL::boolean AS listens, NULL::bigint AS hosts, NULL::boolean AS expired,
       NULL::boolean AS limited, NULL::boolean AS signalled, NULL::varchar AS asked,
       NULL::boolean AS all_paused, NULL::double precision AS pause_ms
  FROM ({due_in(has_window)}) AS due (queue, ms, place)
 UNION ALL
SELECT NULL, (SELECT CAST(EXTRACT(EPOCH FROM min(next_at) - statement_timestamp()) * 1000 AS double precision)
                FROM __sqlq__.sqlq_schedules WHERE next_at IS NOT NULL), NULL,
       CASE WHEN current_setting('transaction_read_only') = 'off'
            THEN %(channel)s = ANY (SELECT pg_listening_channels()) END,
       CASE WHEN CAST(%(hosts_within_ms)s AS bigint) IS NOT NULL THEN (
            SELECT count(DISTINCT (host, coalesce(supervisor_pid, pid))) FROM __sqlq__.sqlq_workers
             WHERE seen_at > (statement_timestamp()
                             - (CAST(%(hosts_within_ms)s AS bigint) * interval '1 millisecond'))) END,
       CASE WHEN CAST(%(maintenance)s AS boolean) THEN EXISTS (
            SELECT 1 FROM __sqlq__.jobs
             WHERE reserved_at IS NOT NULL
               AND coalesce(lease_expires_at, reserved_at) <= statement_timestamp()) END,
       CASE WHEN CAST(%(maintenance)s AS boolean) THEN
            EXISTS (SELECT 1 FROM __sqlq__.jobs WHERE blocked_by = 'limit')
            OR EXISTS (SELECT 1 FROM __sqlq__.jobs WHERE limit_key IS NOT NULL AND blocked_by IS NULL) END,
       EXISTS (SELECT 1 FROM __sqlq__.sqlq_waits WHERE look_at <= statement_timestamp())
       OR EXISTS (SELECT 1 FROM __sqlq__.sqlq_signals WHERE look_at <= statement_timestamp()),
       (SELECT json_agg(json_build_array(
                 id, asked, {_microseconds("asked_at")}, {_microseconds("cancels_at")}))
          FROM __sqlq__.sqlq_workers
         WHERE id = ANY(CAST(%(workers)s AS varchar[]))
           AND (asked_at IS NOT NULL OR cancels_at IS NOT NULL))::varchar,
       EXISTS (SELECT 1 FROM __sqlq__.sqlq_queues WHERE queue = '' AND paused_at IS NOT NULL),
       (SELECT CAST(EXTRACT(EPOCH FROM min(paused_until) - statement_timestamp()) * 1000 AS double precision)
          FROM __sqlq__.sqlq_queues)
"""


def _microseconds(column: str) -> str:
    return f"CAST(EXTRACT(EPOCH FROM {column}) * 1000000 AS bigint)"


def _claim_from(levels: str, beyond: str = "", *, order: str = "available_at, id") -> str:
    """Select, lock and reserve in one statement, level by level under one LIMIT, so that only claimed rows
    are locked.

    The CTE is MATERIALIZED, because a plan may run a plain subquery again, lock other rows, and claim more
    than the limit. With an array PostgreSQL finds each row by its primary key; a join would read the whole
    table for a large batch.

    Refused forms, as measured: through SQLAlchemy, and planned anew each time, a claim took 1.2 ms instead of
    0.4 (decision 10). An index by owner beside the one by id cost 6 to 20 % more (decision 47).
    One statement for claims from the head and behind a position cost 11 to 22 % more (decision 62).
    """
    columns = claimed_columns(postgresql.dialect())  # type: ignore[no-untyped-call]  # SQLAlchemy gives it no types
    # guard: claim-postgresql
    return f"""
WITH due AS MATERIALIZED (
     SELECT ready.id
       FROM {levels}
      CROSS JOIN LATERAL (
            SELECT id FROM __sqlq__.jobs
             WHERE queue = level.queue AND priority = level.priority
               AND reserved_at IS NULL AND available_at <= statement_timestamp(){beyond}
             ORDER BY {order}
             LIMIT %(most)s
               FOR UPDATE SKIP LOCKED) AS ready
      LIMIT %(most)s)
UPDATE __sqlq__.jobs
   SET reserved_at=statement_timestamp(),
       reserved_by=%(owner)s,
       lease_expires_at=statement_timestamp() + (CAST(%(lease_ms)s AS bigint) * interval '1 millisecond'),
       lease_token=CASE WHEN lease_token < {LARGEST_TOKEN} THEN lease_token + 1 ELSE 1 END,
       attempts=least(attempts + 1, {MAX_COUNT}),
       max_attempts=coalesce(max_attempts,
                             CAST(CAST(%(max_attempts)s AS pg_catalog.json) ->> task AS integer))
 WHERE id = ANY(ARRAY(SELECT id FROM due))
RETURNING {columns}
"""
