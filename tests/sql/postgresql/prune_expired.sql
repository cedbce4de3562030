SELECT public.finished_jobs.id, public.finished_jobs.flow_id 
FROM public.finished_jobs 
WHERE public.finished_jobs.expires_at OPERATOR(pg_catalog.<) (pg_catalog.statement_timestamp() OPERATOR(pg_catalog.+) (%(param_1)s::BIGINT OPERATOR(pg_catalog.*) interval '1 millisecond')) AND ((NOT public.finished_jobs.id OPERATOR(pg_catalog.=) ANY (ARRAY[]::BIGINT[]))) AND ((public.finished_jobs.flow_id IS NULL) OR NOT ((EXISTS (SELECT public.sqlq_edges.job_id 
FROM public.sqlq_edges 
WHERE public.sqlq_edges.depends_on OPERATOR(pg_catalog.=) public.finished_jobs.id AND (EXISTS (SELECT * 
FROM public.jobs 
WHERE public.jobs.id OPERATOR(pg_catalog.=) public.sqlq_edges.job_id)))) OR (EXISTS (SELECT public.sqlq_edges.job_id 
FROM public.sqlq_edges 
WHERE public.sqlq_edges.depends_on OPERATOR(pg_catalog.=) public.finished_jobs.id AND (EXISTS (SELECT * 
FROM public.failed_jobs AS failed_step 
WHERE failed_step.id OPERATOR(pg_catalog.=) public.sqlq_edges.job_id)))))) ORDER BY public.finished_jobs.expires_at 
 LIMIT %(param_2)s::INTEGER FOR UPDATE OF finished_jobs SKIP LOCKED;

SELECT public.failed_jobs.id, public.failed_jobs.flow_id 
FROM public.failed_jobs 
WHERE public.failed_jobs.expires_at OPERATOR(pg_catalog.<) (pg_catalog.statement_timestamp() OPERATOR(pg_catalog.+) (%(param_1)s::BIGINT OPERATOR(pg_catalog.*) interval '1 millisecond')) AND ((NOT public.failed_jobs.id OPERATOR(pg_catalog.=) ANY (ARRAY[]::BIGINT[]))) AND ((public.failed_jobs.flow_id IS NULL) OR NOT ((EXISTS (SELECT public.sqlq_edges.job_id 
FROM public.sqlq_edges 
WHERE public.sqlq_edges.depends_on OPERATOR(pg_catalog.=) public.failed_jobs.id AND (EXISTS (SELECT * 
FROM public.jobs 
WHERE public.jobs.id OPERATOR(pg_catalog.=) public.sqlq_edges.job_id)))) OR (EXISTS (SELECT public.sqlq_edges.job_id 
FROM public.sqlq_edges 
WHERE public.sqlq_edges.depends_on OPERATOR(pg_catalog.=) public.failed_jobs.id AND (EXISTS (SELECT * 
FROM public.failed_jobs AS failed_step 
WHERE failed_step.id OPERATOR(pg_catalog.=) public.sqlq_edges.job_id)))))) ORDER BY public.failed_jobs.expires_at 
 LIMIT %(param_2)s::INTEGER FOR UPDATE OF failed_jobs SKIP LOCKED;

