BEGIN;

SELECT DISTINCT main.sqlq_edges.job_id 
FROM main.sqlq_edges 
WHERE main.sqlq_edges.depends_on IN (?, ?) AND (main.sqlq_edges.on_outcome != ? OR (SELECT main.failed_jobs.id 
FROM main.failed_jobs 
WHERE main.failed_jobs.id = main.sqlq_edges.depends_on) IS NULL) AND (SELECT main.jobs.id 
FROM main.jobs 
WHERE main.jobs.id = main.sqlq_edges.job_id AND main.jobs.blocked_by = 'flow') IS NOT NULL;

