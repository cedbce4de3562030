SELECT DISTINCT public.sqlq_workers.queues 
FROM public.sqlq_workers 
WHERE public.sqlq_workers.seen_at OPERATOR(pg_catalog.>=) (pg_catalog.statement_timestamp() OPERATOR(pg_catalog.+) (%(param_1)s::BIGINT OPERATOR(pg_catalog.*) interval '1 millisecond'));

WITH held AS MATERIALIZED 
(SELECT public.jobs.id AS id 
FROM public.jobs 
WHERE (public.jobs.limit_key IS NOT NULL) AND (public.jobs.blocked_by IS NULL) AND public.jobs.reserved_at IS NULL AND NOT (((NOT public.jobs.queue OPERATOR(pg_catalog.=) ANY (SELECT public.sqlq_queues.queue 
FROM public.sqlq_queues 
WHERE public.sqlq_queues.paused_at IS NOT NULL))) AND ((%(serves_all)s::INTEGER OPERATOR(pg_catalog.=) %(param_1)s::INTEGER) OR public.jobs.queue OPERATOR(pg_catalog.=) ANY (ARRAY[]::VARCHAR[]))) ORDER BY public.jobs.id 
 LIMIT %(most)s::INTEGER FOR UPDATE OF jobs SKIP LOCKED)
 UPDATE public.jobs SET available_at=TIMESTAMP WITH TIME ZONE '9998-01-01 00:00:00+00:00', blocked_by=%(blocked_by)s::VARCHAR, due_at=coalesce(public.jobs.due_at, public.jobs.available_at) FROM held WHERE public.jobs.id OPERATOR(pg_catalog.=) held.id RETURNING public.jobs.limit_key;

WITH RECURSIVE each_limit_key (limit_key) AS (
      SELECT pg_catalog.min(limit_key) FROM public.jobs WHERE blocked_by OPERATOR(pg_catalog.=) 'limit' AND limit_key OPERATOR(pg_catalog.>) %(after)s
      UNION ALL
      SELECT (SELECT pg_catalog.min(limit_key) FROM public.jobs
               WHERE blocked_by OPERATOR(pg_catalog.=) 'limit' AND limit_key OPERATOR(pg_catalog.>) each_limit_key.limit_key)
        FROM each_limit_key WHERE each_limit_key.limit_key IS NOT NULL)
SELECT limit_key FROM each_limit_key WHERE limit_key IS NOT NULL LIMIT %(most)s;

