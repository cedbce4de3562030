INSERT INTO public.sqlq_wakes (limit_key, max_running, rate, period_ms, in_order, holds, at) SELECT anon_1.limit_key, anon_1.max_running, anon_1.rate, anon_1.period_ms, anon_1.in_order OPERATOR(pg_catalog.=) %(in_order_1)s::INTEGER AS anon_2, anon_1.holds OPERATOR(pg_catalog.=) %(holds_1)s::INTEGER AS anon_3, coalesce(anon_1.moment, (pg_catalog.statement_timestamp() OPERATOR(pg_catalog.+) (anon_1.delay_ms OPERATOR(pg_catalog.*) interval '1 millisecond'))) AS coalesce_1 
FROM unnest(%(batch_limit_key)s::pg_catalog.TEXT[], CAST(%(batch_max_running)s::VARCHAR AS INTEGER[]), CAST(%(batch_rate)s::VARCHAR AS INTEGER[]), CAST(%(batch_period_ms)s::VARCHAR AS BIGINT[]), CAST(%(batch_in_order)s::VARCHAR AS INTEGER[]), CAST(%(batch_holds)s::VARCHAR AS INTEGER[]), %(batch_moment)s::TIMESTAMP WITH TIME ZONE[], CAST(%(batch_delay_ms)s::VARCHAR AS BIGINT[])) AS anon_1(limit_key, max_running, rate, period_ms, in_order, holds, moment, delay_ms) ORDER BY anon_1.limit_key RETURNING public.sqlq_wakes.id;

INSERT INTO public.jobs (queue, task, max_attempts, payload, limit_key, available_at, blocked_by, due_at) SELECT %(queue)s::VARCHAR AS anon_2, %(task)s::VARCHAR AS anon_3, %(max_attempts)s::INTEGER AS anon_4, anon_5.value, %(limit)s::VARCHAR AS anon_6, CASE WHEN (%(limit)s::VARCHAR IS NOT NULL) THEN TIMESTAMP WITH TIME ZONE '9998-01-01 00:00:00+00:00' ELSE pg_catalog.statement_timestamp() END AS anon_7, CASE WHEN (%(limit)s::VARCHAR IS NOT NULL) THEN %(param_4)s::VARCHAR ELSE NULL END AS anon_8, CASE WHEN (%(limit)s::VARCHAR IS NOT NULL) THEN pg_catalog.statement_timestamp() ELSE NULL END AS anon_9 
FROM pg_catalog.unnest(pg_catalog.string_to_array(%(texts)s::VARCHAR, pg_catalog.chr(%(chr_1)s::INTEGER))) WITH ORDINALITY AS anon_5(value, place) ORDER BY anon_5.place RETURNING public.jobs.id, CASE WHEN (public.jobs.available_at OPERATOR(pg_catalog.>=) TIMESTAMP WITH TIME ZONE '9998-01-01 00:00:00+00:00') THEN %(param_1)s::VARCHAR ELSE CASE WHEN (public.jobs.available_at OPERATOR(pg_catalog.<=) pg_catalog.statement_timestamp()) THEN %(param_2)s::VARCHAR ELSE %(param_3)s::VARCHAR END END AS anon_1;

WITH held AS MATERIALIZED 
(SELECT public.sqlq_wakes.id AS id 
FROM public.sqlq_wakes 
WHERE public.sqlq_wakes.at OPERATOR(pg_catalog.<=) pg_catalog.statement_timestamp() ORDER BY public.sqlq_wakes.at, public.sqlq_wakes.id 
 LIMIT %(most)s::INTEGER FOR UPDATE OF sqlq_wakes SKIP LOCKED)
 DELETE FROM public.sqlq_wakes WHERE public.sqlq_wakes.id OPERATOR(pg_catalog.=) ANY (SELECT held.id 
FROM held) RETURNING public.sqlq_wakes.id, public.sqlq_wakes.limit_key, public.sqlq_wakes.max_running, public.sqlq_wakes.rate, public.sqlq_wakes.period_ms, public.sqlq_wakes.in_order, public.sqlq_wakes.holds;

INSERT INTO public.sqlq_limits (limit_key, max_running, rate, period_ms, in_order, holds) VALUES (%(limit_key)s::VARCHAR, %(max_running)s::INTEGER, %(rate)s::INTEGER, %(period_ms)s::BIGINT, %(in_order)s, %(holds)s) ON CONFLICT (limit_key) DO NOTHING;

SELECT public.sqlq_limits.limit_key, public.sqlq_limits.max_running, public.sqlq_limits.rate, public.sqlq_limits.period_ms, public.sqlq_limits.in_order, public.sqlq_limits.holds, public.sqlq_limits.next_free_at, public.sqlq_limits.pinned_at, public.sqlq_limits.used_at, public.sqlq_limits.closed_until, pg_catalog.statement_timestamp() AS moment 
FROM public.sqlq_limits 
WHERE public.sqlq_limits.limit_key OPERATOR(pg_catalog.=) ANY (ARRAY[%(keys_1)s::VARCHAR]::VARCHAR[]) ORDER BY public.sqlq_limits.limit_key FOR UPDATE OF sqlq_limits;

SELECT public.jobs.limit_key, pg_catalog.count(*) AS count_1 
FROM public.jobs 
WHERE public.jobs.limit_key OPERATOR(pg_catalog.=) ANY (ARRAY[%(keys_1)s::VARCHAR]::VARCHAR[]) AND public.jobs.blocked_by IS NULL GROUP BY public.jobs.limit_key;

SELECT DISTINCT public.sqlq_workers.queues 
FROM public.sqlq_workers 
WHERE public.sqlq_workers.seen_at OPERATOR(pg_catalog.>=) (pg_catalog.statement_timestamp() OPERATOR(pg_catalog.+) (%(param_1)s::BIGINT OPERATOR(pg_catalog.*) interval '1 millisecond'));

SELECT anon_1.id, anon_1.limit_key 
FROM unnest(%(batch_line_key)s::pg_catalog.TEXT[], CAST(%(batch_number)s::VARCHAR AS INTEGER[]), CAST(%(batch_holds)s::VARCHAR AS INTEGER[])) AS anon_2(line_key, number, holds) JOIN LATERAL (SELECT public.jobs.id AS id, public.jobs.limit_key AS limit_key 
FROM public.jobs 
WHERE public.jobs.limit_key OPERATOR(pg_catalog.=) anon_2.line_key AND public.jobs.blocked_by OPERATOR(pg_catalog.=) 'limit' AND (public.jobs.due_at OPERATOR(pg_catalog.<=) pg_catalog.statement_timestamp()) AND ((NOT public.jobs.queue OPERATOR(pg_catalog.=) ANY (SELECT public.sqlq_queues.queue 
FROM public.sqlq_queues 
WHERE public.sqlq_queues.paused_at IS NOT NULL))) AND ((%(serves_all)s::INTEGER OPERATOR(pg_catalog.=) %(param_1)s::INTEGER) OR public.jobs.queue OPERATOR(pg_catalog.=) ANY (ARRAY[]::VARCHAR[])) AND ((NOT public.jobs.id OPERATOR(pg_catalog.=) ANY (ARRAY[]::BIGINT[]))) ORDER BY public.jobs.priority DESC, public.jobs.due_at, public.jobs.id 
 LIMIT anon_2.number FOR UPDATE OF jobs SKIP LOCKED) AS anon_1 ON true;

SAVEPOINT sa_savepoint_1;

UPDATE public.jobs SET available_at=coalesce(anon_1.start, pg_catalog.statement_timestamp()), blocked_by=NULL FROM unnest(CAST(%(batch_id)s::VARCHAR AS BIGINT[]), %(batch_start)s::TIMESTAMP WITH TIME ZONE[]) AS anon_1(id, start) WHERE public.jobs.id OPERATOR(pg_catalog.=) anon_1.id AND public.jobs.blocked_by OPERATOR(pg_catalog.=) 'limit';

RELEASE SAVEPOINT sa_savepoint_1;

UPDATE public.sqlq_limits SET max_running=%(max_running)s::INTEGER, rate=%(rate)s::INTEGER, period_ms=%(period_ms)s::BIGINT, in_order=%(in_order)s, holds=%(holds)s, next_free_at=%(at)s::TIMESTAMP WITH TIME ZONE, used_at=pg_catalog.statement_timestamp() WHERE public.sqlq_limits.limit_key OPERATOR(pg_catalog.=) %(of)s::VARCHAR;

INSERT INTO public.sqlq_wakes (limit_key, max_running, rate, period_ms, in_order, holds, at) SELECT anon_1.limit_key, anon_1.max_running, anon_1.rate, anon_1.period_ms, anon_1.in_order OPERATOR(pg_catalog.=) %(in_order_1)s::INTEGER AS anon_2, anon_1.holds OPERATOR(pg_catalog.=) %(holds_1)s::INTEGER AS anon_3, coalesce(anon_1.moment, (pg_catalog.statement_timestamp() OPERATOR(pg_catalog.+) (anon_1.delay_ms OPERATOR(pg_catalog.*) interval '1 millisecond'))) AS coalesce_1 
FROM unnest(%(batch_limit_key)s::pg_catalog.TEXT[], CAST(%(batch_max_running)s::VARCHAR AS INTEGER[]), CAST(%(batch_rate)s::VARCHAR AS INTEGER[]), CAST(%(batch_period_ms)s::VARCHAR AS BIGINT[]), CAST(%(batch_in_order)s::VARCHAR AS INTEGER[]), CAST(%(batch_holds)s::VARCHAR AS INTEGER[]), %(batch_moment)s::TIMESTAMP WITH TIME ZONE[], CAST(%(batch_delay_ms)s::VARCHAR AS BIGINT[])) AS anon_1(limit_key, max_running, rate, period_ms, in_order, holds, moment, delay_ms) ORDER BY anon_1.limit_key RETURNING public.sqlq_wakes.id;

