INSERT INTO public.jobs (queue, task, payload, max_attempts, start_by) VALUES (%(queue)s::VARCHAR, %(task)s::VARCHAR, %(payload)s::VARCHAR, %(max_attempts)s::INTEGER, (((pg_catalog.statement_timestamp() AT TIME ZONE 'UTC') OPERATOR(pg_catalog.+) (%(start_within_ms)s::BIGINT OPERATOR(pg_catalog.*) interval '1 millisecond')) AT TIME ZONE 'UTC')) RETURNING public.jobs.id;

