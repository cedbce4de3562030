WITH due AS MATERIALIZED (
     SELECT ready.id
       FROM unnest(CAST(%(names)s AS varchar[])) WITH ORDINALITY AS wanted (queue, place)
      CROSS JOIN LATERAL (
            WITH RECURSIVE levels (priority) AS (
                  (SELECT priority FROM public.jobs
                    WHERE queue = wanted.queue AND reserved_at IS NULL
                      AND NOT EXISTS (SELECT 1 FROM public.sqlq_queues q
                                       WHERE q.queue = wanted.queue AND q.paused_at IS NOT NULL)
                    ORDER BY priority DESC LIMIT 1)
                  UNION ALL
                  SELECT (SELECT j.priority FROM public.jobs j
                           WHERE j.queue = wanted.queue AND j.reserved_at IS NULL
                             AND j.priority < levels.priority
                           ORDER BY j.priority DESC LIMIT 1)
                    FROM levels WHERE levels.priority IS NOT NULL)
            SELECT wanted.queue, priority FROM levels WHERE priority IS NOT NULL) AS level
      CROSS JOIN LATERAL (
            SELECT id FROM public.jobs
             WHERE queue = level.queue AND priority = level.priority
               AND reserved_at IS NULL AND available_at <= statement_timestamp()
             ORDER BY available_at, id
             LIMIT %(most)s
               FOR UPDATE SKIP LOCKED) AS ready
      LIMIT %(most)s)
UPDATE public.jobs
   SET reserved_at = statement_timestamp(),
       reserved_by = %(owner)s,
       lease_expires_at = statement_timestamp() + CAST(%(lease_ms)s AS bigint) * interval '1 millisecond',
       lease_token = CASE WHEN lease_token < 4000000000000000000 THEN lease_token + 1 ELSE 1 END,
       attempts = least(attempts + 1, 1000000000),
       max_attempts = coalesce(max_attempts, CAST(CAST(%(max_attempts)s AS json) ->> task AS integer)),
       on_success = coalesce(on_success, CAST(%(follow_ups)s AS json) -> task ->> 'on_success'),
       on_failure = coalesce(on_failure, CAST(%(follow_ups)s AS json) -> task ->> 'on_failure')
 WHERE id = ANY(ARRAY(SELECT id FROM due))
RETURNING jobs.id, jobs.lease_token, jobs.queue, jobs.task, jobs.payload, jobs.attempts, coalesce(jobs.max_attempts, 5), jobs.releases, jobs.timeout_ms, CAST(EXTRACT(EPOCH FROM statement_timestamp() - jobs.unknown_since) * 1000 AS BIGINT), jobs.cancel_requested_at, jobs.losses, jobs.priority, CAST(EXTRACT(EPOCH FROM jobs.available_at) * 1000 AS DOUBLE PRECISION), jobs.on_success, jobs.on_failure, jobs.label, jobs.headers, jobs.backoff, jobs.retention_ms, jobs.schedule, CAST(EXTRACT(EPOCH FROM jobs.scheduled_for) * 1000 AS DOUBLE PRECISION), jobs.cursor, CAST(EXTRACT(EPOCH FROM statement_timestamp() - jobs.start_by) * 1000 AS BIGINT), jobs.flow_id, jobs.limit_key;

