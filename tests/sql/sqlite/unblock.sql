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
WHERE main.jobs.id IN (SELECT main.sqlq_edges.job_id 
FROM main.sqlq_edges 
WHERE main.sqlq_edges.depends_on IN (SELECT batch.id 
FROM (SELECT CAST(json_extract("each".value, ?) AS BIGINT) AS id 
FROM json_each(?) AS "each") AS batch) AND (main.sqlq_edges.on_outcome != ? OR (SELECT main.failed_jobs.id 
FROM main.failed_jobs 
WHERE main.failed_jobs.id = main.sqlq_edges.depends_on) IS NULL)) AND main.jobs.blocked_by = 'flow' AND main.jobs.reserved_at IS NULL AND CASE WHEN ((SELECT main.sqlq_edges.depends_on 
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

BEGIN IMMEDIATE;

SELECT main.jobs.id, main.jobs.task, main.jobs.label, main.jobs.timeout_ms 
FROM main.jobs 
WHERE main.jobs.id IN (?) AND main.jobs.blocked_by = 'flow' AND main.jobs.reserved_at IS NULL ORDER BY main.jobs.id;

SELECT waits.job_id, CASE WHEN ((SELECT main.sqlq_edges.depends_on 
FROM main.sqlq_edges 
WHERE main.sqlq_edges.job_id = waits.job_id AND (SELECT parents.id 
FROM main.jobs AS parents 
WHERE parents.id = main.sqlq_edges.depends_on) IS NOT NULL ORDER BY main.sqlq_edges.depends_on DESC
 LIMIT ? OFFSET ?) IS NULL) THEN (SELECT max(CASE WHEN ((SELECT main.failed_jobs.id 
FROM main.failed_jobs 
WHERE main.failed_jobs.id = main.sqlq_edges.depends_on) IS NOT NULL) THEN CASE WHEN (main.sqlq_edges.on_outcome = ?) THEN ? ELSE ? END WHEN (main.sqlq_edges.on_outcome = ?) THEN ? WHEN (main.sqlq_edges.on_outcome = ? AND (SELECT main.finished_jobs.outcome 
FROM main.finished_jobs 
WHERE main.finished_jobs.id = main.sqlq_edges.depends_on) = ?) THEN ? ELSE ? END) AS max_1 
FROM main.sqlq_edges 
WHERE main.sqlq_edges.job_id = waits.job_id) END AS verdict, waits.depends_on, waits.on_outcome, ended.outcome, ended.reason 
FROM main.sqlq_edges AS waits LEFT OUTER JOIN main.finished_jobs AS ended ON ended.id = waits.depends_on 
WHERE waits.job_id IN (?) ORDER BY waits.job_id;

INSERT INTO main.finished_jobs (id, queue, task, payload, priority, attempts, max_attempts, available_at, reserved_at, reserved_by, lease_token, unique_key, unique_until, on_success, on_failure, timeout_ms, releases, errors, headers, label, batch_key, backoff, retention_ms, progress, progress_of, progress_note, schedule, scheduled_for, cursor, start_by, flow_id, limit_key, replay_of, created_at, outcome, reason) SELECT main.jobs.id, main.jobs.queue, main.jobs.task, main.jobs.payload, main.jobs.priority, main.jobs.attempts, main.jobs.max_attempts, main.jobs.available_at, main.jobs.reserved_at, main.jobs.reserved_by, main.jobs.lease_token, main.jobs.unique_key, main.jobs.unique_until, main.jobs.on_success, main.jobs.on_failure, main.jobs.timeout_ms, main.jobs.releases, main.jobs.errors, main.jobs.headers, main.jobs.label, main.jobs.batch_key, main.jobs.backoff, main.jobs.retention_ms, main.jobs.progress, main.jobs.progress_of, main.jobs.progress_note, main.jobs.schedule, main.jobs.scheduled_for, main.jobs.cursor, main.jobs.start_by, main.jobs.flow_id, main.jobs.limit_key, main.jobs.replay_of, main.jobs.created_at, ? AS anon_1, ? AS anon_2 
FROM main.jobs 
WHERE main.jobs.id IN (?) ORDER BY main.jobs.id;

DELETE FROM main.jobs WHERE main.jobs.id IN (?);

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
WHERE main.jobs.id IN (SELECT main.sqlq_edges.job_id 
FROM main.sqlq_edges 
WHERE main.sqlq_edges.depends_on IN (SELECT batch.id 
FROM (SELECT CAST(json_extract("each".value, ?) AS BIGINT) AS id 
FROM json_each(?) AS "each") AS batch) AND (main.sqlq_edges.on_outcome != ? OR (SELECT main.failed_jobs.id 
FROM main.failed_jobs 
WHERE main.failed_jobs.id = main.sqlq_edges.depends_on) IS NULL)) AND main.jobs.blocked_by = 'flow' AND main.jobs.reserved_at IS NULL AND CASE WHEN ((SELECT main.sqlq_edges.depends_on 
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

