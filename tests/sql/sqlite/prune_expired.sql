SELECT main.finished_jobs.id, main.finished_jobs.flow_id 
FROM main.finished_jobs 
WHERE main.finished_jobs.expires_at < (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) + ?) AND (main.finished_jobs.id NOT IN (SELECT 1 FROM (SELECT 1) WHERE 1!=1)) AND (main.finished_jobs.flow_id IS NULL OR NOT ((EXISTS (SELECT main.sqlq_edges.job_id 
FROM main.sqlq_edges 
WHERE main.sqlq_edges.depends_on = main.finished_jobs.id AND (EXISTS (SELECT * 
FROM main.jobs 
WHERE main.jobs.id = main.sqlq_edges.job_id)))) OR (EXISTS (SELECT main.sqlq_edges.job_id 
FROM main.sqlq_edges 
WHERE main.sqlq_edges.depends_on = main.finished_jobs.id AND (EXISTS (SELECT * 
FROM main.failed_jobs AS failed_step 
WHERE failed_step.id = main.sqlq_edges.job_id)))))) ORDER BY main.finished_jobs.expires_at
 LIMIT ? OFFSET ?;

SELECT main.failed_jobs.id, main.failed_jobs.flow_id 
FROM main.failed_jobs 
WHERE main.failed_jobs.expires_at < (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) + ?) AND (main.failed_jobs.id NOT IN (SELECT 1 FROM (SELECT 1) WHERE 1!=1)) AND (main.failed_jobs.flow_id IS NULL OR NOT ((EXISTS (SELECT main.sqlq_edges.job_id 
FROM main.sqlq_edges 
WHERE main.sqlq_edges.depends_on = main.failed_jobs.id AND (EXISTS (SELECT * 
FROM main.jobs 
WHERE main.jobs.id = main.sqlq_edges.job_id)))) OR (EXISTS (SELECT main.sqlq_edges.job_id 
FROM main.sqlq_edges 
WHERE main.sqlq_edges.depends_on = main.failed_jobs.id AND (EXISTS (SELECT * 
FROM main.failed_jobs AS failed_step 
WHERE failed_step.id = main.sqlq_edges.job_id)))))) ORDER BY main.failed_jobs.expires_at
 LIMIT ? OFFSET ?;

