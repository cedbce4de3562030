WITH held AS MATERIALIZED 
(SELECT public.jobs.id AS id 
FROM public.jobs 
WHERE public.jobs.reserved_at IS NOT NULL AND public.jobs.reserved_by OPERATOR(pg_catalog.=) ANY (ARRAY[%(owners_1)s::VARCHAR]::VARCHAR[]) ORDER BY public.jobs.reserved_by, public.jobs.id FOR UPDATE OF jobs SKIP LOCKED)
 UPDATE public.jobs SET lease_expires_at=(pg_catalog.statement_timestamp() OPERATOR(pg_catalog.+) (%(lease_ms)s::BIGINT OPERATOR(pg_catalog.*) interval '1 millisecond')) FROM held WHERE public.jobs.id OPERATOR(pg_catalog.=) held.id RETURNING public.jobs.reserved_by, public.jobs.id, public.jobs.lease_token, public.jobs.cancel_requested_at;

WITH held AS MATERIALIZED 
(SELECT public.sqlq_workers.id AS id 
FROM public.sqlq_workers 
WHERE public.sqlq_workers.id OPERATOR(pg_catalog.=) ANY (ARRAY[%(owners_1)s::VARCHAR]::VARCHAR[]) ORDER BY public.sqlq_workers.id FOR UPDATE OF sqlq_workers SKIP LOCKED)
 UPDATE public.sqlq_workers SET seen_at=pg_catalog.statement_timestamp(), clock_at=%(clock_at)s::TIMESTAMP WITH TIME ZONE FROM held WHERE public.sqlq_workers.id OPERATOR(pg_catalog.=) held.id RETURNING public.sqlq_workers.id;

SELECT public.sqlq_workers.id 
FROM public.sqlq_workers 
WHERE public.sqlq_workers.id OPERATOR(pg_catalog.=) ANY (ARRAY[%(owners_1)s::VARCHAR]::VARCHAR[]) ORDER BY public.sqlq_workers.id;

