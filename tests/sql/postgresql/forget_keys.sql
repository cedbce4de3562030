WITH held AS MATERIALIZED 
(SELECT public.sqlq_limits.limit_key AS limit_key 
FROM public.sqlq_limits 
WHERE public.sqlq_limits.used_at OPERATOR(pg_catalog.<) (pg_catalog.statement_timestamp() OPERATOR(pg_catalog.+) (%(param_1)s::BIGINT OPERATOR(pg_catalog.*) interval '1 millisecond')) AND public.sqlq_limits.pinned_at IS NULL AND ((public.sqlq_limits.next_free_at IS NULL) OR (public.sqlq_limits.next_free_at OPERATOR(pg_catalog.<) pg_catalog.statement_timestamp())) AND ((public.sqlq_limits.closed_until IS NULL) OR (public.sqlq_limits.closed_until OPERATOR(pg_catalog.<) pg_catalog.statement_timestamp())) AND NOT (EXISTS (SELECT * 
FROM public.jobs 
WHERE public.jobs.limit_key OPERATOR(pg_catalog.=) public.sqlq_limits.limit_key AND public.jobs.blocked_by IS NULL)) AND NOT (EXISTS (SELECT * 
FROM public.jobs 
WHERE public.jobs.limit_key OPERATOR(pg_catalog.=) public.sqlq_limits.limit_key AND public.jobs.blocked_by OPERATOR(pg_catalog.=) 'limit')) AND NOT (EXISTS (SELECT * 
FROM public.failed_jobs 
WHERE public.failed_jobs.limit_key OPERATOR(pg_catalog.=) public.sqlq_limits.limit_key)) AND ((NOT public.sqlq_limits.limit_key OPERATOR(pg_catalog.=) ANY (SELECT public.jobs.limit_key 
FROM public.jobs 
WHERE public.jobs.flow_id IS NOT NULL AND public.jobs.blocked_by OPERATOR(pg_catalog.=) 'flow' AND public.jobs.limit_key IS NOT NULL))) ORDER BY public.sqlq_limits.used_at 
 LIMIT %(param_2)s::INTEGER FOR UPDATE OF sqlq_limits SKIP LOCKED)
 DELETE FROM public.sqlq_limits WHERE public.sqlq_limits.limit_key OPERATOR(pg_catalog.=) ANY (SELECT held.limit_key 
FROM held) RETURNING public.sqlq_limits.limit_key;

