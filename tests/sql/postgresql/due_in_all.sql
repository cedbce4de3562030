WITH RECURSIVE names (queue) AS (
      
      SELECT pg_catalog.min(queue)::varchar FROM public.jobs WHERE reserved_at IS NULL
      UNION ALL
      SELECT (SELECT pg_catalog.min(j.queue)::varchar FROM public.jobs j
               WHERE j.reserved_at IS NULL AND j.queue OPERATOR(pg_catalog.>) names.queue)
        FROM names WHERE names.queue IS NOT NULL),
levels (queue, priority, available_at) AS (
      SELECT found.* FROM names CROSS JOIN LATERAL (
           SELECT queue, priority, available_at FROM public.jobs
            WHERE queue OPERATOR(pg_catalog.=) names.queue AND reserved_at IS NULL 
            ORDER BY priority DESC, available_at, id LIMIT 1) AS found
      UNION ALL
      SELECT found.* FROM levels CROSS JOIN LATERAL (
           
           SELECT queue, priority, available_at FROM public.jobs
            WHERE queue OPERATOR(pg_catalog.=) levels.queue AND reserved_at IS NULL AND priority OPERATOR(pg_catalog.<) levels.priority
            ORDER BY priority DESC, available_at, id LIMIT 1) AS found)
SELECT queue, CAST(EXTRACT(EPOCH FROM pg_catalog.min(available_at) OPERATOR(pg_catalog.-) pg_catalog.statement_timestamp()) OPERATOR(pg_catalog.*) 1000 AS double precision)
  FROM levels
 WHERE NOT EXISTS (SELECT 1 FROM public.sqlq_queues q
                    WHERE q.queue OPERATOR(pg_catalog.=) levels.queue AND q.paused_at IS NOT NULL)
 GROUP BY queue
 UNION ALL SELECT NULL, NULL WHERE pg_catalog.current_setting('transaction_read_only') OPERATOR(pg_catalog.=) 'on';

