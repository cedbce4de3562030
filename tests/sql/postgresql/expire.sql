SELECT public.jobs.id, public.jobs.task, public.jobs.queue, public.jobs.label, public.jobs.limit_key 
FROM public.jobs 
WHERE start_by IS NOT NULL AND reserved_at IS NULL AND attempts = 0 AND public.jobs.start_by <= statement_timestamp() ORDER BY public.jobs.start_by, public.jobs.id 
 LIMIT %(most)s::INTEGER FOR UPDATE SKIP LOCKED;

