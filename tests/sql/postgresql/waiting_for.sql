SELECT DISTINCT public.sqlq_edges.job_id 
FROM public.sqlq_edges 
WHERE public.sqlq_edges.depends_on OPERATOR(pg_catalog.=) ANY (ARRAY[%(ids_1)s::BIGINT, %(ids_2)s::BIGINT]::BIGINT[]) AND ((public.sqlq_edges.on_outcome OPERATOR(pg_catalog.!=) %(on_outcome_1)s::VARCHAR) OR ((SELECT public.failed_jobs.id 
FROM public.failed_jobs 
WHERE public.failed_jobs.id OPERATOR(pg_catalog.=) public.sqlq_edges.depends_on) IS NULL)) AND (SELECT public.jobs.id 
FROM public.jobs 
WHERE public.jobs.id OPERATOR(pg_catalog.=) public.sqlq_edges.job_id AND public.jobs.blocked_by OPERATOR(pg_catalog.=) 'flow') IS NOT NULL;

