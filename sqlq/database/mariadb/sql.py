"""The statements for MariaDB that are written as text: claims, polls, and verdicts on blocked jobs.

MariaDB runs a subquery that steps to the next value from the start of the index each time. So steps from one
queue or priority to the next are loose index scans (GROUP BY), or statements of their own.
"""

from __future__ import annotations

from functools import cache

from sqlalchemy.dialects.mysql.mariadb import MariaDBDialect

from sqlq.schema.tables import CARRIED, LARGEST_TOKEN, MOST_COUNTED
from sqlq.schema.types import MARIADB_NOW

NOW = MARIADB_NOW
NEXT_TOKEN = f"CASE WHEN lease_token < {LARGEST_TOKEN} THEN lease_token + 1 ELSE 1 END"
ONE_MORE = f"LEAST(attempts + 1, {MOST_COUNTED})"
_QUOTER = MariaDBDialect().identifier_preparer
_CARRIED = ", ".join(_QUOTER.quote(name) for name in CARRIED)


def quoted(schema: str | None) -> str:
    """Return the name of the database as quoted in statements."""
    return str(_QUOTER.quote_schema(str(schema)))


# guard: claim-beyond-a-place-mariadb
_BEYOND = " AND (available_at > %s OR available_at = %s AND id > %s)"


@cache
def due(schema: str | None, columns: str, *, given_level: bool, beyond: bool, newest_first: bool) -> str:
    """Lock the first due jobs of one priority of a queue: the highest, or a given one.

    The index has reserved rows apart from ready ones. So the statement reads, and locks, only the rows that
    it returns. A filesort would lock every row of the queue.
    """
    prefix = quoted(schema)
    order = "available_at DESC, id DESC" if newest_first else "available_at, id"
    level = "%s" if given_level else top_level(schema)
    after = _BEYOND if beyond else ""
    # guard: claim-mariadb
    return f"""
SELECT {columns} FROM {prefix}.jobs FORCE INDEX (jobs_claim)
 WHERE reserved_at IS NULL AND queue = %s AND priority = {level} AND available_at <= {NOW}{after}
   AND NOT EXISTS (SELECT 1 FROM {prefix}.sqlq_queues AS q
                    WHERE q.queue = jobs.queue AND q.paused_at IS NOT NULL)
 ORDER BY {order} LIMIT %s FOR UPDATE SKIP LOCKED
"""


def due_beyond(schema: str | None, positions: int) -> str:
    """Find the positions, of so many, behind which a job is due. It locks nothing."""
    return "UNION ALL".join(
        f"""
(SELECT {place} FROM {quoted(schema)}.jobs FORCE INDEX (jobs_claim)
  WHERE reserved_at IS NULL AND queue = %s AND priority = %s AND available_at <= {NOW}{_BEYOND} LIMIT 1)"""
        for place in range(positions)
    )


def top_level(schema: str | None) -> str:
    """The highest priority of the ready jobs of a queue, by one probe of the index."""
    return f"(SELECT MAX(priority) FROM {quoted(schema)}.jobs WHERE reserved_at IS NULL AND queue = %s)"


def reserve(schema: str | None, ids: str, cases: str) -> str:
    """Reserve locked jobs by their ids, in the transaction that has locked them, with the attempts in
    `cases`. All values are computed or valid already, and the checks of the table take half of the time."""
    more = cases and f", max_attempts = CASE {cases} ELSE max_attempts END"
    unchecked = "innodb_lock_wait_timeout = 0, check_constraint_checks = 0"
    return f"""
SET STATEMENT {unchecked} FOR UPDATE {quoted(schema)}.jobs FORCE INDEX (PRIMARY)
   SET reserved_at = {NOW}, reserved_by = %s, lease_expires_at = {NOW} + INTERVAL %s * 1000 MICROSECOND,
       lease_token = {NEXT_TOKEN}, attempts = {ONE_MORE}{more}
 WHERE id IN ({ids})
"""


@cache
def key_of(schema: str | None) -> str:
    return f"SELECT live_key, queue FROM {quoted(schema)}.jobs WHERE id = %s AND live_key IS NOT NULL"


@cache
def lock_key(schema: str | None) -> str:
    """Lock the entry of a unique key, and then its job. A subquery for the key would lock the job first."""
    return f"""
SELECT id FROM {quoted(schema)}.jobs FORCE INDEX (jobs_live_key)
 WHERE live_key = %s AND queue = %s FOR UPDATE
"""


@cache
def next_level(schema: str | None) -> str:
    return f"""
SELECT MAX(priority) FROM {quoted(schema)}.jobs WHERE reserved_at IS NULL AND queue = %s AND priority < %s
"""


def due_in(schema: str | None, names: int | None) -> str:
    """The milliseconds until the first job of each queue is due, of so many queues or of all. A loose scan
    reads one row for each queue and priority. A row without a queue is added where the server takes no
    writes, so that its look may be out of date."""
    prefix = quoted(schema)
    wanted = "" if names is None else f" AND queue IN ({', '.join(['%s'] * names)})"
    return f"""
SELECT queue, CASE WHEN queue NOT IN (SELECT queue FROM {prefix}.sqlq_queues WHERE paused_at IS NOT NULL)
                   THEN TIMESTAMPDIFF(MICROSECOND, {NOW}, MIN(first_at)) / 1000e0 END
  FROM (SELECT reserved_at, queue, priority, MIN(available_at) AS first_at
          FROM {prefix}.jobs FORCE INDEX (jobs_claim)
         WHERE reserved_at IS NULL{wanted} GROUP BY reserved_at, queue, priority) AS levels
 GROUP BY queue
 UNION ALL SELECT NULL, NULL FROM DUAL WHERE @@global.read_only
"""


def look(schema: str | None, workers: int) -> str:
    """Poll everything but due jobs: schedules, hosts, maintenance, and requests to so many workers."""
    prefix = quoted(schema)
    theirs = ", ".join(["%s"] * workers) or "NULL"
    return f"""
SELECT NULL, (SELECT TIMESTAMPDIFF(MICROSECOND, {NOW}, next_at) / 1000e0
                FROM {prefix}.sqlq_schedules WHERE next_at IS NOT NULL ORDER BY next_at LIMIT 1),
       NULL, 0,
       CASE WHEN %s IS NOT NULL THEN (
            SELECT COUNT(DISTINCT host, COALESCE(supervisor_pid, pid)) FROM {prefix}.sqlq_workers
             WHERE seen_at > {NOW} - INTERVAL %s * 1000 MICROSECOND) END,
       CASE WHEN %s THEN EXISTS (
            SELECT 1 FROM {prefix}.jobs WHERE reserved_at IS NOT NULL
               AND lease_expires_at <= {NOW}) END,
       CASE WHEN %s THEN
            EXISTS (SELECT 1 FROM {prefix}.jobs WHERE blocked_by = 'limit')
            OR EXISTS (SELECT 1 FROM {prefix}.jobs WHERE limit_key IS NOT NULL AND blocked_by IS NULL) END,
       (SELECT JSON_ARRAYAGG(JSON_ARRAY(
                 id, asked, {_microseconds("asked_at")}, {_microseconds("cancels_at")}))
          FROM {prefix}.sqlq_workers
         WHERE id IN ({theirs}) AND (asked_at IS NOT NULL OR cancels_at IS NOT NULL)),
       EXISTS (SELECT 1 FROM {prefix}.sqlq_queues WHERE queue = '' AND paused_at IS NOT NULL),
       (SELECT TIMESTAMPDIFF(MICROSECOND, {NOW}, MIN(paused_until)) / 1000e0
          FROM {prefix}.sqlq_queues)
"""


def _microseconds(column: str) -> str:
    return f"TIMESTAMPDIFF(MICROSECOND, TIMESTAMP '1970-01-01 00:00:00', {column})"


def waiting_for(schema: str | None, ended: str) -> str:
    """The blocked steps that wait for these jobs; not those that wait for the success of a failed one."""
    prefix = quoted(schema)
    return f"""
SELECT DISTINCT job.id
  FROM {prefix}.sqlq_edges AS edge FORCE INDEX (sqlq_edges_parent)
 STRAIGHT_JOIN {prefix}.jobs AS job FORCE INDEX (PRIMARY) ON job.id = edge.job_id
 WHERE edge.depends_on IN ({ended}) AND job.blocked_by = 'flow'
   AND (edge.on_outcome <> 'success'
        OR NOT EXISTS (SELECT 1 FROM {prefix}.failed_jobs AS failed WHERE failed.id = edge.depends_on))"""


def waiting_for_recent(schema: str | None) -> str:
    """The blocked steps that wait for recently ended jobs."""
    prefix = quoted(schema)
    return " UNION ".join(
        f"""
SELECT job.id
  FROM {prefix}.{table} AS ended FORCE INDEX ({table}_unblock)
 STRAIGHT_JOIN {prefix}.sqlq_edges AS edge FORCE INDEX (sqlq_edges_parent) ON edge.depends_on = ended.id
 STRAIGHT_JOIN {prefix}.jobs AS job FORCE INDEX (PRIMARY) ON job.id = edge.job_id
 WHERE ended.unblocks_at > {NOW} - INTERVAL %s * 1000 MICROSECOND AND job.blocked_by = 'flow'{those}"""
        for table, those in (("finished_jobs", ""), ("failed_jobs", " AND edge.on_outcome <> 'success'"))
    )


def verdict(schema: str | None, steps: str) -> str:
    """Judge steps by one snapshot, in which each job before them is in exactly one table. It returns those
    that are free (0) and those that can never run (1)."""
    prefix = quoted(schema)
    return f"""
SELECT job.id,
       MAX(failed.id IS NULL AND edge.on_outcome <> 'ended'
           AND (edge.on_outcome = 'failure' OR NOT (finished.outcome <=> 'completed'))) AS never
  FROM {prefix}.jobs AS job FORCE INDEX (PRIMARY)
 STRAIGHT_JOIN {prefix}.sqlq_edges AS edge FORCE INDEX (PRIMARY) ON edge.job_id = job.id
  LEFT JOIN {prefix}.finished_jobs AS finished ON finished.id = edge.depends_on
  LEFT JOIN {prefix}.failed_jobs AS failed ON failed.id = edge.depends_on
 WHERE job.id IN ({steps}) AND job.blocked_by = 'flow' AND job.reserved_at IS NULL
   AND NOT EXISTS (SELECT 1 FROM {prefix}.sqlq_edges AS open
                    STRAIGHT_JOIN {prefix}.jobs AS live FORCE INDEX (PRIMARY) ON live.id = open.depends_on
                    WHERE open.job_id = job.id)
 GROUP BY job.id
HAVING never OR NOT MAX(failed.id IS NOT NULL AND edge.on_outcome = 'success')
"""


def lock_steps(schema: str | None, steps: str) -> str:
    return f"""
SELECT id FROM {quoted(schema)}.jobs FORCE INDEX (PRIMARY)
 WHERE id IN ({steps}) AND blocked_by = 'flow' AND reserved_at IS NULL
 ORDER BY id FOR UPDATE SKIP LOCKED
"""


def wake(schema: str | None, steps: str) -> str:
    prefix = quoted(schema)
    return f"""
INSERT INTO {prefix}.sqlq_wakes (limit_key)
SELECT DISTINCT limit_key FROM {prefix}.jobs WHERE id IN ({steps}) AND limit_key IS NOT NULL
"""


def free(schema: str | None, steps: str) -> str:
    due = f"GREATEST({NOW}, COALESCE(due_at, {NOW}))"
    # MariaDB sets columns in their order, and a later one sees what an earlier one has become
    return f"""
UPDATE {quoted(schema)}.jobs FORCE INDEX (PRIMARY)
   SET available_at = IF(limit_key IS NULL, {due}, available_at),
       due_at = IF(limit_key IS NULL, NULL, {due}),
       blocked_by = IF(limit_key IS NULL, NULL, 'limit')
 WHERE id IN ({steps})
"""


def cancel(schema: str | None, steps: str) -> tuple[str, str]:
    prefix = quoted(schema)
    copy = f"""
INSERT INTO {prefix}.finished_jobs ({_CARRIED}, outcome, reason)
SELECT {_CARRIED}, 'cancelled', %s FROM {prefix}.jobs FORCE INDEX (PRIMARY) WHERE id IN ({steps})
"""
    # for a list of ids MariaDB would read, and lock, the whole of a small table
    ids = f"JSON_TABLE('[{steps}]', '$[*]' COLUMNS (id BIGINT PATH '$')) AS step"
    return (
        copy,
        f"""
DELETE FROM {prefix}.jobs USING {ids} STRAIGHT_JOIN {prefix}.jobs FORCE INDEX (PRIMARY)
 WHERE jobs.id = step.id
""",
    )


@cache
def admitted(schema: str | None) -> str:
    # guard: slots-are-counted-mariadb
    return f"""
SELECT COUNT(*) FROM (SELECT 1 FROM {quoted(schema)}.jobs FORCE INDEX (jobs_line_by_id)
                       WHERE blocked_by IS NULL AND limit_key = %s LIMIT %s) AS taken
"""


def _is_open(prefix: str, served: int | None) -> str:
    # guard: only-what-is-served-is-admitted-mariadb
    among = "" if served is None else f" AND queue IN ({', '.join(['%s'] * served) or 'NULL'})"
    return f"queue NOT IN (SELECT queue FROM {prefix}.sqlq_queues WHERE paused_at IS NOT NULL){among}"


def first_in_line(schema: str | None, served: int | None) -> str:
    prefix = quoted(schema)
    return f"""
SELECT id FROM {prefix}.jobs FORCE INDEX (jobs_line)
 WHERE blocked_by = 'limit' AND limit_key = %s AND due_at <= {NOW} AND {_is_open(prefix, served)}
 ORDER BY priority DESC, due_at, id LIMIT %s
"""


def head_of_line(schema: str | None, served: int | None) -> str:
    prefix = quoted(schema)
    # guard: the-head-of-a-line-mariadb
    return f"""
SELECT head.id
  FROM (SELECT id, limit_key, queue, due_at FROM {prefix}.jobs FORCE INDEX (jobs_line_by_id)
         WHERE blocked_by = 'limit' AND limit_key = %s ORDER BY id LIMIT 1) AS head
 WHERE head.due_at <= {NOW} AND {_is_open(prefix, served)}
   AND NOT (%s AND EXISTS (SELECT 1 FROM {prefix}.failed_jobs AS failed
                            WHERE failed.limit_key = head.limit_key AND failed.id < head.id))
"""
