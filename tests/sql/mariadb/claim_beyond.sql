SELECT jobs.id, CASE WHEN lease_token < 4000000000000000000 THEN lease_token + 1 ELSE 1 END, jobs.queue, jobs.task, jobs.payload, LEAST(attempts + 1, 1000000000), coalesce(jobs.max_attempts, 5), jobs.releases, jobs.timeout_ms, (TIMESTAMPDIFF(MICROSECOND, jobs.unknown_since, UTC_TIMESTAMP(6)) DIV 1000), jobs.cancel_requested_at, jobs.losses, jobs.priority, CAST(TIMESTAMPDIFF(MICROSECOND, TIMESTAMP '1970-01-01 00:00:00', jobs.available_at) / 1000 AS DOUBLE), jobs.on_success, jobs.on_failure, jobs.label, jobs.headers, jobs.backoff, jobs.retention_ms, jobs.schedule, CAST(TIMESTAMPDIFF(MICROSECOND, TIMESTAMP '1970-01-01 00:00:00', jobs.scheduled_for) / 1000 AS DOUBLE), jobs.`cursor`, (TIMESTAMPDIFF(MICROSECOND, jobs.start_by, UTC_TIMESTAMP(6)) DIV 1000), jobs.flow_id, jobs.limit_key, max_attempts FROM shop.jobs FORCE INDEX (jobs_claim)
 WHERE reserved_at IS NULL AND queue = %s AND priority = %s AND available_at <= UTC_TIMESTAMP(6) AND (available_at > %s OR available_at = %s AND id > %s)
   AND NOT EXISTS (SELECT 1 FROM shop.sqlq_queues AS q
                    WHERE q.queue = jobs.queue AND q.paused_at IS NOT NULL)
 ORDER BY available_at, id LIMIT %s FOR UPDATE SKIP LOCKED;

SELECT jobs.id, CASE WHEN lease_token < 4000000000000000000 THEN lease_token + 1 ELSE 1 END, jobs.queue, jobs.task, jobs.payload, LEAST(attempts + 1, 1000000000), coalesce(jobs.max_attempts, 5), jobs.releases, jobs.timeout_ms, (TIMESTAMPDIFF(MICROSECOND, jobs.unknown_since, UTC_TIMESTAMP(6)) DIV 1000), jobs.cancel_requested_at, jobs.losses, jobs.priority, CAST(TIMESTAMPDIFF(MICROSECOND, TIMESTAMP '1970-01-01 00:00:00', jobs.available_at) / 1000 AS DOUBLE), jobs.on_success, jobs.on_failure, jobs.label, jobs.headers, jobs.backoff, jobs.retention_ms, jobs.schedule, CAST(TIMESTAMPDIFF(MICROSECOND, TIMESTAMP '1970-01-01 00:00:00', jobs.scheduled_for) / 1000 AS DOUBLE), jobs.`cursor`, (TIMESTAMPDIFF(MICROSECOND, jobs.start_by, UTC_TIMESTAMP(6)) DIV 1000), jobs.flow_id, jobs.limit_key, max_attempts FROM shop.jobs FORCE INDEX (jobs_claim)
 WHERE reserved_at IS NULL AND queue = %s AND priority = %s AND available_at <= UTC_TIMESTAMP(6) AND (available_at > %s OR available_at = %s AND id > %s)
   AND NOT EXISTS (SELECT 1 FROM shop.sqlq_queues AS q
                    WHERE q.queue = jobs.queue AND q.paused_at IS NOT NULL)
 ORDER BY available_at, id LIMIT %s FOR UPDATE SKIP LOCKED;

SET STATEMENT innodb_lock_wait_timeout = 0, check_constraint_checks = 0 FOR UPDATE shop.jobs FORCE INDEX (PRIMARY)
   SET reserved_at = UTC_TIMESTAMP(6), reserved_by = %s, lease_expires_at = UTC_TIMESTAMP(6) + INTERVAL %s * 1000 MICROSECOND,
       lease_token = CASE WHEN lease_token < 4000000000000000000 THEN lease_token + 1 ELSE 1 END, attempts = LEAST(attempts + 1, 1000000000)
 WHERE id IN (30, 31);

