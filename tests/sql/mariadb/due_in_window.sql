SELECT queue, CASE WHEN queue NOT IN (SELECT queue FROM shop.sqlq_queues WHERE paused_at IS NOT NULL)
                   THEN TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), MIN(first_at)) / 1000e0 END
  FROM (SELECT reserved_at, queue, priority, MIN(available_at) AS first_at
          FROM shop.jobs FORCE INDEX (jobs_claim)
         WHERE reserved_at IS NULL GROUP BY reserved_at, queue, priority) AS levels
 GROUP BY queue
 UNION ALL SELECT NULL, NULL FROM DUAL WHERE @@global.read_only;

