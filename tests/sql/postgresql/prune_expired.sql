DELETE FROM public.finished_jobs WHERE public.finished_jobs.id IN (SELECT public.finished_jobs.id 
FROM public.finished_jobs 
WHERE public.finished_jobs.expires_at < statement_timestamp() ORDER BY public.finished_jobs.expires_at 
 LIMIT %(most)s::INTEGER FOR UPDATE SKIP LOCKED);

DELETE FROM public.failed_jobs WHERE public.failed_jobs.id IN (SELECT public.failed_jobs.id 
FROM public.failed_jobs 
WHERE public.failed_jobs.expires_at < statement_timestamp() ORDER BY public.failed_jobs.expires_at 
 LIMIT %(most)s::INTEGER FOR UPDATE SKIP LOCKED);

