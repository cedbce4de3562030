WITH expired AS MATERIALIZED 
(SELECT public.jobs.id AS id 
FROM public.jobs 
WHERE public.jobs.reserved_at IS NOT NULL AND public.jobs.lease_expires_at <= statement_timestamp() ORDER BY public.jobs.id 
 LIMIT %(most)s::INTEGER FOR UPDATE SKIP LOCKED)
 UPDATE public.jobs SET lease_token=(public.jobs.lease_token + %(lease_token_1)s::BIGINT) FROM expired WHERE public.jobs.id = expired.id RETURNING public.jobs.id, public.jobs.lease_token, public.jobs.task, public.jobs.queue, public.jobs.attempts, public.jobs.max_attempts, public.jobs.losses, public.jobs.reserved_by;

