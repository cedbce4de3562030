SELECT DISTINCT main.sqlq_workers.queues 
FROM main.sqlq_workers 
WHERE main.sqlq_workers.seen_at >= (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) + ?);

WITH held AS MATERIALIZED 
(SELECT main.jobs.id AS id 
FROM main.jobs 
WHERE main.jobs.limit_key IS NOT NULL AND main.jobs.blocked_by IS NULL AND main.jobs.reserved_at IS NULL AND NOT ((main.jobs.queue NOT IN (SELECT main.sqlq_queues.queue 
FROM main.sqlq_queues 
WHERE main.sqlq_queues.paused_at IS NOT NULL)) AND (? = ? OR main.jobs.queue IN (SELECT 1 FROM (SELECT 1) WHERE 1!=1))) ORDER BY main.jobs.id
 LIMIT ? OFFSET ?)
 UPDATE main.jobs SET available_at=253339228800000, blocked_by=?, due_at=coalesce(main.jobs.due_at, main.jobs.available_at) FROM held WHERE main.jobs.id = held.id RETURNING limit_key;

WITH RECURSIVE each_limit_key (limit_key) AS (
      SELECT min(limit_key) FROM main.jobs WHERE blocked_by = 'limit' AND limit_key > ?
      UNION ALL
      SELECT (SELECT min(limit_key) FROM main.jobs
               WHERE blocked_by = 'limit' AND limit_key > each_limit_key.limit_key)
        FROM each_limit_key WHERE each_limit_key.limit_key IS NOT NULL)
SELECT limit_key FROM each_limit_key WHERE limit_key IS NOT NULL LIMIT ?;

