SELECT DISTINCT job.id
  FROM shop.sqlq_edges AS edge FORCE INDEX (sqlq_edges_parent)
 STRAIGHT_JOIN shop.jobs AS job FORCE INDEX (PRIMARY) ON job.id = edge.job_id
 WHERE edge.depends_on IN (1, 2) AND job.blocked_by = 'flow'
   AND (edge.on_outcome <> 'success'
        OR NOT EXISTS (SELECT 1 FROM shop.failed_jobs AS failed WHERE failed.id = edge.depends_on)) LIMIT 1000;

SELECT job.id,
       MAX(failed.id IS NULL AND edge.on_outcome <> 'ended'
           AND (edge.on_outcome = 'failure' OR COALESCE(finished.outcome, '') <> 'completed')) AS never
  FROM shop.jobs AS job FORCE INDEX (PRIMARY)
 STRAIGHT_JOIN shop.sqlq_edges AS edge FORCE INDEX (PRIMARY) ON edge.job_id = job.id
  LEFT JOIN shop.finished_jobs AS finished ON finished.id = edge.depends_on
  LEFT JOIN shop.failed_jobs AS failed ON failed.id = edge.depends_on
 WHERE job.id IN (3, 4) AND job.blocked_by = 'flow' AND job.reserved_at IS NULL
   AND NOT EXISTS (SELECT 1 FROM shop.sqlq_edges AS open
                    STRAIGHT_JOIN shop.jobs AS live FORCE INDEX (PRIMARY) ON live.id = open.depends_on
                    WHERE open.job_id = job.id)
 GROUP BY job.id
HAVING never OR NOT MAX(failed.id IS NOT NULL AND edge.on_outcome = 'success');

SELECT id FROM shop.jobs FORCE INDEX (PRIMARY)
 WHERE id IN (3, 4) AND blocked_by = 'flow' AND reserved_at IS NULL
 ORDER BY id FOR UPDATE SKIP LOCKED;

INSERT INTO shop.sqlq_wakes (limit_key)
SELECT DISTINCT limit_key FROM shop.jobs WHERE id IN (3) AND limit_key IS NOT NULL;

UPDATE shop.jobs FORCE INDEX (PRIMARY)
   SET available_at = CASE WHEN limit_key IS NULL THEN GREATEST(UTC_TIMESTAMP(6), COALESCE(due_at, UTC_TIMESTAMP(6)))
                           ELSE available_at END,
       due_at = CASE WHEN limit_key IS NOT NULL THEN GREATEST(UTC_TIMESTAMP(6), COALESCE(due_at, UTC_TIMESTAMP(6))) END,
       blocked_by = CASE WHEN limit_key IS NOT NULL THEN 'limit' END
 WHERE id IN (3);

INSERT INTO shop.finished_jobs (id, queue, task, payload, priority, attempts, max_attempts, available_at, reserved_at, reserved_by, lease_token, unique_key, unique_until, on_success, on_failure, timeout_ms, releases, errors, headers, label, group_key, backoff, retention_ms, progress, progress_of, progress_note, schedule, scheduled_for, `cursor`, start_by, flow_id, limit_key, replay_of, created_at, outcome, reason)
SELECT id, queue, task, payload, priority, attempts, max_attempts, available_at, reserved_at, reserved_by, lease_token, unique_key, unique_until, on_success, on_failure, timeout_ms, releases, errors, headers, label, group_key, backoff, retention_ms, progress, progress_of, progress_note, schedule, scheduled_for, `cursor`, start_by, flow_id, limit_key, replay_of, created_at, 'cancelled', %s FROM shop.jobs FORCE INDEX (PRIMARY) WHERE id IN (4);

DELETE FROM shop.jobs USING JSON_TABLE('[4]', '$[*]' COLUMNS (id BIGINT PATH '$')) AS step
 STRAIGHT_JOIN shop.jobs FORCE INDEX (PRIMARY)
 WHERE jobs.id = step.id;

