SELECT queue, ms, NULL::boolean AS listens, NULL::bigint AS hosts, NULL::boolean AS expired,
       NULL::boolean AS late, NULL::boolean AS limited, NULL::text AS asked,
       NULL::boolean AS all_paused, NULL::double precision AS pause_ms
  FROM (
WITH RECURSIVE names (queue) AS (
      
      SELECT min(queue)::text FROM public.jobs WHERE reserved_at IS NULL
      UNION ALL
      SELECT (SELECT min(j.queue)::text FROM public.jobs j
               WHERE j.reserved_at IS NULL AND j.queue > names.queue)
        FROM names WHERE names.queue IS NOT NULL),
levels (queue, priority, available_at) AS (
      SELECT found.* FROM names CROSS JOIN LATERAL (
           SELECT queue, priority, available_at FROM public.jobs
            WHERE queue = names.queue AND reserved_at IS NULL 
            ORDER BY priority DESC, available_at, id LIMIT 1) AS found
      UNION ALL
      SELECT found.* FROM levels CROSS JOIN LATERAL (
           
           SELECT queue, priority, available_at FROM public.jobs
            WHERE queue = levels.queue AND reserved_at IS NULL AND priority < levels.priority
            ORDER BY priority DESC, available_at, id LIMIT 1) AS found)
SELECT queue, CAST(EXTRACT(EPOCH FROM min(available_at) - statement_timestamp()) * 1000 AS double precision)
  FROM levels
 WHERE NOT EXISTS (SELECT 1 FROM public.sqlq_queues q
                    WHERE q.queue = levels.queue AND q.paused_at IS NOT NULL)
 GROUP BY queue
) AS due (queue, ms)
 UNION ALL
SELECT NULL, (SELECT CAST(EXTRACT(EPOCH FROM min(next_at) - statement_timestamp()) * 1000 AS double precision)
                FROM public.sqlq_schedules WHERE next_at IS NOT NULL),
       %(channel)s IN (SELECT pg_listening_channels()),
       CASE WHEN CAST(%(hosts_within_ms)s AS bigint) IS NOT NULL THEN (
            SELECT count(DISTINCT (host, coalesce(supervisor_pid, pid))) FROM public.sqlq_workers
             WHERE seen_at > statement_timestamp()
                             - CAST(%(hosts_within_ms)s AS bigint) * interval '1 millisecond') END,
       CASE WHEN CAST(%(chores)s AS boolean) THEN EXISTS (
            SELECT 1 FROM public.jobs
             WHERE reserved_at IS NOT NULL
               AND coalesce(lease_expires_at, reserved_at) <= statement_timestamp()) END,
       CASE WHEN CAST(%(chores)s AS boolean) THEN EXISTS (
            SELECT 1 FROM public.jobs WHERE start_by IS NOT NULL AND reserved_at IS NULL AND attempts = 0 AND start_by <= statement_timestamp()) END,
       CASE WHEN CAST(%(chores)s AS boolean) THEN
            EXISTS (SELECT 1 FROM public.jobs WHERE blocked_by = 'limit')
            OR EXISTS (SELECT 1 FROM public.jobs WHERE limit_key IS NOT NULL AND blocked_by IS NULL) END,
       (SELECT json_agg(json_build_array(
                 id, asked, CAST(EXTRACT(EPOCH FROM asked_at) * 1000000 AS bigint), CAST(EXTRACT(EPOCH FROM cancels_at) * 1000000 AS bigint)))
          FROM public.sqlq_workers
         WHERE id = ANY(CAST(%(workers)s AS varchar[]))
           AND (asked_at IS NOT NULL OR cancels_at IS NOT NULL))::text,
       EXISTS (SELECT 1 FROM public.sqlq_queues WHERE queue = '' AND paused_at IS NOT NULL),
       (SELECT CAST(EXTRACT(EPOCH FROM min(paused_until) - statement_timestamp()) * 1000 AS double precision)
          FROM public.sqlq_queues);

