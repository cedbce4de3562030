SELECT DISTINCT job.id
  FROM json_each(?) AS ended
 CROSS JOIN main.sqlq_edges AS edge ON edge.depends_on = ended.value
 CROSS JOIN main.jobs AS job ON job.id = edge.job_id
 WHERE job.blocked_by = 'flow'
   AND (edge.on_outcome <> 'success' OR (
        SELECT id FROM main.failed_jobs WHERE id = ended.value) IS NULL) LIMIT ?;

WITH quiet AS MATERIALIZED (
     SELECT job.id FROM json_each(?) AS step CROSS JOIN main.jobs AS job ON job.id = step.value
      WHERE job.blocked_by = 'flow' AND job.reserved_at IS NULL
        AND NOT EXISTS (
            SELECT 1 FROM main.sqlq_edges AS edge CROSS JOIN main.jobs AS live ON live.id = edge.depends_on
             WHERE edge.job_id = job.id ORDER BY edge.depends_on DESC LIMIT 1))
SELECT quiet.id,
       max(failed.id IS NULL AND edge.on_outcome <> 'ended'
           AND (edge.on_outcome = 'failure' OR finished.outcome IS NOT 'completed')) AS never
  FROM quiet
  JOIN main.sqlq_edges AS edge ON edge.job_id = quiet.id
  LEFT JOIN main.finished_jobs AS finished ON finished.id = edge.depends_on
  LEFT JOIN main.failed_jobs AS failed ON failed.id = edge.depends_on
 GROUP BY quiet.id
HAVING never OR NOT max(failed.id IS NOT NULL AND edge.on_outcome = 'success');

INSERT INTO main.sqlq_wakes (limit_key)
SELECT DISTINCT limit_key FROM main.jobs
 WHERE id IN (SELECT value FROM json_each(?)) AND limit_key IS NOT NULL;

UPDATE main.jobs
   SET available_at = CASE WHEN limit_key IS NULL THEN max(CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER), coalesce(due_at, 0))
                           ELSE available_at END,
       blocked_by = CASE WHEN limit_key IS NOT NULL THEN 'limit' END,
       due_at = CASE WHEN limit_key IS NOT NULL THEN max(CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER), coalesce(due_at, 0)) END
 WHERE id IN (SELECT value FROM json_each(?));

INSERT INTO main.finished_jobs (id, queue, task, payload, priority, attempts, max_attempts, available_at, reserved_at, reserved_by, lease_token, unique_key, unique_until, on_success, on_failure, timeout_ms, releases, errors, headers, label, group_key, backoff, retention_ms, progress, progress_of, progress_note, schedule, scheduled_for, cursor, start_by, flow_id, limit_key, replay_of, created_at, outcome, reason)
SELECT id, queue, task, payload, priority, attempts, max_attempts, available_at, reserved_at, reserved_by, lease_token, unique_key, unique_until, on_success, on_failure, timeout_ms, releases, errors, headers, label, group_key, backoff, retention_ms, progress, progress_of, progress_note, schedule, scheduled_for, cursor, start_by, flow_id, limit_key, replay_of, created_at, 'cancelled', ? FROM main.jobs WHERE id IN (SELECT value FROM json_each(?));

DELETE FROM main.jobs WHERE id IN (SELECT value FROM json_each(?));

