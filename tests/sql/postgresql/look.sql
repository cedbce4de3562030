SELECT queue, ms, place, NULL::boolean AS listens, NULL::bigint AS hosts, NULL::boolean AS expired,
       NULL::boolean AS limited, NULL::boolean AS signalled, NULL::varchar AS asked,
       NULL::boolean AS all_paused, NULL::double precision AS pause_ms
  FROM (
WITH RECURSIVE
each (queue) AS (
      SELECT pg_catalog.min(queue)::varchar FROM public.jobs WHERE reserved_at IS NULL AND queue OPERATOR(pg_catalog.>) %(after)s
      UNION ALL
      SELECT (SELECT pg_catalog.min(j.queue)::varchar FROM public.jobs j
               WHERE j.reserved_at IS NULL AND j.queue OPERATOR(pg_catalog.>) each.queue)
        FROM each WHERE each.queue IS NOT NULL),
names (queue, place) AS (
      SELECT queue, pg_catalog.max(place) FROM (
             SELECT pg_catalog.unnest(CAST(%(names)s AS varchar[])) AS queue, CAST(NULL AS bigint) AS place
             
        UNION ALL
       SELECT queue, pg_catalog.row_number() OVER () FROM (
              SELECT queue FROM each WHERE queue IS NOT NULL LIMIT 1000) AS in_window) AS named
       GROUP BY queue),
levels (queue, place, priority, available_at) AS (
      SELECT found.* FROM names CROSS JOIN LATERAL (
           
           SELECT queue, names.place AS place, priority, available_at FROM public.jobs
            WHERE queue OPERATOR(pg_catalog.=) names.queue AND reserved_at IS NULL 
            ORDER BY priority DESC, available_at, id LIMIT 1) AS found
      UNION ALL
      SELECT found.* FROM levels CROSS JOIN LATERAL (
           
           SELECT queue, levels.place AS place, priority, available_at FROM public.jobs
            WHERE queue OPERATOR(pg_catalog.=) levels.queue AND reserved_at IS NULL AND priority OPERATOR(pg_catalog.<) levels.priority
            ORDER BY priority DESC, available_at, id LIMIT 1) AS found)
SELECT queue,
       CASE WHEN NOT EXISTS (SELECT 1 FROM public.sqlq_queues q
                              WHERE q.queue OPERATOR(pg_catalog.=) levels.queue AND q.paused_at IS NOT NULL)
            THEN CAST(EXTRACT(EPOCH FROM pg_catalog.min(available_at) OPERATOR(pg_catalog.-) pg_catalog.statement_timestamp()) OPERATOR(pg_catalog.*) 1000
                      AS double precision) END,
       pg_catalog.max(place)
  FROM levels
 GROUP BY queue
) AS due (queue, ms, place)
 UNION ALL
SELECT NULL, (SELECT CAST(EXTRACT(EPOCH FROM pg_catalog.min(next_at) OPERATOR(pg_catalog.-) pg_catalog.statement_timestamp()) OPERATOR(pg_catalog.*) 1000 AS double precision)
                FROM public.sqlq_schedules WHERE next_at IS NOT NULL), NULL,
       CASE WHEN pg_catalog.current_setting('transaction_read_only') OPERATOR(pg_catalog.=) 'off'
            THEN %(channel)s OPERATOR(pg_catalog.=) ANY (SELECT pg_catalog.pg_listening_channels()) END,
       CASE WHEN CAST(%(hosts_within_ms)s AS bigint) IS NOT NULL THEN (
            SELECT pg_catalog.count(DISTINCT (host, coalesce(supervisor_pid, pid))) FROM public.sqlq_workers
             WHERE seen_at OPERATOR(pg_catalog.>) (pg_catalog.statement_timestamp()
                             OPERATOR(pg_catalog.-) (CAST(%(hosts_within_ms)s AS bigint) OPERATOR(pg_catalog.*) interval '1 millisecond'))) END,
       CASE WHEN CAST(%(maintenance)s AS boolean) THEN EXISTS (
            SELECT 1 FROM public.jobs
             WHERE reserved_at IS NOT NULL
               AND coalesce(lease_expires_at, reserved_at) OPERATOR(pg_catalog.<=) pg_catalog.statement_timestamp()) END,
       CASE WHEN CAST(%(maintenance)s AS boolean) THEN
            EXISTS (SELECT 1 FROM public.jobs WHERE blocked_by OPERATOR(pg_catalog.=) 'limit')
            OR EXISTS (SELECT 1 FROM public.jobs WHERE limit_key IS NOT NULL AND blocked_by IS NULL) END,
       EXISTS (SELECT 1 FROM public.sqlq_waits WHERE look_at OPERATOR(pg_catalog.<=) pg_catalog.statement_timestamp())
       OR EXISTS (SELECT 1 FROM public.sqlq_signals WHERE look_at OPERATOR(pg_catalog.<=) pg_catalog.statement_timestamp()),
       (SELECT pg_catalog.json_agg(pg_catalog.json_build_array(
                 id, asked, CAST(EXTRACT(EPOCH FROM asked_at) OPERATOR(pg_catalog.*) 1000000 AS bigint), CAST(EXTRACT(EPOCH FROM cancels_at) OPERATOR(pg_catalog.*) 1000000 AS bigint)))
          FROM public.sqlq_workers
         WHERE id OPERATOR(pg_catalog.=) ANY(CAST(%(workers)s AS varchar[]))
           AND (asked_at IS NOT NULL OR cancels_at IS NOT NULL))::varchar,
       EXISTS (SELECT 1 FROM public.sqlq_queues WHERE queue OPERATOR(pg_catalog.=) '' AND paused_at IS NOT NULL),
       (SELECT CAST(EXTRACT(EPOCH FROM pg_catalog.min(paused_until) OPERATOR(pg_catalog.-) pg_catalog.statement_timestamp()) OPERATOR(pg_catalog.*) 1000 AS double precision)
          FROM public.sqlq_queues);

