SELECT queue FROM main.sqlq_queues WHERE paused_at IS NOT NULL;

SELECT id, priority FROM main.jobs
 WHERE queue = ? AND reserved_at IS NULL AND priority = (SELECT priority FROM main.jobs WHERE queue = ? AND reserved_at IS NULL ORDER BY priority DESC LIMIT 1) AND available_at <= CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)
 ORDER BY available_at, id
 LIMIT ?;

UPDATE main.jobs
   SET reserved_at = CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER),
       reserved_by = ?,
       lease_expires_at = CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) + ?,
       lease_token = CASE WHEN lease_token < 4000000000000000000 THEN lease_token + 1 ELSE 1 END,
       attempts = min(attempts + 1, 1000000000),
       max_attempts = coalesce(max_attempts, (SELECT value FROM json_each(?) WHERE key = task))
 WHERE id IN (SELECT value FROM json_each(?))
RETURNING jobs.id, jobs.lease_token, jobs.queue, jobs.task, jobs.payload, jobs.attempts, coalesce(jobs.max_attempts, 5), jobs.releases, jobs.timeout_ms, (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) - jobs.unknown_since), jobs.cancel_requested_at, jobs.losses, jobs.priority, jobs.available_at, jobs.on_success, jobs.on_failure, jobs.label, jobs.headers, jobs.backoff, jobs.retention_ms, jobs.schedule, jobs.scheduled_for, jobs.cursor, (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) - jobs.start_by), jobs.flow_id, jobs.limit_key;

