WITH held AS MATERIALIZED 
(SELECT main.jobs.id AS id, batch.outcome AS outcome, batch.result AS result, batch.reason AS reason, batch.start_ms AS start_ms 
FROM (SELECT CAST(json_extract("each".value, ?) AS BIGINT) AS id, CAST(json_extract("each".value, ?) AS BIGINT) AS token, CAST(json_extract("each".value, ?) AS TEXT) AS outcome, CAST(json_extract("each".value, ?) AS TEXT) AS result, CAST(json_extract("each".value, ?) AS TEXT) AS reason, CAST(json_extract("each".value, ?) AS BIGINT) AS start_ms 
FROM json_each(?) AS "each") AS batch JOIN main.jobs ON main.jobs.id = batch.id 
WHERE main.jobs.lease_token = batch.token AND main.jobs.reserved_at IS NOT NULL ORDER BY main.jobs.id)
 INSERT INTO main.finished_jobs (id, queue, task, payload, priority, attempts, max_attempts, available_at, reserved_at, reserved_by, lease_token, unique_key, unique_until, on_success, on_failure, timeout_ms, releases, errors, headers, label, batch_key, backoff, retention_ms, progress, progress_of, progress_note, schedule, scheduled_for, cursor, start_by, flow_id, limit_key, replay_of, created_at, outcome, result, reason, start_ms) SELECT main.jobs.id, main.jobs.queue, main.jobs.task, main.jobs.payload, main.jobs.priority, main.jobs.attempts, main.jobs.max_attempts, main.jobs.available_at, main.jobs.reserved_at, main.jobs.reserved_by, main.jobs.lease_token, main.jobs.unique_key, main.jobs.unique_until, main.jobs.on_success, main.jobs.on_failure, main.jobs.timeout_ms, main.jobs.releases, main.jobs.errors, main.jobs.headers, main.jobs.label, main.jobs.batch_key, main.jobs.backoff, main.jobs.retention_ms, main.jobs.progress, main.jobs.progress_of, main.jobs.progress_note, main.jobs.schedule, main.jobs.scheduled_for, main.jobs.cursor, main.jobs.start_by, main.jobs.flow_id, main.jobs.limit_key, main.jobs.replay_of, main.jobs.created_at, held.outcome, held.result, held.reason, held.start_ms 
FROM held JOIN main.jobs ON main.jobs.id = held.id RETURNING id, lease_token;

WITH held AS MATERIALIZED 
(SELECT main.jobs.id AS id, batch.outcome AS outcome, batch.result AS result, batch.reason AS reason, batch.start_ms AS start_ms 
FROM (SELECT CAST(json_extract("each".value, ?) AS BIGINT) AS id, CAST(json_extract("each".value, ?) AS BIGINT) AS token, CAST(json_extract("each".value, ?) AS TEXT) AS outcome, CAST(json_extract("each".value, ?) AS TEXT) AS result, CAST(json_extract("each".value, ?) AS TEXT) AS reason, CAST(json_extract("each".value, ?) AS BIGINT) AS start_ms 
FROM json_each(?) AS "each") AS batch JOIN main.jobs ON main.jobs.id = batch.id 
WHERE main.jobs.lease_token = batch.token AND main.jobs.reserved_at IS NOT NULL ORDER BY main.jobs.id)
 DELETE FROM main.jobs WHERE main.jobs.id IN (SELECT held.id 
FROM held);

SELECT main.finished_jobs.id 
FROM main.finished_jobs 
WHERE main.finished_jobs.task = ? AND main.finished_jobs.flow_id IS NULL AND main.finished_jobs.id > ? AND main.finished_jobs.outcome = ? ORDER BY main.finished_jobs.id
 LIMIT ? OFFSET ?;

SELECT main.failed_jobs.id 
FROM main.failed_jobs 
WHERE main.failed_jobs.task = ? AND main.failed_jobs.flow_id IS NULL AND main.failed_jobs.id > ? ORDER BY main.failed_jobs.id
 LIMIT ? OFFSET ?;

INSERT INTO main.jobs (queue, task, payload, priority, max_attempts, on_success, on_failure, timeout_ms, headers, label, batch_key, backoff, retention_ms, schedule, scheduled_for, limit_key, replay_of, available_at, blocked_by, due_at) SELECT ended.queue, ended.task, ended.payload, ended.priority, ended.max_attempts, ended.on_success, ended.on_failure, ended.timeout_ms, ended.headers, ended.label, ended.batch_key, ended.backoff, ended.retention_ms, ended.schedule, ended.scheduled_for, ended.limit_key, ended.id, CASE WHEN (ended.limit_key IS NOT NULL) THEN 253339228800000 ELSE (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)) END AS anon_1, CASE WHEN (ended.limit_key IS NOT NULL) THEN ? ELSE NULL END AS anon_2, CASE WHEN (ended.limit_key IS NOT NULL) THEN (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)) ELSE NULL END AS anon_3 
FROM (SELECT main.finished_jobs.id AS id, main.finished_jobs.queue AS queue, main.finished_jobs.task AS task, main.finished_jobs.payload AS payload, main.finished_jobs.priority AS priority, main.finished_jobs.max_attempts AS max_attempts, main.finished_jobs.on_success AS on_success, main.finished_jobs.on_failure AS on_failure, main.finished_jobs.timeout_ms AS timeout_ms, main.finished_jobs.headers AS headers, main.finished_jobs.label AS label, main.finished_jobs.batch_key AS batch_key, main.finished_jobs.backoff AS backoff, main.finished_jobs.retention_ms AS retention_ms, main.finished_jobs.schedule AS schedule, main.finished_jobs.scheduled_for AS scheduled_for, main.finished_jobs.limit_key AS limit_key 
FROM main.finished_jobs 
WHERE main.finished_jobs.id IN (?, ?) UNION ALL SELECT main.failed_jobs.id AS id, main.failed_jobs.queue AS queue, main.failed_jobs.task AS task, main.failed_jobs.payload AS payload, main.failed_jobs.priority AS priority, main.failed_jobs.max_attempts AS max_attempts, main.failed_jobs.on_success AS on_success, main.failed_jobs.on_failure AS on_failure, main.failed_jobs.timeout_ms AS timeout_ms, main.failed_jobs.headers AS headers, main.failed_jobs.label AS label, main.failed_jobs.batch_key AS batch_key, main.failed_jobs.backoff AS backoff, main.failed_jobs.retention_ms AS retention_ms, main.failed_jobs.schedule AS schedule, main.failed_jobs.scheduled_for AS scheduled_for, main.failed_jobs.limit_key AS limit_key 
FROM main.failed_jobs 
WHERE main.failed_jobs.id IN (?, ?)) AS ended ORDER BY ended.id RETURNING id, replay_of, task, queue, label, max_attempts, limit_key;

