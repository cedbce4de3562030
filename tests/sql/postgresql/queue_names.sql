WITH RECURSIVE names(name) AS 
(SELECT min(public.jobs.queue) AS name 
FROM public.jobs 
WHERE public.jobs.reserved_at IS NULL UNION ALL SELECT (SELECT min(public.jobs.queue) AS min_1 
FROM public.jobs 
WHERE public.jobs.reserved_at IS NULL AND public.jobs.queue > names.name) AS anon_1 
FROM names 
WHERE names.name IS NOT NULL)
 SELECT names.name 
FROM names;

