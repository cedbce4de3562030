INSERT INTO public.jobs (queue, task, payload, max_attempts, priority) SELECT anon_1.queue, anon_1.task, anon_1.payload, anon_1.max_attempts, anon_1.priority 
FROM unnest(CAST(%(batch_n)s::VARCHAR AS INTEGER[]), %(batch_queue)s::pg_catalog.TEXT[], %(batch_task)s::pg_catalog.TEXT[], %(batch_payload)s::pg_catalog.TEXT[], CAST(%(batch_max_attempts)s::VARCHAR AS INTEGER[]), CAST(%(batch_priority)s::VARCHAR AS INTEGER[])) AS anon_1(n, queue, task, payload, max_attempts, priority) ORDER BY anon_1.n RETURNING public.jobs.id;

