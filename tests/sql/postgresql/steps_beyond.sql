SELECT public.jobs.flow_id, public.jobs.id, public.jobs.blocked_by 
FROM public.jobs 
WHERE public.jobs.flow_id IS NOT NULL AND (public.jobs.flow_id, public.jobs.id) OPERATOR(pg_catalog.>) (%(flow)s::BIGINT, %(step)s::BIGINT) ORDER BY public.jobs.flow_id, public.jobs.id 
 LIMIT %(most)s::INTEGER;

