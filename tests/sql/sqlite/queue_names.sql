WITH RECURSIVE names(name) AS 
(SELECT min(main.jobs.queue) AS name 
FROM main.jobs 
WHERE main.jobs.reserved_at IS NULL UNION ALL SELECT (SELECT min(main.jobs.queue) AS min_1 
FROM main.jobs 
WHERE main.jobs.reserved_at IS NULL AND main.jobs.queue > names.name) AS anon_1 
FROM names 
WHERE names.name IS NOT NULL)
 SELECT names.name 
FROM names;

