WITH RECURSIVE names (queue) AS (
      SELECT unnest(CAST(%(names)s AS varchar[]))),
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
 GROUP BY queue;

