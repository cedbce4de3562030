"""The statements about blocked jobs for MariaDB and SQLite, where one either reads or writes.

So a verdict, its consequences and an admission take several of them in one transaction. The ids stand in the
statements themselves. `Sql.words` has what they differ by.
"""

from __future__ import annotations

WAITING_FOR = """
SELECT DISTINCT job.id
  FROM __sqlq__.sqlq_edges AS edge{by_parent}
 {straight_join} __sqlq__.jobs AS job{by_id} ON job.id = edge.job_id
 WHERE edge.depends_on IN ({ids}) AND job.blocked_by = 'flow'
   AND (edge.on_outcome <> 'success'
        OR NOT EXISTS (SELECT 1 FROM __sqlq__.failed_jobs AS failed WHERE failed.id = edge.depends_on))"""
"""The blocked steps that wait for jobs; not those that wait for the success of a failed one."""
WAITING_FOR_RECENT = """
SELECT job.id
  FROM __sqlq__.finished_jobs AS ended{by_finished}
 {straight_join} __sqlq__.sqlq_edges AS edge{by_parent} ON edge.depends_on = ended.id
 {straight_join} __sqlq__.jobs AS job{by_id} ON job.id = edge.job_id
 WHERE {finished_recently} AND job.blocked_by = 'flow'
 UNION
SELECT job.id
  FROM __sqlq__.failed_jobs AS ended{by_failed}
 {straight_join} __sqlq__.sqlq_edges AS edge{by_parent} ON edge.depends_on = ended.id
 {straight_join} __sqlq__.jobs AS job{by_id} ON job.id = edge.job_id
 WHERE {failed_recently} AND job.blocked_by = 'flow' AND edge.on_outcome <> 'success'
"""
VERDICT = """
SELECT job.id,
       MAX(failed.id IS NULL AND edge.on_outcome <> 'ended'
           AND (edge.on_outcome = 'failure' OR COALESCE(finished.outcome, '') <> 'completed')) AS never
  FROM __sqlq__.jobs AS job{by_id}
 {straight_join} __sqlq__.sqlq_edges AS edge{by_id} ON edge.job_id = job.id
  LEFT JOIN __sqlq__.finished_jobs AS finished ON finished.id = edge.depends_on
  LEFT JOIN __sqlq__.failed_jobs AS failed ON failed.id = edge.depends_on
 WHERE job.id IN ({ids}) AND job.blocked_by = 'flow' AND job.reserved_at IS NULL
   AND NOT EXISTS (SELECT 1 FROM __sqlq__.sqlq_edges AS open
                    {straight_join} __sqlq__.jobs AS live{by_id} ON live.id = open.depends_on
                    WHERE open.job_id = job.id{youngest_first})
 GROUP BY job.id
HAVING never OR NOT MAX(failed.id IS NOT NULL AND edge.on_outcome = 'success')
"""
"""Judges steps by one snapshot, in which each job before them is in exactly one table. It returns those that
are free (0) and those that can never run (1)."""
LOCK_STEPS = """
SELECT id FROM __sqlq__.jobs{by_id}
 WHERE id IN ({ids}) AND blocked_by = 'flow' AND reserved_at IS NULL
 ORDER BY id FOR UPDATE SKIP LOCKED
"""
WAKE = """
INSERT INTO __sqlq__.sqlq_wakes (limit_key)
SELECT DISTINCT limit_key FROM __sqlq__.jobs WHERE id IN ({ids}) AND limit_key IS NOT NULL
"""
# MariaDB may set columns in their order, so that a later one sees what an earlier one has become
FREE = """
UPDATE __sqlq__.jobs{by_id}
   SET available_at = CASE WHEN limit_key IS NULL THEN {greatest}({now}, COALESCE(due_at, {now}))
                           ELSE available_at END,
       due_at = CASE WHEN limit_key IS NOT NULL THEN {greatest}({now}, COALESCE(due_at, {now})) END,
       blocked_by = CASE WHEN limit_key IS NOT NULL THEN 'limit' END
 WHERE id IN ({ids})
"""
CANCEL = """
INSERT INTO __sqlq__.finished_jobs ({carried}, outcome, reason)
SELECT {carried}, 'cancelled', {given} FROM __sqlq__.jobs{by_id} WHERE id IN ({ids})
"""

# guard: slots-are-counted
ADMITTED = """
SELECT COUNT(*) FROM (SELECT 1 FROM __sqlq__.jobs{by_rank}
                       WHERE blocked_by IS NULL AND limit_key = {given} LIMIT {given}) AS taken
"""
_IS_OPEN = "queue NOT IN (SELECT queue FROM __sqlq__.sqlq_queues WHERE paused_at IS NOT NULL) {among}"
FIRST = f"""
SELECT id FROM __sqlq__.jobs{{by_line}}
 WHERE blocked_by = 'limit' AND limit_key = {{given}} AND due_at <= {{now}} AND {_IS_OPEN}
 ORDER BY priority DESC, due_at, id LIMIT {{given}}
"""
# guard: the-head-of-a-line
HEAD = f"""
SELECT head.id
  FROM (SELECT id, limit_key, queue, due_at FROM __sqlq__.jobs{{by_rank}}
         WHERE blocked_by = 'limit' AND limit_key = {{given}} ORDER BY id LIMIT 1) AS head
 WHERE head.due_at <= {{now}} AND {_IS_OPEN}
   AND NOT ({{given}} AND EXISTS (SELECT 1 FROM __sqlq__.failed_jobs AS failed
                                   WHERE failed.limit_key = head.limit_key AND failed.id < head.id))
"""
