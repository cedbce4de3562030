WITH held AS MATERIALIZED 
(SELECT public.jobs.id AS id, anon_1.outcome AS outcome, anon_1.result AS result, anon_1.reason AS reason 
FROM unnest(CAST(%(batch_id)s::VARCHAR AS BIGINT[]), CAST(%(batch_token)s::VARCHAR AS BIGINT[]), %(batch_outcome)s::TEXT[], %(batch_result)s::TEXT[], %(batch_reason)s::TEXT[]) AS anon_1(id, token, outcome, result, reason) JOIN public.jobs ON public.jobs.id = anon_1.id 
WHERE public.jobs.lease_token = anon_1.token AND public.jobs.reserved_at IS NOT NULL ORDER BY public.jobs.id FOR UPDATE OF jobs SKIP LOCKED), 
gone AS 
(DELETE FROM public.jobs USING held WHERE public.jobs.id = held.id RETURNING public.jobs.id, public.jobs.queue, public.jobs.task, public.jobs.payload, public.jobs.priority, public.jobs.attempts, public.jobs.max_attempts, public.jobs.available_at, public.jobs.reserved_at, public.jobs.reserved_by, public.jobs.lease_token, public.jobs.unique_key, public.jobs.unique_until, public.jobs.timeout_ms, public.jobs.releases, public.jobs.errors, public.jobs.headers, public.jobs.created_at, held.outcome, held.result, held.reason)
 INSERT INTO public.finished_jobs (id, queue, task, payload, priority, attempts, max_attempts, available_at, reserved_at, reserved_by, lease_token, unique_key, unique_until, timeout_ms, releases, errors, headers, created_at, outcome, result, reason) SELECT gone.id, gone.queue, gone.task, gone.payload, gone.priority, gone.attempts, gone.max_attempts, gone.available_at, gone.reserved_at, gone.reserved_by, gone.lease_token, gone.unique_key, gone.unique_until, gone.timeout_ms, gone.releases, gone.errors, gone.headers, gone.created_at, gone.outcome, gone.result, gone.reason 
FROM gone RETURNING public.finished_jobs.id, public.finished_jobs.lease_token;

