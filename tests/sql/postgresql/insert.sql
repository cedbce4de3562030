INSERT INTO public.jobs (queue, task, payload, max_attempts) VALUES (%(queue)s::VARCHAR, %(task)s::VARCHAR, %(payload)s::VARCHAR, %(max_attempts)s::INTEGER) RETURNING public.jobs.id;

