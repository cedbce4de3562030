BEGIN;

SELECT DISTINCT shop.sqlq_edges.job_id 
FROM shop.sqlq_edges 
WHERE shop.sqlq_edges.depends_on IN (%(ids_1)s, %(ids_2)s) AND (shop.sqlq_edges.on_outcome != %(on_outcome_1)s OR (SELECT shop.failed_jobs.id 
FROM shop.failed_jobs 
WHERE shop.failed_jobs.id = shop.sqlq_edges.depends_on) IS NULL) AND (SELECT shop.jobs.id 
FROM shop.jobs 
WHERE shop.jobs.id = shop.sqlq_edges.job_id AND shop.jobs.blocked_by = 'flow') IS NOT NULL;

