INSERT INTO public.jobs (queue, task, payload, max_attempts, start_by) VALUES (%(queue)s::VARCHAR, %(task)s::VARCHAR, %(payload)s::VARCHAR, %(max_attempts)s::INTEGER, ((statement_timestamp() AT TIME ZONE 'UTC') + %(expires_ms)s::BIGINT * interval '1 millisecond') AT TIME ZONE 'UTC') RETURNING public.jobs.id;

