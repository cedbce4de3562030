WITH held AS MATERIALIZED 
(SELECT main.jobs.id AS id, batch.reason AS reason, batch.exception AS exception, batch.message AS message, batch.traceback AS traceback, batch.fingerprint AS fingerprint, batch.start_ms AS start_ms 
FROM (SELECT CAST(json_extract("each".value, ?) AS BIGINT) AS id, CAST(json_extract("each".value, ?) AS BIGINT) AS token, CAST(json_extract("each".value, ?) AS TEXT) AS reason, CAST(json_extract("each".value, ?) AS TEXT) AS exception, CAST(json_extract("each".value, ?) AS TEXT) AS message, CAST(json_extract("each".value, ?) AS TEXT) AS traceback, CAST(json_extract("each".value, ?) AS TEXT) AS fingerprint, CAST(json_extract("each".value, ?) AS BIGINT) AS start_ms 
FROM json_each(?) AS "each") AS batch JOIN main.jobs ON main.jobs.id = batch.id 
WHERE main.jobs.lease_token = batch.token AND main.jobs.reserved_at IS NOT NULL ORDER BY main.jobs.id)
 INSERT INTO main.failed_jobs (id, queue, task, payload, priority, attempts, max_attempts, available_at, reserved_at, reserved_by, lease_token, unique_key, unique_until, on_success, on_failure, timeout_ms, releases, errors, headers, label, batch_key, backoff, retention_ms, progress, progress_of, progress_note, schedule, scheduled_for, cursor, start_by, flow_id, limit_key, replay_of, created_at, reason, exception, message, traceback, fingerprint, start_ms) SELECT main.jobs.id, main.jobs.queue, main.jobs.task, main.jobs.payload, main.jobs.priority, main.jobs.attempts, main.jobs.max_attempts, main.jobs.available_at, main.jobs.reserved_at, main.jobs.reserved_by, main.jobs.lease_token, main.jobs.unique_key, main.jobs.unique_until, main.jobs.on_success, main.jobs.on_failure, main.jobs.timeout_ms, main.jobs.releases, main.jobs.errors, main.jobs.headers, main.jobs.label, main.jobs.batch_key, main.jobs.backoff, main.jobs.retention_ms, main.jobs.progress, main.jobs.progress_of, main.jobs.progress_note, main.jobs.schedule, main.jobs.scheduled_for, main.jobs.cursor, main.jobs.start_by, main.jobs.flow_id, main.jobs.limit_key, main.jobs.replay_of, main.jobs.created_at, held.reason, held.exception, held.message, held.traceback, held.fingerprint, held.start_ms 
FROM held JOIN main.jobs ON main.jobs.id = held.id RETURNING id, lease_token;

WITH held AS MATERIALIZED 
(SELECT main.jobs.id AS id, batch.reason AS reason, batch.exception AS exception, batch.message AS message, batch.traceback AS traceback, batch.fingerprint AS fingerprint, batch.start_ms AS start_ms 
FROM (SELECT CAST(json_extract("each".value, ?) AS BIGINT) AS id, CAST(json_extract("each".value, ?) AS BIGINT) AS token, CAST(json_extract("each".value, ?) AS TEXT) AS reason, CAST(json_extract("each".value, ?) AS TEXT) AS exception, CAST(json_extract("each".value, ?) AS TEXT) AS message, CAST(json_extract("each".value, ?) AS TEXT) AS traceback, CAST(json_extract("each".value, ?) AS TEXT) AS fingerprint, CAST(json_extract("each".value, ?) AS BIGINT) AS start_ms 
FROM json_each(?) AS "each") AS batch JOIN main.jobs ON main.jobs.id = batch.id 
WHERE main.jobs.lease_token = batch.token AND main.jobs.reserved_at IS NOT NULL ORDER BY main.jobs.id)
 DELETE FROM main.jobs WHERE main.jobs.id IN (SELECT held.id 
FROM held);

