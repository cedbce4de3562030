SELECT public.jobs.id, public.jobs.task, public.jobs.queue, public.jobs.label, public.jobs.limit_key 
FROM public.jobs 
WHERE start_by IS NOT NULL AND reserved_at IS NULL AND attempts OPERATOR(pg_catalog.=) 0 AND public.jobs.start_by OPERATOR(pg_catalog.<=) pg_catalog.statement_timestamp() ORDER BY public.jobs.start_by, public.jobs.id 
 LIMIT %(most)s::INTEGER FOR UPDATE OF jobs SKIP LOCKED;

