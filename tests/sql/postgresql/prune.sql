DELETE FROM public.finished_jobs WHERE public.finished_jobs.id IN (SELECT public.finished_jobs.id 
FROM public.finished_jobs 
WHERE public.finished_jobs.finished_at < (statement_timestamp() + %(ago_ms)s::BIGINT * interval '1 millisecond') AND public.finished_jobs.expires_at IS NULL ORDER BY public.finished_jobs.finished_at 
 LIMIT %(most)s::INTEGER FOR UPDATE SKIP LOCKED);

