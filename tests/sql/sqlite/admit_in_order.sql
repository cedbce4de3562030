INSERT INTO main.sqlq_wakes (limit_key, max_running, rate, period_ms, in_order, holds, at) SELECT batch.limit_key, batch.max_running, batch.rate, batch.period_ms, batch.in_order = ? AS anon_1, batch.holds = ? AS anon_2, coalesce(batch.moment, (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) + batch.delay_ms)) AS coalesce_1 
FROM (SELECT CAST(json_extract("each".value, ?) AS TEXT) AS limit_key, CAST(json_extract("each".value, ?) AS INTEGER) AS max_running, CAST(json_extract("each".value, ?) AS INTEGER) AS rate, CAST(json_extract("each".value, ?) AS BIGINT) AS period_ms, CAST(json_extract("each".value, ?) AS INTEGER) AS in_order, CAST(json_extract("each".value, ?) AS INTEGER) AS holds, CAST(json_extract("each".value, ?) AS INTEGER) AS moment, CAST(json_extract("each".value, ?) AS BIGINT) AS delay_ms 
FROM json_each(?) AS "each") AS batch ORDER BY batch.limit_key RETURNING id;

INSERT INTO main.jobs (queue, task, max_attempts, payload, limit_key, available_at, blocked_by, due_at) SELECT ? AS anon_2, ? AS anon_3, ? AS anon_4, texts.value, ? AS anon_5, CASE WHEN (? IS NOT NULL) THEN 253339228800000 ELSE (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)) END AS anon_6, CASE WHEN (? IS NOT NULL) THEN ? ELSE NULL END AS anon_7, CASE WHEN (? IS NOT NULL) THEN (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)) ELSE NULL END AS anon_8 
FROM (SELECT "each".value AS value, "each"."key" AS place 
FROM json_each(?) AS "each") AS texts ORDER BY texts.place RETURNING id, CASE WHEN (available_at >= 253339228800000) THEN ? ELSE CASE WHEN (available_at <= (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER))) THEN ? ELSE ? END END AS anon_1;

WITH held AS MATERIALIZED 
(SELECT main.sqlq_wakes.id AS id 
FROM main.sqlq_wakes 
WHERE main.sqlq_wakes.at <= (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)) ORDER BY main.sqlq_wakes.at, main.sqlq_wakes.id
 LIMIT ? OFFSET ?)
 DELETE FROM main.sqlq_wakes WHERE main.sqlq_wakes.id IN (SELECT held.id 
FROM held) RETURNING id, limit_key, max_running, rate, period_ms, in_order, holds;

INSERT INTO main.sqlq_limits (limit_key, max_running, rate, period_ms, in_order, holds) VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (limit_key) DO NOTHING;

SELECT main.sqlq_limits.limit_key, main.sqlq_limits.max_running, main.sqlq_limits.rate, main.sqlq_limits.period_ms, main.sqlq_limits.in_order, main.sqlq_limits.holds, main.sqlq_limits.next_free_at, main.sqlq_limits.pinned_at, main.sqlq_limits.used_at, main.sqlq_limits.closed_until, (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)) AS moment 
FROM main.sqlq_limits 
WHERE main.sqlq_limits.limit_key IN (?) ORDER BY main.sqlq_limits.limit_key;

SELECT main.jobs.limit_key, count(*) AS count_1 
FROM main.jobs 
WHERE main.jobs.limit_key IN (?) AND main.jobs.blocked_by IS NULL GROUP BY main.jobs.limit_key;

SELECT DISTINCT main.sqlq_workers.queues 
FROM main.sqlq_workers 
WHERE main.sqlq_workers.seen_at >= (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) + ?);

SELECT main.jobs.id, main.jobs.limit_key, CASE WHEN (main.jobs.due_at <= (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)) AND (main.jobs.queue NOT IN (SELECT main.sqlq_queues.queue 
FROM main.sqlq_queues 
WHERE main.sqlq_queues.paused_at IS NOT NULL)) AND (? = ? OR main.jobs.queue IN (SELECT 1 FROM (SELECT 1) WHERE 1!=1)) AND (main.jobs.id NOT IN (SELECT 1 FROM (SELECT 1) WHERE 1!=1)) AND (? = ? OR NOT (EXISTS (SELECT * 
FROM main.failed_jobs 
WHERE main.failed_jobs.limit_key = main.jobs.limit_key AND main.failed_jobs.id < main.jobs.id)))) THEN ? ELSE ? END AS anon_1 
FROM main.jobs 
WHERE main.jobs.limit_key = ? AND main.jobs.blocked_by = 'limit' ORDER BY main.jobs.id
 LIMIT ? OFFSET ?;

SAVEPOINT sa_savepoint_1;

UPDATE main.jobs SET available_at=coalesce(batch.start, (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER))), blocked_by=NULL FROM (SELECT CAST(json_extract("each".value, ?) AS BIGINT) AS id, CAST(json_extract("each".value, ?) AS INTEGER) AS start 
FROM json_each(?) AS "each") AS batch WHERE main.jobs.id = batch.id AND main.jobs.blocked_by = 'limit';

RELEASE SAVEPOINT sa_savepoint_1;

