WITH held AS MATERIALIZED 
(SELECT main.jobs.id AS id, batch.delay_ms AS delay_ms, batch.record AS record 
FROM (SELECT CAST(json_extract("each".value, ?) AS BIGINT) AS id, CAST(json_extract("each".value, ?) AS BIGINT) AS token, CAST(json_extract("each".value, ?) AS BIGINT) AS delay_ms, CAST(json_extract("each".value, ?) AS TEXT) AS record 
FROM json_each(?) AS "each") AS batch JOIN main.jobs ON main.jobs.id = batch.id 
WHERE main.jobs.lease_token = batch.token AND main.jobs.reserved_at IS NOT NULL ORDER BY main.jobs.id)
 UPDATE main.jobs SET available_at=253339228800000, reserved_at=NULL, reserved_by=NULL, lease_expires_at=NULL, unknown_since=NULL, errors=CASE WHEN (main.jobs.errors IS NULL) THEN ? || held.record || ? WHEN (length(main.jobs.errors) > ?) THEN main.jobs.errors ELSE substr(main.jobs.errors, ?, length(main.jobs.errors) - ?) || ? || held.record || ? END, blocked_by=?, due_at=coalesce((CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) + held.delay_ms), main.jobs.due_at, main.jobs.available_at) FROM held WHERE main.jobs.id = held.id RETURNING id, lease_token;

INSERT INTO main.sqlq_wakes (limit_key, max_running, rate, period_ms, in_order, holds, at) SELECT batch.limit_key, batch.max_running, batch.rate, batch.period_ms, CASE WHEN (batch.in_order = ?) THEN ? ELSE ? END AS anon_1, CASE WHEN (batch.holds = ?) THEN ? ELSE ? END AS anon_2, CASE WHEN (batch.moment IS NOT NULL) THEN batch.moment ELSE CASE WHEN (batch.delay_ms = ?) THEN (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)) ELSE (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) + batch.delay_ms) END END AS anon_3 
FROM (SELECT CAST(json_extract("each".value, ?) AS TEXT) AS limit_key, CAST(json_extract("each".value, ?) AS INTEGER) AS max_running, CAST(json_extract("each".value, ?) AS INTEGER) AS rate, CAST(json_extract("each".value, ?) AS BIGINT) AS period_ms, CAST(json_extract("each".value, ?) AS INTEGER) AS in_order, CAST(json_extract("each".value, ?) AS INTEGER) AS holds, CAST(json_extract("each".value, ?) AS INTEGER) AS moment, CAST(json_extract("each".value, ?) AS BIGINT) AS delay_ms 
FROM json_each(?) AS "each") AS batch RETURNING id;

