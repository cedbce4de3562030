"""Statements that step from one value of an index to the next, by one probe for each.

A SELECT DISTINCT would read all rows of the index. `schemas.run_text` runs them.
"""

from __future__ import annotations

LEVELS = """
WITH RECURSIVE each_queue (queue) AS (
      SELECT min(queue) FROM __sqlq__.jobs WHERE reserved_at IS NULL
      UNION ALL
      SELECT (SELECT min(j.queue) FROM __sqlq__.jobs j
               WHERE j.reserved_at IS NULL AND j.queue > each_queue.queue)
        FROM each_queue WHERE each_queue.queue IS NOT NULL),
each_priority (queue, priority) AS (
      SELECT queue, (SELECT min(j.priority) FROM __sqlq__.jobs j
                      WHERE j.reserved_at IS NULL AND j.queue = each_queue.queue)
        FROM each_queue WHERE queue IS NOT NULL
      UNION ALL
      SELECT queue, (SELECT min(j.priority) FROM __sqlq__.jobs j
                      WHERE j.reserved_at IS NULL AND j.queue = each_priority.queue
                        AND j.priority > each_priority.priority)
        FROM each_priority WHERE priority IS NOT NULL)
SELECT queue, priority FROM each_priority WHERE priority IS NOT NULL
"""
"""The queues with unreserved jobs, and the priorities of these."""


BEGINS = " AND substr(limit_key, 1, :length) = :prefix"


LINES = """
WITH RECURSIVE each_limit_key (limit_key) AS (
      SELECT min(limit_key) FROM __sqlq__.jobs WHERE blocked_by = 'limit' AND limit_key > :after{begins}
      UNION ALL
      SELECT (SELECT min(limit_key) FROM __sqlq__.jobs
               WHERE blocked_by = 'limit' AND limit_key > each_limit_key.limit_key{begins})
        FROM each_limit_key WHERE each_limit_key.limit_key IS NOT NULL)
SELECT limit_key FROM each_limit_key WHERE limit_key IS NOT NULL LIMIT :most
"""
"""The keys of limits with jobs in line, after one key. `{begins}` is nothing, or the condition `BEGINS`."""
