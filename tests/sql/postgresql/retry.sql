WITH held AS MATERIALIZED 
(SELECT public.jobs.id AS id, anon_1.delay_ms AS delay_ms, anon_1.record AS record 
FROM unnest(CAST(%(batch_id)s::VARCHAR AS BIGINT[]), CAST(%(batch_token)s::VARCHAR AS BIGINT[]), CAST(%(batch_delay_ms)s::VARCHAR AS BIGINT[]), %(batch_record)s::TEXT[]) AS anon_1(id, token, delay_ms, record) JOIN public.jobs ON public.jobs.id = anon_1.id 
WHERE public.jobs.lease_token = anon_1.token AND public.jobs.reserved_at IS NOT NULL ORDER BY public.jobs.id FOR UPDATE OF jobs SKIP LOCKED)
 UPDATE public.jobs SET available_at=coalesce((statement_timestamp() + held.delay_ms * interval '1 millisecond'), public.jobs.available_at), reserved_at=NULL, reserved_by=NULL, lease_expires_at=NULL, unknown_since=NULL, errors=CASE WHEN (public.jobs.errors IS NULL) THEN %(param_1)s::VARCHAR || held.record || %(param_2)s::VARCHAR WHEN (length(public.jobs.errors) > %(length_1)s::INTEGER) THEN public.jobs.errors ELSE substr(public.jobs.errors, %(substr_1)s::INTEGER, length(public.jobs.errors) - %(length_2)s::INTEGER) || %(substr_2)s::VARCHAR || held.record || %(param_3)s::VARCHAR END FROM held WHERE public.jobs.id = held.id RETURNING public.jobs.id, public.jobs.lease_token;

