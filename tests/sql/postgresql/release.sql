WITH held AS MATERIALIZED 
(SELECT public.jobs.id AS id, anon_1.delay_ms AS delay_ms, anon_1.unknown AS unknown 
FROM unnest(CAST(%(batch_id)s::VARCHAR AS BIGINT[]), CAST(%(batch_token)s::VARCHAR AS BIGINT[]), CAST(%(batch_delay_ms)s::VARCHAR AS BIGINT[]), CAST(%(batch_unknown)s::VARCHAR AS INTEGER[])) AS anon_1(id, token, delay_ms, unknown) JOIN public.jobs ON public.jobs.id = anon_1.id 
WHERE public.jobs.lease_token = anon_1.token AND public.jobs.reserved_at IS NOT NULL ORDER BY public.jobs.id FOR UPDATE OF jobs SKIP LOCKED)
 UPDATE public.jobs SET attempts=(public.jobs.attempts - %(attempts_1)s::INTEGER), available_at=(statement_timestamp() + held.delay_ms * interval '1 millisecond'), reserved_at=NULL, reserved_by=NULL, lease_expires_at=NULL, releases=CASE WHEN (public.jobs.releases < %(releases_1)s::INTEGER) THEN public.jobs.releases + %(releases_2)s::INTEGER ELSE public.jobs.releases END, unknown_since=CASE WHEN (held.unknown = %(unknown_1)s::INTEGER) THEN coalesce(public.jobs.unknown_since, statement_timestamp()) ELSE NULL END FROM held WHERE public.jobs.id = held.id RETURNING public.jobs.id, public.jobs.lease_token;

