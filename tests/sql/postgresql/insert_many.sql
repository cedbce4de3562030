INSERT INTO public.jobs (queue, task, max_attempts, payload) SELECT %(queue)s::VARCHAR AS anon_2, %(task)s::VARCHAR AS anon_3, %(max_attempts)s::INTEGER AS anon_4, anon_5.value 
FROM unnest(string_to_array(%(texts)s::VARCHAR, chr(%(chr_1)s::INTEGER))) WITH ORDINALITY AS anon_5(value, place) ORDER BY anon_5.place RETURNING public.jobs.id, CASE WHEN (public.jobs.available_at <= statement_timestamp()) THEN %(param_1)s::VARCHAR ELSE %(param_2)s::VARCHAR END AS anon_1;

