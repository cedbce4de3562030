WITH held AS MATERIALIZED 
(SELECT public.jobs.id AS id 
FROM public.jobs 
WHERE public.jobs.reserved_at IS NOT NULL AND coalesce(public.jobs.lease_expires_at, public.jobs.reserved_at) OPERATOR(pg_catalog.<=) pg_catalog.statement_timestamp() ORDER BY public.jobs.id 
 LIMIT %(most)s::INTEGER FOR UPDATE OF jobs SKIP LOCKED)
 UPDATE public.jobs SET lease_token=CASE WHEN (public.jobs.lease_token OPERATOR(pg_catalog.<) %(lease_token_1)s::BIGINT) THEN public.jobs.lease_token OPERATOR(pg_catalog.+) %(lease_token_2)s::BIGINT ELSE %(param_1)s::INTEGER END FROM held WHERE public.jobs.id OPERATOR(pg_catalog.=) held.id RETURNING public.jobs.id, public.jobs.lease_token, public.jobs.task, public.jobs.queue, public.jobs.attempts, coalesce(public.jobs.max_attempts, 5) AS max_attempts, public.jobs.losses, public.jobs.reserved_at, public.jobs.reserved_by, public.jobs.label, public.jobs.headers, public.jobs.on_failure, public.jobs.flow_id, public.jobs.limit_key;

