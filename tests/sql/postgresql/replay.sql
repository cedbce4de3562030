WITH held AS MATERIALIZED 
(SELECT public.jobs.id AS id, anon_1.outcome AS outcome, anon_1.result AS result, anon_1.reason AS reason 
FROM unnest(CAST(%(batch_id)s::VARCHAR AS BIGINT[]), CAST(%(batch_token)s::VARCHAR AS BIGINT[]), %(batch_outcome)s::pg_catalog.TEXT[], %(batch_result)s::pg_catalog.TEXT[], %(batch_reason)s::pg_catalog.TEXT[]) AS anon_1(id, token, outcome, result, reason) JOIN public.jobs ON public.jobs.id OPERATOR(pg_catalog.=) anon_1.id 
WHERE public.jobs.lease_token OPERATOR(pg_catalog.=) anon_1.token AND public.jobs.reserved_at IS NOT NULL ORDER BY public.jobs.id FOR UPDATE OF jobs SKIP LOCKED), 
gone AS 
(DELETE FROM public.jobs USING held WHERE public.jobs.id OPERATOR(pg_catalog.=) held.id RETURNING public.jobs.id, public.jobs.queue, public.jobs.task, public.jobs.payload, public.jobs.priority, public.jobs.attempts, public.jobs.max_attempts, public.jobs.available_at, public.jobs.reserved_at, public.jobs.reserved_by, public.jobs.lease_token, public.jobs.unique_key, public.jobs.unique_until, public.jobs.on_success, public.jobs.on_failure, public.jobs.timeout_ms, public.jobs.releases, public.jobs.errors, public.jobs.headers, public.jobs.label, public.jobs.backoff, public.jobs.retention_ms, public.jobs.progress, public.jobs.progress_of, public.jobs.progress_note, public.jobs.schedule, public.jobs.scheduled_for, public.jobs.cursor, public.jobs.start_by, public.jobs.flow_id, public.jobs.limit_key, public.jobs.replay_of, public.jobs.created_at, held.outcome, held.result, held.reason)
 INSERT INTO public.finished_jobs (id, queue, task, payload, priority, attempts, max_attempts, available_at, reserved_at, reserved_by, lease_token, unique_key, unique_until, on_success, on_failure, timeout_ms, releases, errors, headers, label, backoff, retention_ms, progress, progress_of, progress_note, schedule, scheduled_for, cursor, start_by, flow_id, limit_key, replay_of, created_at, outcome, result, reason) SELECT gone.id, gone.queue, gone.task, gone.payload, gone.priority, gone.attempts, gone.max_attempts, gone.available_at, gone.reserved_at, gone.reserved_by, gone.lease_token, gone.unique_key, gone.unique_until, gone.on_success, gone.on_failure, gone.timeout_ms, gone.releases, gone.errors, gone.headers, gone.label, gone.backoff, gone.retention_ms, gone.progress, gone.progress_of, gone.progress_note, gone.schedule, gone.scheduled_for, gone.cursor, gone.start_by, gone.flow_id, gone.limit_key, gone.replay_of, gone.created_at, gone.outcome, gone.result, gone.reason 
FROM gone RETURNING public.finished_jobs.id, public.finished_jobs.lease_token;

SELECT pg_catalog.max(public.jobs.id) AS max_1 
FROM public.jobs;

SELECT pg_catalog.max(public.finished_jobs.id) AS max_1 
FROM public.finished_jobs;

SELECT pg_catalog.max(public.failed_jobs.id) AS max_1 
FROM public.failed_jobs;

SELECT pg_catalog.statement_timestamp() AS anon_1;

SELECT public.finished_jobs.id, public.finished_jobs.limit_key 
FROM public.finished_jobs 
WHERE (public.finished_jobs.id OPERATOR(pg_catalog.<=) %(id_1)s::BIGINT) AND CASE WHEN (public.finished_jobs.outcome OPERATOR(pg_catalog.=) %(outcome_1)s::VARCHAR) THEN %(param_1)s::VARCHAR ELSE %(param_2)s::VARCHAR END OPERATOR(pg_catalog.=) ANY (ARRAY[%(param_3_1)s::VARCHAR, %(param_3_2)s::VARCHAR]::VARCHAR[]) AND (public.finished_jobs.task OPERATOR(pg_catalog.=) %(task_1)s::VARCHAR) AND public.finished_jobs.flow_id IS NULL AND (public.finished_jobs.replayed_as IS NULL) AND (public.finished_jobs.replay_of IS NULL) AND public.finished_jobs.id OPERATOR(pg_catalog.>) %(id_2)s::BIGINT ORDER BY public.finished_jobs.id 
 LIMIT %(param_4)s::INTEGER FOR UPDATE SKIP LOCKED;

SELECT public.failed_jobs.id, public.failed_jobs.limit_key 
FROM public.failed_jobs 
WHERE (public.failed_jobs.id OPERATOR(pg_catalog.<=) %(id_1)s::BIGINT) AND (public.failed_jobs.task OPERATOR(pg_catalog.=) %(task_1)s::VARCHAR) AND public.failed_jobs.flow_id IS NULL AND (public.failed_jobs.replayed_as IS NULL) AND (public.failed_jobs.replay_of IS NULL) AND public.failed_jobs.id OPERATOR(pg_catalog.>) %(id_2)s::BIGINT ORDER BY public.failed_jobs.id 
 LIMIT %(param_1)s::INTEGER FOR UPDATE SKIP LOCKED;

INSERT INTO public.jobs (queue, task, payload, priority, max_attempts, timeout_ms, on_success, on_failure, headers, label, backoff, retention_ms, schedule, scheduled_for, limit_key, replay_of, available_at, blocked_by, due_at) SELECT ended.queue, ended.task, ended.payload, ended.priority, ended.max_attempts, ended.timeout_ms, ended.on_success, ended.on_failure, CASE WHEN ((ended.headers OPERATOR(pg_catalog.~~) %(headers_1)s::VARCHAR) AND (pg_catalog.length(ended.headers) OPERATOR(pg_catalog.<=) %(length_1)s::INTEGER)) THEN (pg_catalog.substr(ended.headers, %(substr_1)s::INTEGER, pg_catalog.length(ended.headers) OPERATOR(pg_catalog.-) %(length_2)s::INTEGER) OPERATOR(pg_catalog.||) %(param_1)s::VARCHAR OPERATOR(pg_catalog.||) CAST(ended.id AS pg_catalog.TEXT) OPERATOR(pg_catalog.||) %(param_2)s::VARCHAR OPERATOR(pg_catalog.||) %(param_3)s::VARCHAR) ELSE ended.headers END AS anon_1, ended.label, ended.backoff, ended.retention_ms, ended.schedule, ended.scheduled_for, ended.limit_key, ended.id, CASE WHEN (ended.limit_key IS NOT NULL) THEN TIMESTAMP WITH TIME ZONE '9998-01-01 00:00:00+00:00' ELSE (pg_catalog.statement_timestamp() OPERATOR(pg_catalog.+) (CAST(((((pg_catalog.row_number() OVER (ORDER BY ended.id) OPERATOR(pg_catalog.-) %(param_4)s::INTEGER) OPERATOR(pg_catalog.+) %(param_5)s::BIGINT) OPERATOR(pg_catalog.*) %(param_6)s::BIGINT) OPERATOR(pg_catalog./) %(param_7)s::BIGINT) OPERATOR(pg_catalog.-) %(param_8)s::BIGINT AS BIGINT) OPERATOR(pg_catalog.*) interval '1 millisecond')) END AS anon_2, CASE WHEN (ended.limit_key IS NOT NULL) THEN %(param_9)s::VARCHAR ELSE NULL END AS anon_3, CASE WHEN (ended.limit_key IS NOT NULL) THEN (pg_catalog.statement_timestamp() OPERATOR(pg_catalog.+) (CAST(((((pg_catalog.row_number() OVER (ORDER BY ended.id) OPERATOR(pg_catalog.-) %(param_4)s::INTEGER) OPERATOR(pg_catalog.+) %(param_5)s::BIGINT) OPERATOR(pg_catalog.*) %(param_6)s::BIGINT) OPERATOR(pg_catalog./) %(param_7)s::BIGINT) OPERATOR(pg_catalog.-) %(param_8)s::BIGINT AS BIGINT) OPERATOR(pg_catalog.*) interval '1 millisecond')) ELSE NULL END AS anon_4 
FROM (SELECT public.finished_jobs.id AS id, public.finished_jobs.queue AS queue, public.finished_jobs.task AS task, public.finished_jobs.payload AS payload, public.finished_jobs.priority AS priority, public.finished_jobs.max_attempts AS max_attempts, public.finished_jobs.timeout_ms AS timeout_ms, public.finished_jobs.on_success AS on_success, public.finished_jobs.on_failure AS on_failure, public.finished_jobs.headers AS headers, public.finished_jobs.label AS label, public.finished_jobs.backoff AS backoff, public.finished_jobs.retention_ms AS retention_ms, public.finished_jobs.schedule AS schedule, public.finished_jobs.scheduled_for AS scheduled_for, public.finished_jobs.limit_key AS limit_key 
FROM public.finished_jobs 
WHERE public.finished_jobs.id OPERATOR(pg_catalog.=) ANY (ARRAY[%(id_1_1)s::BIGINT, %(id_1_2)s::BIGINT]::BIGINT[]) UNION ALL SELECT public.failed_jobs.id AS id, public.failed_jobs.queue AS queue, public.failed_jobs.task AS task, public.failed_jobs.payload AS payload, public.failed_jobs.priority AS priority, public.failed_jobs.max_attempts AS max_attempts, public.failed_jobs.timeout_ms AS timeout_ms, public.failed_jobs.on_success AS on_success, public.failed_jobs.on_failure AS on_failure, public.failed_jobs.headers AS headers, public.failed_jobs.label AS label, public.failed_jobs.backoff AS backoff, public.failed_jobs.retention_ms AS retention_ms, public.failed_jobs.schedule AS schedule, public.failed_jobs.scheduled_for AS scheduled_for, public.failed_jobs.limit_key AS limit_key 
FROM public.failed_jobs 
WHERE public.failed_jobs.id OPERATOR(pg_catalog.=) ANY (ARRAY[%(id_2_1)s::BIGINT, %(id_2_2)s::BIGINT]::BIGINT[])) AS ended ORDER BY ended.id RETURNING public.jobs.id, public.jobs.replay_of, public.jobs.task, public.jobs.queue, public.jobs.label, public.jobs.max_attempts;

UPDATE public.finished_jobs SET replayed_as=anon_1.replay FROM unnest(CAST(%(batch_id)s::VARCHAR AS BIGINT[]), CAST(%(batch_replay)s::VARCHAR AS BIGINT[])) AS anon_1(id, replay) WHERE public.finished_jobs.id OPERATOR(pg_catalog.=) anon_1.id;

UPDATE public.failed_jobs SET replayed_as=anon_1.replay FROM unnest(CAST(%(batch_id)s::VARCHAR AS BIGINT[]), CAST(%(batch_replay)s::VARCHAR AS BIGINT[])) AS anon_1(id, replay) WHERE public.failed_jobs.id OPERATOR(pg_catalog.=) anon_1.id;

SELECT pg_catalog.pg_notify(%(channel)s, '');

