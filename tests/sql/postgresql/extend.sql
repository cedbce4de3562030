WITH held AS MATERIALIZED 
(SELECT public.jobs.id AS id 
FROM unnest(CAST(%(batch_id)s::VARCHAR AS BIGINT[]), CAST(%(batch_token)s::VARCHAR AS BIGINT[])) AS anon_1(id, token) JOIN public.jobs ON public.jobs.id = anon_1.id 
WHERE public.jobs.lease_token = anon_1.token AND public.jobs.reserved_at IS NOT NULL ORDER BY public.jobs.id FOR UPDATE OF jobs SKIP LOCKED)
 UPDATE public.jobs SET lease_expires_at=(statement_timestamp() + %(lease_ms)s::BIGINT * interval '1 millisecond') FROM held WHERE public.jobs.id = held.id RETURNING public.jobs.id, public.jobs.lease_token, public.jobs.cancel_requested_at;

