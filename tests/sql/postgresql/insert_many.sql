INSERT INTO public.jobs (queue, task, max_attempts, payload) SELECT %(queue)s::VARCHAR AS anon_1, %(task)s::VARCHAR AS anon_2, %(max_attempts)s::INTEGER AS anon_3, anon_4.value 
FROM pg_catalog.unnest(pg_catalog.string_to_array(%(texts)s::VARCHAR, pg_catalog.chr(%(chr_1)s::INTEGER))) WITH ORDINALITY AS anon_4(value, place) ORDER BY anon_4.place RETURNING public.jobs.id;

