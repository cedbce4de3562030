WITH held AS MATERIALIZED 
(SELECT main.jobs.id AS id, batch.delay_ms AS delay_ms, batch.at AS at, batch.record AS record, batch.priority AS priority, batch.queue AS queue 
FROM (SELECT CAST(json_extract("each".value, ?) AS BIGINT) AS id, CAST(json_extract("each".value, ?) AS BIGINT) AS token, CAST(json_extract("each".value, ?) AS BIGINT) AS delay_ms, CAST(json_extract("each".value, ?) AS INTEGER) AS at, CAST(json_extract("each".value, ?) AS TEXT) AS record, CAST(json_extract("each".value, ?) AS INTEGER) AS priority, CAST(json_extract("each".value, ?) AS TEXT) AS queue 
FROM json_each(?) AS "each") AS batch JOIN main.jobs ON main.jobs.id = batch.id 
WHERE main.jobs.lease_token = batch.token AND main.jobs.reserved_at IS NOT NULL ORDER BY main.jobs.id)
 UPDATE main.jobs SET queue=coalesce(held.queue, main.jobs.queue), priority=coalesce(held.priority, main.jobs.priority), available_at=coalesce(held.at, (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) + held.delay_ms), main.jobs.available_at), reserved_at=NULL, reserved_by=NULL, lease_expires_at=NULL, unknown_since=NULL, errors=CASE WHEN (length(main.jobs.errors) > ?) THEN main.jobs.errors ELSE CASE WHEN (main.jobs.errors IS NULL) THEN ? ELSE substr(main.jobs.errors, ?, length(main.jobs.errors) - ?) || ? END || held.record || ? END FROM held WHERE main.jobs.id = held.id RETURNING id, lease_token;

