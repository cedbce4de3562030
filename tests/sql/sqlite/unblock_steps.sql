BEGIN IMMEDIATE;

WITH held AS MATERIALIZED 
(SELECT main.jobs.id AS id, CASE WHEN ((SELECT main.sqlq_edges.depends_on 
FROM main.sqlq_edges 
WHERE main.sqlq_edges.job_id = main.jobs.id AND (SELECT parents.id 
FROM main.jobs AS parents 
WHERE parents.id = main.sqlq_edges.depends_on) IS NOT NULL ORDER BY main.sqlq_edges.depends_on DESC
 LIMIT ? OFFSET ?) IS NULL) THEN (SELECT max(CASE WHEN ((SELECT main.failed_jobs.id 
FROM main.failed_jobs 
WHERE main.failed_jobs.id = main.sqlq_edges.depends_on) IS NOT NULL) THEN CASE WHEN (main.sqlq_edges.on_outcome = ?) THEN ? ELSE ? END WHEN (main.sqlq_edges.on_outcome = ?) THEN ? WHEN (main.sqlq_edges.on_outcome = ? AND (SELECT main.finished_jobs.outcome 
FROM main.finished_jobs 
WHERE main.finished_jobs.id = main.sqlq_edges.depends_on) = ?) THEN ? ELSE ? END) AS max_1 
FROM main.sqlq_edges 
WHERE main.sqlq_edges.job_id = main.jobs.id) END AS verdict 
FROM main.jobs 
WHERE main.jobs.id IN (SELECT batch.id 
FROM (SELECT CAST(json_extract("each".value, ?) AS BIGINT) AS id 
FROM json_each(?) AS "each") AS batch) AND main.jobs.blocked_by = 'flow' AND main.jobs.reserved_at IS NULL AND CASE WHEN ((SELECT main.sqlq_edges.depends_on 
FROM main.sqlq_edges 
WHERE main.sqlq_edges.job_id = main.jobs.id AND (SELECT parents.id 
FROM main.jobs AS parents 
WHERE parents.id = main.sqlq_edges.depends_on) IS NOT NULL ORDER BY main.sqlq_edges.depends_on DESC
 LIMIT ? OFFSET ?) IS NULL) THEN (SELECT max(CASE WHEN ((SELECT main.failed_jobs.id 
FROM main.failed_jobs 
WHERE main.failed_jobs.id = main.sqlq_edges.depends_on) IS NOT NULL) THEN CASE WHEN (main.sqlq_edges.on_outcome = ?) THEN ? ELSE ? END WHEN (main.sqlq_edges.on_outcome = ?) THEN ? WHEN (main.sqlq_edges.on_outcome = ? AND (SELECT main.finished_jobs.outcome 
FROM main.finished_jobs 
WHERE main.finished_jobs.id = main.sqlq_edges.depends_on) = ?) THEN ? ELSE ? END) AS max_1 
FROM main.sqlq_edges 
WHERE main.sqlq_edges.job_id = main.jobs.id) END != ? ORDER BY main.jobs.id
 LIMIT ? OFFSET ?)
 UPDATE main.jobs SET available_at=CASE WHEN (held.verdict = ? AND main.jobs.task != ?) THEN CASE WHEN (main.jobs.limit_key IS NOT NULL) THEN 253339228800000 ELSE CASE WHEN (main.jobs.due_at > (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER))) THEN main.jobs.due_at ELSE (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)) END END ELSE main.jobs.available_at END, blocked_by=CASE WHEN (held.verdict = ? AND main.jobs.task != ?) THEN CASE WHEN (main.jobs.limit_key IS NOT NULL) THEN ? ELSE NULL END ELSE main.jobs.blocked_by END, due_at=CASE WHEN (held.verdict = ? AND main.jobs.task != ?) THEN CASE WHEN (main.jobs.limit_key IS NOT NULL) THEN CASE WHEN (main.jobs.due_at > (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER))) THEN main.jobs.due_at ELSE (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)) END ELSE NULL END ELSE main.jobs.due_at END FROM held WHERE main.jobs.id = held.id RETURNING id, limit_key, blocked_by;

