SELECT flow_id, id, blocked_by OPERATOR(pg_catalog.=) 'flow' FROM public.jobs
 WHERE flow_id IS NOT NULL AND (flow_id, id) OPERATOR(pg_catalog.>) (CAST(%(flow)s AS bigint), CAST(%(id)s AS bigint))
 ORDER BY flow_id, id
 LIMIT %(most)s;

