WITH waiting_in_vain AS MATERIALIZED 
(SELECT public.jobs.id AS id 
FROM public.jobs 
WHERE public.jobs.limit_key IS NOT NULL AND public.jobs.blocked_by IS NULL AND public.jobs.reserved_at IS NULL AND public.jobs.queue IN (SELECT public.sqlq_queues.queue 
FROM public.sqlq_queues 
WHERE public.sqlq_queues.paused_at IS NOT NULL) ORDER BY public.jobs.id 
 LIMIT %(most)s::INTEGER FOR UPDATE OF jobs SKIP LOCKED)
 UPDATE public.jobs SET available_at=timestamptz '9998-01-01 00:00:00+00:00', blocked_by=%(blocked_by)s::VARCHAR, due_at=coalesce(public.jobs.due_at, public.jobs.available_at) WHERE public.jobs.id IN (SELECT waiting_in_vain.id 
FROM waiting_in_vain) RETURNING public.jobs.limit_key;

SELECT DISTINCT public.sqlq_workers.queues 
FROM public.sqlq_workers 
WHERE public.sqlq_workers.seen_at >= (statement_timestamp() + %(ago_ms)s::BIGINT * interval '1 millisecond');

WITH RECURSIVE keys(key) AS 
(SELECT min(public.jobs.limit_key) AS key 
FROM public.jobs 
WHERE public.jobs.blocked_by = %(blocked_by_1)s::VARCHAR AND public.jobs.limit_key > %(after_key)s::VARCHAR UNION ALL SELECT (SELECT min(public.jobs.limit_key) AS min_1 
FROM public.jobs 
WHERE public.jobs.blocked_by = %(blocked_by_1)s::VARCHAR AND public.jobs.limit_key > keys.key) AS anon_1 
FROM keys 
WHERE keys.key IS NOT NULL)
 SELECT keys.key 
FROM keys 
 LIMIT %(most)s::INTEGER;

