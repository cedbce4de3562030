SELECT queue, CASE WHEN queue NOT IN (SELECT queue FROM shop.sqlq_queues WHERE paused_at IS NOT NULL)
                   THEN TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), MIN(first_at)) / 1000e0 END
  FROM (SELECT reserved_at, queue, priority, MIN(available_at) AS first_at
          FROM shop.jobs FORCE INDEX (jobs_claim)
         WHERE reserved_at IS NULL GROUP BY reserved_at, queue, priority) AS levels
 GROUP BY queue
 UNION ALL SELECT NULL, NULL FROM DUAL WHERE @@global.read_only;

SELECT NULL, (SELECT TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), next_at) / 1000e0
                FROM shop.sqlq_schedules WHERE next_at IS NOT NULL ORDER BY next_at LIMIT 1),
       NULL, 0,
       CASE WHEN %s IS NOT NULL THEN (
            SELECT COUNT(DISTINCT host, COALESCE(supervisor_pid, pid)) FROM shop.sqlq_workers
             WHERE seen_at > UTC_TIMESTAMP(6) - INTERVAL %s * 1000 MICROSECOND) END,
       CASE WHEN %s THEN EXISTS (
            SELECT 1 FROM shop.jobs WHERE reserved_at IS NOT NULL
               AND lease_expires_at <= UTC_TIMESTAMP(6)) END,
       CASE WHEN %s THEN
            EXISTS (SELECT 1 FROM shop.jobs WHERE blocked_by = 'limit')
            OR EXISTS (SELECT 1 FROM shop.jobs WHERE limit_key IS NOT NULL AND blocked_by IS NULL) END,
       EXISTS (SELECT 1 FROM shop.sqlq_waits WHERE look_at <= UTC_TIMESTAMP(6))
       OR EXISTS (SELECT 1 FROM shop.sqlq_signals WHERE look_at <= UTC_TIMESTAMP(6)),
       (SELECT JSON_ARRAYAGG(JSON_ARRAY(
                 id, asked, TIMESTAMPDIFF(MICROSECOND, TIMESTAMP '1970-01-01 00:00:00', asked_at), TIMESTAMPDIFF(MICROSECOND, TIMESTAMP '1970-01-01 00:00:00', cancels_at)))
          FROM shop.sqlq_workers
         WHERE id IN (NULL) AND (asked_at IS NOT NULL OR cancels_at IS NOT NULL)),
       EXISTS (SELECT 1 FROM shop.sqlq_queues WHERE queue = '' AND paused_at IS NOT NULL),
       (SELECT TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), MIN(paused_until)) / 1000e0
          FROM shop.sqlq_queues);

