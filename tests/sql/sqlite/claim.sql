SELECT main.sqlq_queues.queue 
FROM main.sqlq_queues 
WHERE main.sqlq_queues.paused_at IS NOT NULL;

SELECT main.jobs.priority 
FROM main.jobs 
WHERE main.jobs.queue = ? AND main.jobs.reserved_at IS NULL ORDER BY main.jobs.priority DESC
 LIMIT ? OFFSET ?;

SELECT main.jobs.id 
FROM main.jobs 
WHERE main.jobs.queue = ? AND main.jobs.reserved_at IS NULL AND main.jobs.priority = ? AND main.jobs.available_at <= (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)) ORDER BY main.jobs.available_at, main.jobs.id
 LIMIT ? OFFSET ?;

SELECT main.jobs.priority 
FROM main.jobs 
WHERE main.jobs.queue = ? AND main.jobs.reserved_at IS NULL AND main.jobs.priority < ? ORDER BY main.jobs.priority DESC
 LIMIT ? OFFSET ?;

UPDATE main.jobs SET attempts=(main.jobs.attempts + ?), reserved_at=(CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)), reserved_by=?, lease_expires_at=(CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) + ?), lease_token=(main.jobs.lease_token + ?) FROM (SELECT CAST(json_extract("each".value, ?) AS BIGINT) AS id 
FROM json_each(?) AS "each") AS batch WHERE main.jobs.id = batch.id RETURNING id, lease_token, queue, task, payload, attempts, max_attempts, releases, timeout_ms, (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) - unknown_since) AS unknown_ms, cancel_requested_at, losses, priority, available_at AS due_ms;

