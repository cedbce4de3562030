WITH held AS MATERIALIZED 
(SELECT main.jobs.id AS id 
FROM main.jobs 
WHERE main.jobs.reserved_at IS NOT NULL AND coalesce(main.jobs.lease_expires_at, main.jobs.reserved_at) <= (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)) ORDER BY main.jobs.id
 LIMIT ? OFFSET ?)
 UPDATE main.jobs SET lease_token=CASE WHEN (main.jobs.lease_token < ?) THEN main.jobs.lease_token + ? ELSE ? END FROM held WHERE main.jobs.id = held.id RETURNING id, lease_token, task, queue, attempts, coalesce(max_attempts, 5) AS max_attempts, losses, reserved_at, reserved_by, label, headers, on_failure, flow_id, limit_key;

