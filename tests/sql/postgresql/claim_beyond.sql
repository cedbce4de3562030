WITH due AS MATERIALIZED (
     SELECT ready.id
       FROM ROWS FROM (pg_catalog.unnest(CAST(%(queues)s AS varchar[])), pg_catalog.unnest(CAST(%(priorities)s AS smallint[])),
                       pg_catalog.unnest(CAST(%(moments)s AS bigint[])), pg_catalog.unnest(CAST(%(ids)s AS bigint[])))
      WITH ORDINALITY AS level (queue, priority, moment, id, place)
      CROSS JOIN LATERAL (
            SELECT id FROM public.jobs
             WHERE queue OPERATOR(pg_catalog.=) level.queue AND priority OPERATOR(pg_catalog.=) level.priority
               AND reserved_at IS NULL AND available_at OPERATOR(pg_catalog.<=) pg_catalog.statement_timestamp()
               AND (available_at, id)
                   OPERATOR(pg_catalog.>) (TIMESTAMP WITH TIME ZONE 'epoch' OPERATOR(pg_catalog.+) (level.moment OPERATOR(pg_catalog.*) interval '1 microsecond'), level.id)
               AND NOT EXISTS (SELECT 1 FROM public.sqlq_queues q
                                WHERE q.queue OPERATOR(pg_catalog.=) level.queue AND q.paused_at IS NOT NULL)
             ORDER BY available_at, id
             LIMIT %(most)s
               FOR UPDATE SKIP LOCKED) AS ready
      LIMIT %(most)s)
UPDATE public.jobs
   SET reserved_at=pg_catalog.statement_timestamp(),
       reserved_by=%(owner)s,
       lease_expires_at=pg_catalog.statement_timestamp() OPERATOR(pg_catalog.+) (CAST(%(lease_ms)s AS bigint) OPERATOR(pg_catalog.*) interval '1 millisecond'),
       lease_token=CASE WHEN lease_token OPERATOR(pg_catalog.<) 4000000000000000000 THEN lease_token OPERATOR(pg_catalog.+) 1 ELSE 1 END,
       attempts=least(attempts OPERATOR(pg_catalog.+) 1, 1000000000),
       max_attempts=coalesce(max_attempts,
                             CAST(CAST(%(max_attempts)s AS pg_catalog.json) OPERATOR(pg_catalog.->>) task AS integer))
 WHERE id OPERATOR(pg_catalog.=) ANY(ARRAY(SELECT id FROM due))
RETURNING jobs.id, jobs.lease_token, jobs.queue, jobs.task, jobs.payload, jobs.attempts, coalesce(jobs.max_attempts, 5), jobs.releases, jobs.timeout_ms, CAST(EXTRACT(EPOCH FROM pg_catalog.statement_timestamp() OPERATOR(pg_catalog.-) jobs.unknown_since) OPERATOR(pg_catalog.*) 1000 AS BIGINT), jobs.cancel_requested_at, jobs.losses, jobs.priority, CAST(EXTRACT(EPOCH FROM jobs.available_at) OPERATOR(pg_catalog.*) 1000 AS DOUBLE PRECISION), jobs.on_success, jobs.on_failure, jobs.label, jobs.headers, jobs.backoff, jobs.retention_ms, jobs.schedule, CAST(EXTRACT(EPOCH FROM jobs.scheduled_for) OPERATOR(pg_catalog.*) 1000 AS DOUBLE PRECISION), jobs.cursor, CAST(EXTRACT(EPOCH FROM pg_catalog.statement_timestamp() OPERATOR(pg_catalog.-) jobs.start_by) OPERATOR(pg_catalog.*) 1000 AS BIGINT), jobs.flow_id, jobs.limit_key;

