SHOW default_transaction_isolation;

WITH held AS MATERIALIZED 
(SELECT public.jobs.id AS id, CASE WHEN ((SELECT public.sqlq_edges.depends_on 
FROM public.sqlq_edges 
WHERE public.sqlq_edges.job_id OPERATOR(pg_catalog.=) public.jobs.id AND (SELECT parents.id 
FROM public.jobs AS parents 
WHERE parents.id OPERATOR(pg_catalog.=) public.sqlq_edges.depends_on) IS NOT NULL ORDER BY public.sqlq_edges.depends_on DESC 
 LIMIT %(param_2)s::INTEGER) IS NULL) THEN (SELECT pg_catalog.max(CASE WHEN ((SELECT public.failed_jobs.id 
FROM public.failed_jobs 
WHERE public.failed_jobs.id OPERATOR(pg_catalog.=) public.sqlq_edges.depends_on) IS NOT NULL) THEN CASE WHEN (public.sqlq_edges.on_outcome OPERATOR(pg_catalog.=) %(on_outcome_1)s::VARCHAR) THEN %(param_3)s::INTEGER ELSE %(param_4)s::INTEGER END WHEN (public.sqlq_edges.on_outcome OPERATOR(pg_catalog.=) %(on_outcome_2)s::VARCHAR) THEN %(param_5)s::INTEGER WHEN ((public.sqlq_edges.on_outcome OPERATOR(pg_catalog.=) %(on_outcome_3)s::VARCHAR) AND ((SELECT public.finished_jobs.outcome 
FROM public.finished_jobs 
WHERE public.finished_jobs.id OPERATOR(pg_catalog.=) public.sqlq_edges.depends_on) OPERATOR(pg_catalog.=) %(param_6)s::VARCHAR)) THEN %(param_7)s::INTEGER ELSE %(param_8)s::INTEGER END) AS max_1 
FROM public.sqlq_edges 
WHERE public.sqlq_edges.job_id OPERATOR(pg_catalog.=) public.jobs.id) END AS verdict 
FROM public.jobs 
WHERE (public.jobs.id OPERATOR(pg_catalog.=) ANY (ARRAY(SELECT public.sqlq_edges.job_id 
FROM public.sqlq_edges 
WHERE (public.sqlq_edges.depends_on OPERATOR(pg_catalog.=) ANY (ARRAY(SELECT anon_1.id 
FROM pg_catalog.unnest(CAST(%(batch_id)s::VARCHAR AS BIGINT[])) AS anon_1(id)))) AND ((public.sqlq_edges.on_outcome OPERATOR(pg_catalog.!=) %(on_outcome_4)s::VARCHAR) OR ((SELECT public.failed_jobs.id 
FROM public.failed_jobs 
WHERE public.failed_jobs.id OPERATOR(pg_catalog.=) public.sqlq_edges.depends_on) IS NULL))))) AND (public.jobs.blocked_by OPERATOR(pg_catalog.=) 'flow') AND (public.jobs.reserved_at IS NULL) AND (CASE WHEN ((SELECT public.sqlq_edges.depends_on 
FROM public.sqlq_edges 
WHERE public.sqlq_edges.job_id OPERATOR(pg_catalog.=) public.jobs.id AND (SELECT parents.id 
FROM public.jobs AS parents 
WHERE parents.id OPERATOR(pg_catalog.=) public.sqlq_edges.depends_on) IS NOT NULL ORDER BY public.sqlq_edges.depends_on DESC 
 LIMIT %(param_2)s::INTEGER) IS NULL) THEN (SELECT pg_catalog.max(CASE WHEN ((SELECT public.failed_jobs.id 
FROM public.failed_jobs 
WHERE public.failed_jobs.id OPERATOR(pg_catalog.=) public.sqlq_edges.depends_on) IS NOT NULL) THEN CASE WHEN (public.sqlq_edges.on_outcome OPERATOR(pg_catalog.=) %(on_outcome_1)s::VARCHAR) THEN %(param_3)s::INTEGER ELSE %(param_4)s::INTEGER END WHEN (public.sqlq_edges.on_outcome OPERATOR(pg_catalog.=) %(on_outcome_2)s::VARCHAR) THEN %(param_5)s::INTEGER WHEN ((public.sqlq_edges.on_outcome OPERATOR(pg_catalog.=) %(on_outcome_3)s::VARCHAR) AND ((SELECT public.finished_jobs.outcome 
FROM public.finished_jobs 
WHERE public.finished_jobs.id OPERATOR(pg_catalog.=) public.sqlq_edges.depends_on) OPERATOR(pg_catalog.=) %(param_6)s::VARCHAR)) THEN %(param_7)s::INTEGER ELSE %(param_8)s::INTEGER END) AS max_1 
FROM public.sqlq_edges 
WHERE public.sqlq_edges.job_id OPERATOR(pg_catalog.=) public.jobs.id) END OPERATOR(pg_catalog.!=) %(param_9)s::INTEGER) ORDER BY public.jobs.id 
 LIMIT %(param_10)s::INTEGER FOR UPDATE OF jobs SKIP LOCKED)
 UPDATE public.jobs SET available_at=CASE WHEN ((held.verdict OPERATOR(pg_catalog.=) %(verdict_1)s::INTEGER) AND (public.jobs.task OPERATOR(pg_catalog.!=) %(task_1)s::VARCHAR)) THEN CASE WHEN (public.jobs.limit_key IS NOT NULL) THEN TIMESTAMP WITH TIME ZONE '9998-01-01 00:00:00+00:00' ELSE CASE WHEN (public.jobs.due_at OPERATOR(pg_catalog.>) pg_catalog.statement_timestamp()) THEN public.jobs.due_at ELSE pg_catalog.statement_timestamp() END END ELSE public.jobs.available_at END, blocked_by=CASE WHEN ((held.verdict OPERATOR(pg_catalog.=) %(verdict_1)s::INTEGER) AND (public.jobs.task OPERATOR(pg_catalog.!=) %(task_1)s::VARCHAR)) THEN CASE WHEN (public.jobs.limit_key IS NOT NULL) THEN %(param_1)s::VARCHAR ELSE NULL END ELSE public.jobs.blocked_by END, due_at=CASE WHEN ((held.verdict OPERATOR(pg_catalog.=) %(verdict_1)s::INTEGER) AND (public.jobs.task OPERATOR(pg_catalog.!=) %(task_1)s::VARCHAR)) THEN CASE WHEN (public.jobs.limit_key IS NOT NULL) THEN CASE WHEN (public.jobs.due_at OPERATOR(pg_catalog.>) pg_catalog.statement_timestamp()) THEN public.jobs.due_at ELSE pg_catalog.statement_timestamp() END ELSE NULL END ELSE public.jobs.due_at END FROM held WHERE public.jobs.id OPERATOR(pg_catalog.=) held.id RETURNING public.jobs.id, public.jobs.limit_key, public.jobs.blocked_by;

SELECT public.jobs.id, public.jobs.task, public.jobs.label, public.jobs.timeout_ms 
FROM public.jobs 
WHERE public.jobs.id OPERATOR(pg_catalog.=) ANY (ARRAY[%(ids_1)s::BIGINT]::BIGINT[]) AND public.jobs.blocked_by OPERATOR(pg_catalog.=) 'flow' AND public.jobs.reserved_at IS NULL ORDER BY public.jobs.id FOR UPDATE OF jobs SKIP LOCKED;

SELECT waits.job_id, CASE WHEN ((SELECT public.sqlq_edges.depends_on 
FROM public.sqlq_edges 
WHERE public.sqlq_edges.job_id OPERATOR(pg_catalog.=) waits.job_id AND (SELECT parents.id 
FROM public.jobs AS parents 
WHERE parents.id OPERATOR(pg_catalog.=) public.sqlq_edges.depends_on) IS NOT NULL ORDER BY public.sqlq_edges.depends_on DESC 
 LIMIT %(param_1)s::INTEGER) IS NULL) THEN (SELECT pg_catalog.max(CASE WHEN ((SELECT public.failed_jobs.id 
FROM public.failed_jobs 
WHERE public.failed_jobs.id OPERATOR(pg_catalog.=) public.sqlq_edges.depends_on) IS NOT NULL) THEN CASE WHEN (public.sqlq_edges.on_outcome OPERATOR(pg_catalog.=) %(on_outcome_1)s::VARCHAR) THEN %(param_2)s::INTEGER ELSE %(param_3)s::INTEGER END WHEN (public.sqlq_edges.on_outcome OPERATOR(pg_catalog.=) %(on_outcome_2)s::VARCHAR) THEN %(param_4)s::INTEGER WHEN ((public.sqlq_edges.on_outcome OPERATOR(pg_catalog.=) %(on_outcome_3)s::VARCHAR) AND ((SELECT public.finished_jobs.outcome 
FROM public.finished_jobs 
WHERE public.finished_jobs.id OPERATOR(pg_catalog.=) public.sqlq_edges.depends_on) OPERATOR(pg_catalog.=) %(param_5)s::VARCHAR)) THEN %(param_6)s::INTEGER ELSE %(param_7)s::INTEGER END) AS max_1 
FROM public.sqlq_edges 
WHERE public.sqlq_edges.job_id OPERATOR(pg_catalog.=) waits.job_id) END AS verdict, waits.depends_on, waits.on_outcome, ended.outcome, ended.reason 
FROM public.sqlq_edges AS waits LEFT OUTER JOIN public.finished_jobs AS ended ON ended.id OPERATOR(pg_catalog.=) waits.depends_on 
WHERE waits.job_id OPERATOR(pg_catalog.=) ANY (ARRAY[%(ids_1)s::BIGINT]::BIGINT[]) ORDER BY waits.job_id;

INSERT INTO public.finished_jobs (id, queue, task, payload, priority, attempts, max_attempts, available_at, reserved_at, reserved_by, lease_token, unique_key, unique_until, on_success, on_failure, timeout_ms, releases, errors, headers, label, batch_key, backoff, retention_ms, progress, progress_of, progress_note, schedule, scheduled_for, cursor, start_by, flow_id, limit_key, replay_of, created_at, outcome, reason) SELECT public.jobs.id, public.jobs.queue, public.jobs.task, public.jobs.payload, public.jobs.priority, public.jobs.attempts, public.jobs.max_attempts, public.jobs.available_at, public.jobs.reserved_at, public.jobs.reserved_by, public.jobs.lease_token, public.jobs.unique_key, public.jobs.unique_until, public.jobs.on_success, public.jobs.on_failure, public.jobs.timeout_ms, public.jobs.releases, public.jobs.errors, public.jobs.headers, public.jobs.label, public.jobs.batch_key, public.jobs.backoff, public.jobs.retention_ms, public.jobs.progress, public.jobs.progress_of, public.jobs.progress_note, public.jobs.schedule, public.jobs.scheduled_for, public.jobs.cursor, public.jobs.start_by, public.jobs.flow_id, public.jobs.limit_key, public.jobs.replay_of, public.jobs.created_at, %(param_1)s::VARCHAR AS anon_1, %(param_2)s::VARCHAR AS anon_2 
FROM public.jobs 
WHERE public.jobs.id OPERATOR(pg_catalog.=) ANY (ARRAY[%(id_1_1)s::BIGINT]::BIGINT[]) ORDER BY public.jobs.id;

DELETE FROM public.jobs WHERE public.jobs.id OPERATOR(pg_catalog.=) ANY (ARRAY[%(id_1_1)s::BIGINT]::BIGINT[]);

WITH held AS MATERIALIZED 
(SELECT public.jobs.id AS id, CASE WHEN ((SELECT public.sqlq_edges.depends_on 
FROM public.sqlq_edges 
WHERE public.sqlq_edges.job_id OPERATOR(pg_catalog.=) public.jobs.id AND (SELECT parents.id 
FROM public.jobs AS parents 
WHERE parents.id OPERATOR(pg_catalog.=) public.sqlq_edges.depends_on) IS NOT NULL ORDER BY public.sqlq_edges.depends_on DESC 
 LIMIT %(param_2)s::INTEGER) IS NULL) THEN (SELECT pg_catalog.max(CASE WHEN ((SELECT public.failed_jobs.id 
FROM public.failed_jobs 
WHERE public.failed_jobs.id OPERATOR(pg_catalog.=) public.sqlq_edges.depends_on) IS NOT NULL) THEN CASE WHEN (public.sqlq_edges.on_outcome OPERATOR(pg_catalog.=) %(on_outcome_1)s::VARCHAR) THEN %(param_3)s::INTEGER ELSE %(param_4)s::INTEGER END WHEN (public.sqlq_edges.on_outcome OPERATOR(pg_catalog.=) %(on_outcome_2)s::VARCHAR) THEN %(param_5)s::INTEGER WHEN ((public.sqlq_edges.on_outcome OPERATOR(pg_catalog.=) %(on_outcome_3)s::VARCHAR) AND ((SELECT public.finished_jobs.outcome 
FROM public.finished_jobs 
WHERE public.finished_jobs.id OPERATOR(pg_catalog.=) public.sqlq_edges.depends_on) OPERATOR(pg_catalog.=) %(param_6)s::VARCHAR)) THEN %(param_7)s::INTEGER ELSE %(param_8)s::INTEGER END) AS max_1 
FROM public.sqlq_edges 
WHERE public.sqlq_edges.job_id OPERATOR(pg_catalog.=) public.jobs.id) END AS verdict 
FROM public.jobs 
WHERE (public.jobs.id OPERATOR(pg_catalog.=) ANY (ARRAY(SELECT public.sqlq_edges.job_id 
FROM public.sqlq_edges 
WHERE (public.sqlq_edges.depends_on OPERATOR(pg_catalog.=) ANY (ARRAY(SELECT anon_1.id 
FROM pg_catalog.unnest(CAST(%(batch_id)s::VARCHAR AS BIGINT[])) AS anon_1(id)))) AND ((public.sqlq_edges.on_outcome OPERATOR(pg_catalog.!=) %(on_outcome_4)s::VARCHAR) OR ((SELECT public.failed_jobs.id 
FROM public.failed_jobs 
WHERE public.failed_jobs.id OPERATOR(pg_catalog.=) public.sqlq_edges.depends_on) IS NULL))))) AND (public.jobs.blocked_by OPERATOR(pg_catalog.=) 'flow') AND (public.jobs.reserved_at IS NULL) AND (CASE WHEN ((SELECT public.sqlq_edges.depends_on 
FROM public.sqlq_edges 
WHERE public.sqlq_edges.job_id OPERATOR(pg_catalog.=) public.jobs.id AND (SELECT parents.id 
FROM public.jobs AS parents 
WHERE parents.id OPERATOR(pg_catalog.=) public.sqlq_edges.depends_on) IS NOT NULL ORDER BY public.sqlq_edges.depends_on DESC 
 LIMIT %(param_2)s::INTEGER) IS NULL) THEN (SELECT pg_catalog.max(CASE WHEN ((SELECT public.failed_jobs.id 
FROM public.failed_jobs 
WHERE public.failed_jobs.id OPERATOR(pg_catalog.=) public.sqlq_edges.depends_on) IS NOT NULL) THEN CASE WHEN (public.sqlq_edges.on_outcome OPERATOR(pg_catalog.=) %(on_outcome_1)s::VARCHAR) THEN %(param_3)s::INTEGER ELSE %(param_4)s::INTEGER END WHEN (public.sqlq_edges.on_outcome OPERATOR(pg_catalog.=) %(on_outcome_2)s::VARCHAR) THEN %(param_5)s::INTEGER WHEN ((public.sqlq_edges.on_outcome OPERATOR(pg_catalog.=) %(on_outcome_3)s::VARCHAR) AND ((SELECT public.finished_jobs.outcome 
FROM public.finished_jobs 
WHERE public.finished_jobs.id OPERATOR(pg_catalog.=) public.sqlq_edges.depends_on) OPERATOR(pg_catalog.=) %(param_6)s::VARCHAR)) THEN %(param_7)s::INTEGER ELSE %(param_8)s::INTEGER END) AS max_1 
FROM public.sqlq_edges 
WHERE public.sqlq_edges.job_id OPERATOR(pg_catalog.=) public.jobs.id) END OPERATOR(pg_catalog.!=) %(param_9)s::INTEGER) ORDER BY public.jobs.id 
 LIMIT %(param_10)s::INTEGER FOR UPDATE OF jobs SKIP LOCKED)
 UPDATE public.jobs SET available_at=CASE WHEN ((held.verdict OPERATOR(pg_catalog.=) %(verdict_1)s::INTEGER) AND (public.jobs.task OPERATOR(pg_catalog.!=) %(task_1)s::VARCHAR)) THEN CASE WHEN (public.jobs.limit_key IS NOT NULL) THEN TIMESTAMP WITH TIME ZONE '9998-01-01 00:00:00+00:00' ELSE CASE WHEN (public.jobs.due_at OPERATOR(pg_catalog.>) pg_catalog.statement_timestamp()) THEN public.jobs.due_at ELSE pg_catalog.statement_timestamp() END END ELSE public.jobs.available_at END, blocked_by=CASE WHEN ((held.verdict OPERATOR(pg_catalog.=) %(verdict_1)s::INTEGER) AND (public.jobs.task OPERATOR(pg_catalog.!=) %(task_1)s::VARCHAR)) THEN CASE WHEN (public.jobs.limit_key IS NOT NULL) THEN %(param_1)s::VARCHAR ELSE NULL END ELSE public.jobs.blocked_by END, due_at=CASE WHEN ((held.verdict OPERATOR(pg_catalog.=) %(verdict_1)s::INTEGER) AND (public.jobs.task OPERATOR(pg_catalog.!=) %(task_1)s::VARCHAR)) THEN CASE WHEN (public.jobs.limit_key IS NOT NULL) THEN CASE WHEN (public.jobs.due_at OPERATOR(pg_catalog.>) pg_catalog.statement_timestamp()) THEN public.jobs.due_at ELSE pg_catalog.statement_timestamp() END ELSE NULL END ELSE public.jobs.due_at END FROM held WHERE public.jobs.id OPERATOR(pg_catalog.=) held.id RETURNING public.jobs.id, public.jobs.limit_key, public.jobs.blocked_by;

