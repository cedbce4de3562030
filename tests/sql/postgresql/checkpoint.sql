WITH held AS MATERIALIZED 
(SELECT public.jobs.id AS id, anon_1.before AS before, anon_1.after AS after 
FROM unnest(CAST(%(batch_id)s::VARCHAR AS BIGINT[]), CAST(%(batch_token)s::VARCHAR AS BIGINT[]), %(batch_before)s::pg_catalog.TEXT[], %(batch_after)s::pg_catalog.TEXT[]) AS anon_1(id, token, before, after) JOIN public.jobs ON public.jobs.id OPERATOR(pg_catalog.=) anon_1.id 
WHERE public.jobs.lease_token OPERATOR(pg_catalog.=) anon_1.token AND public.jobs.reserved_at IS NOT NULL AND ARRAY[public.jobs.cursor] OPERATOR(pg_catalog.=) ARRAY[anon_1.before] ORDER BY public.jobs.id FOR UPDATE OF jobs)
 UPDATE public.jobs SET releases=CASE WHEN (ARRAY[public.jobs.cursor] OPERATOR(pg_catalog.<>) ARRAY[held.after]) THEN %(param_1)s::INTEGER ELSE public.jobs.releases END, losses=CASE WHEN ((ARRAY[public.jobs.cursor] OPERATOR(pg_catalog.<>) ARRAY[held.after]) AND (public.jobs.losses OPERATOR(pg_catalog.>) %(losses_1)s::INTEGER)) THEN %(param_2)s::INTEGER ELSE public.jobs.losses END, cursor=held.after FROM held WHERE public.jobs.id OPERATOR(pg_catalog.=) held.id RETURNING public.jobs.id, public.jobs.lease_token, public.jobs.cancel_requested_at;

