SELECT public.jobs.id, public.jobs.lease_token 
FROM public.jobs 
WHERE public.jobs.reserved_at IS NOT NULL AND coalesce(public.jobs.lease_expires_at, public.jobs.reserved_at) OPERATOR(pg_catalog.<=) pg_catalog.statement_timestamp() AND ((NOT public.jobs.id OPERATOR(pg_catalog.=) ANY (ARRAY[]::BIGINT[]))) ORDER BY public.jobs.reserved_by, public.jobs.id 
 LIMIT %(param_1)s::INTEGER FOR UPDATE OF jobs SKIP LOCKED;

