SELECT job.id,
       MAX(failed.id IS NULL AND edge.on_outcome <> 'ended'
           AND (edge.on_outcome = 'failure' OR COALESCE(finished.outcome, '') <> 'completed')) AS never
  FROM main.jobs AS job
 CROSS JOIN main.sqlq_edges AS edge ON edge.job_id = job.id
  LEFT JOIN main.finished_jobs AS finished ON finished.id = edge.depends_on
  LEFT JOIN main.failed_jobs AS failed ON failed.id = edge.depends_on
 WHERE job.id IN (3) AND job.blocked_by = 'flow' AND job.reserved_at IS NULL
   AND NOT EXISTS (SELECT 1 FROM main.sqlq_edges AS open
                    CROSS JOIN main.jobs AS live ON live.id = open.depends_on
                    WHERE open.job_id = job.id ORDER BY open.depends_on DESC LIMIT 1)
 GROUP BY job.id
HAVING never OR NOT MAX(failed.id IS NOT NULL AND edge.on_outcome = 'success');

INSERT INTO main.sqlq_wakes (limit_key)
SELECT DISTINCT limit_key FROM main.jobs WHERE id IN (3) AND limit_key IS NOT NULL;

UPDATE main.jobs
   SET available_at = CASE WHEN limit_key IS NULL THEN max(CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER), COALESCE(due_at, CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)))
                           ELSE available_at END,
       due_at = CASE WHEN limit_key IS NOT NULL THEN max(CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER), COALESCE(due_at, CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER))) END,
       blocked_by = CASE WHEN limit_key IS NOT NULL THEN 'limit' END
 WHERE id IN (3);

