BEGIN IMMEDIATE;

SELECT step.job_id, CASE WHEN ((SELECT main.sqlq_edges.depends_on 
FROM main.sqlq_edges 
WHERE main.sqlq_edges.job_id = step.job_id AND (SELECT main.jobs.id 
FROM main.jobs 
WHERE main.jobs.id = main.sqlq_edges.depends_on) IS NOT NULL ORDER BY main.sqlq_edges.depends_on DESC
 LIMIT ? OFFSET ?) IS NULL) THEN (SELECT max(CASE WHEN ((SELECT main.failed_jobs.id 
FROM main.failed_jobs 
WHERE main.failed_jobs.id = main.sqlq_edges.depends_on) IS NOT NULL) THEN CASE WHEN (main.sqlq_edges.on_outcome = ?) THEN ? ELSE ? END WHEN (main.sqlq_edges.on_outcome = ?) THEN ? WHEN (main.sqlq_edges.on_outcome = ? AND (SELECT main.finished_jobs.outcome 
FROM main.finished_jobs 
WHERE main.finished_jobs.id = main.sqlq_edges.depends_on) = ?) THEN ? ELSE ? END) AS max_1 
FROM main.sqlq_edges 
WHERE main.sqlq_edges.job_id = step.job_id) END AS anon_1 
FROM (SELECT DISTINCT main.sqlq_edges.job_id AS job_id 
FROM main.sqlq_edges 
WHERE main.sqlq_edges.job_id IN (?)) AS step;

WITH held AS MATERIALIZED 
(SELECT main.jobs.id AS id 
FROM main.jobs 
WHERE main.jobs.id IN (?) AND main.jobs.blocked_by = 'flow' AND main.jobs.reserved_at IS NULL ORDER BY main.jobs.id)
 UPDATE main.jobs SET available_at=CASE WHEN (main.jobs.limit_key IS NOT NULL) THEN 253339228800000 ELSE CASE WHEN (main.jobs.due_at > (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER))) THEN main.jobs.due_at ELSE (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)) END END, blocked_by=CASE WHEN (main.jobs.limit_key IS NOT NULL) THEN ? ELSE NULL END, due_at=CASE WHEN (main.jobs.limit_key IS NOT NULL) THEN CASE WHEN (main.jobs.due_at > (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER))) THEN main.jobs.due_at ELSE (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)) END ELSE NULL END FROM held WHERE main.jobs.id = held.id RETURNING id, limit_key;

