WITH RECURSIVE
names (queue, place) AS (
      SELECT queue, pg_catalog.max(place) FROM (
             SELECT pg_catalog.unnest(CAST(%(names)s AS varchar[])) AS queue, CAST(NULL AS bigint) AS place
             ) AS named
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
 UNION ALL SELECT NULL, NULL, NULL WHERE pg_catalog.current_setting('transaction_read_only') OPERATOR(pg_catalog.=) 'on';

