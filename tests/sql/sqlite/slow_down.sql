WITH held AS MATERIALIZED 
(SELECT main.jobs.id AS id, batch.delay_ms AS delay_ms, batch.at AS at, batch.record AS record, batch.unknown AS unknown, batch.in_time AS in_time 
FROM (SELECT CAST(json_extract("each".value, ?) AS BIGINT) AS id, CAST(json_extract("each".value, ?) AS BIGINT) AS token, CAST(json_extract("each".value, ?) AS BIGINT) AS delay_ms, CAST(json_extract("each".value, ?) AS INTEGER) AS at, CAST(json_extract("each".value, ?) AS TEXT) AS record, CAST(json_extract("each".value, ?) AS INTEGER) AS unknown, CAST(json_extract("each".value, ?) AS INTEGER) AS in_time 
FROM json_each(?) AS "each") AS batch JOIN main.jobs ON main.jobs.id = batch.id 
WHERE main.jobs.lease_token = batch.token AND main.jobs.reserved_at IS NOT NULL ORDER BY main.jobs.id)
 UPDATE main.jobs SET attempts=(main.jobs.attempts - ?), available_at=253339228800000, reserved_at=NULL, reserved_by=NULL, lease_expires_at=NULL, releases=CASE WHEN (main.jobs.releases < ?) THEN main.jobs.releases + ? ELSE main.jobs.releases END, unknown_since=CASE WHEN (held.unknown = ?) THEN coalesce(main.jobs.unknown_since, (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER))) ELSE NULL END, errors=CASE WHEN (length(main.jobs.errors) > ?) THEN main.jobs.errors ELSE CASE WHEN (main.jobs.errors IS NULL) THEN ? ELSE substr(main.jobs.errors, ?, length(main.jobs.errors) - ?) || ? END || held.record || ? END, start_by=CASE WHEN (held.in_time = ?) THEN main.jobs.start_by END, blocked_by=?, due_at=coalesce(held.at, (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) + held.delay_ms), main.jobs.due_at, main.jobs.available_at) FROM held WHERE main.jobs.id = held.id RETURNING id, lease_token;

INSERT INTO main.sqlq_wakes (limit_key, max_running, rate, period_ms, in_order, holds, at) SELECT batch.limit_key, batch.max_running, batch.rate, batch.period_ms, batch.in_order = ? AS anon_1, batch.holds = ? AS anon_2, coalesce(batch.moment, (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) + batch.delay_ms)) AS coalesce_1 
FROM (SELECT CAST(json_extract("each".value, ?) AS TEXT) AS limit_key, CAST(json_extract("each".value, ?) AS INTEGER) AS max_running, CAST(json_extract("each".value, ?) AS INTEGER) AS rate, CAST(json_extract("each".value, ?) AS BIGINT) AS period_ms, CAST(json_extract("each".value, ?) AS INTEGER) AS in_order, CAST(json_extract("each".value, ?) AS INTEGER) AS holds, CAST(json_extract("each".value, ?) AS INTEGER) AS moment, CAST(json_extract("each".value, ?) AS BIGINT) AS delay_ms 
FROM json_each(?) AS "each") AS batch ORDER BY batch.limit_key RETURNING id;

SELECT main.sqlq_limits.limit_key, main.sqlq_limits.max_running, main.sqlq_limits.rate, main.sqlq_limits.period_ms, main.sqlq_limits.in_order, main.sqlq_limits.holds, main.sqlq_limits.next_free_at, main.sqlq_limits.pinned_at, main.sqlq_limits.used_at, main.sqlq_limits.closed_until, (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)) AS moment 
FROM main.sqlq_limits 
WHERE main.sqlq_limits.limit_key IN (?) ORDER BY main.sqlq_limits.limit_key;

UPDATE main.sqlq_limits SET closed_until=CASE WHEN (main.sqlq_limits.closed_until > coalesce(?, (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) + ?))) THEN main.sqlq_limits.closed_until ELSE coalesce(?, (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) + ?)) END WHERE main.sqlq_limits.limit_key = ?;

WITH held AS MATERIALIZED 
(SELECT main.jobs.id AS id 
FROM main.jobs 
WHERE main.jobs.limit_key IS NOT NULL AND main.jobs.blocked_by IS NULL AND main.jobs.reserved_at IS NULL AND main.jobs.limit_key IN (?) ORDER BY main.jobs.id)
 UPDATE main.jobs SET available_at=253339228800000, blocked_by=?, due_at=coalesce(main.jobs.due_at, main.jobs.available_at) FROM held WHERE main.jobs.id = held.id RETURNING id;

INSERT INTO main.sqlq_wakes (limit_key, max_running, rate, period_ms, in_order, holds, at) SELECT batch.limit_key, batch.max_running, batch.rate, batch.period_ms, batch.in_order = ? AS anon_1, batch.holds = ? AS anon_2, coalesce(batch.moment, (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) + batch.delay_ms)) AS coalesce_1 
FROM (SELECT CAST(json_extract("each".value, ?) AS TEXT) AS limit_key, CAST(json_extract("each".value, ?) AS INTEGER) AS max_running, CAST(json_extract("each".value, ?) AS INTEGER) AS rate, CAST(json_extract("each".value, ?) AS BIGINT) AS period_ms, CAST(json_extract("each".value, ?) AS INTEGER) AS in_order, CAST(json_extract("each".value, ?) AS INTEGER) AS holds, CAST(json_extract("each".value, ?) AS INTEGER) AS moment, CAST(json_extract("each".value, ?) AS BIGINT) AS delay_ms 
FROM json_each(?) AS "each") AS batch ORDER BY batch.limit_key RETURNING id;

