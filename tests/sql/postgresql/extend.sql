WITH held AS MATERIALIZED 
(SELECT public.jobs.id AS id 
FROM unnest(CAST(%(batch_id)s::VARCHAR AS BIGINT[]), CAST(%(batch_token)s::VARCHAR AS BIGINT[])) AS anon_1(id, token) JOIN public.jobs ON public.jobs.id OPERATOR(pg_catalog.=) anon_1.id 
WHERE public.jobs.lease_token OPERATOR(pg_catalog.=) anon_1.token AND public.jobs.reserved_at IS NOT NULL ORDER BY public.jobs.id FOR UPDATE OF jobs SKIP LOCKED)
 UPDATE public.jobs SET lease_expires_at=(pg_catalog.statement_timestamp() OPERATOR(pg_catalog.+) (%(lease_ms)s::BIGINT OPERATOR(pg_catalog.*) interval '1 millisecond')) FROM held WHERE public.jobs.id OPERATOR(pg_catalog.=) held.id RETURNING public.jobs.id, public.jobs.lease_token, public.jobs.cancel_requested_at;

