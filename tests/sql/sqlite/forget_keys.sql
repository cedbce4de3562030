WITH held AS MATERIALIZED 
(SELECT main.sqlq_limits.limit_key AS limit_key 
FROM main.sqlq_limits 
WHERE main.sqlq_limits.used_at < (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) + ?) AND main.sqlq_limits.pinned_at IS NULL AND (main.sqlq_limits.next_free_at IS NULL OR main.sqlq_limits.next_free_at < (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER))) AND (main.sqlq_limits.closed_until IS NULL OR main.sqlq_limits.closed_until < (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER))) AND NOT (EXISTS (SELECT * 
FROM main.jobs 
WHERE main.jobs.limit_key = main.sqlq_limits.limit_key AND main.jobs.blocked_by IS NULL)) AND NOT (EXISTS (SELECT * 
FROM main.jobs 
WHERE main.jobs.limit_key = main.sqlq_limits.limit_key AND main.jobs.blocked_by = 'limit')) AND NOT (EXISTS (SELECT * 
FROM main.failed_jobs 
WHERE main.failed_jobs.limit_key = main.sqlq_limits.limit_key)) AND (main.sqlq_limits.limit_key NOT IN (SELECT main.jobs.limit_key 
FROM main.jobs 
WHERE main.jobs.flow_id IS NOT NULL AND main.jobs.blocked_by = 'flow' AND main.jobs.limit_key IS NOT NULL)) ORDER BY main.sqlq_limits.used_at
 LIMIT ? OFFSET ?)
 DELETE FROM main.sqlq_limits WHERE main.sqlq_limits.limit_key IN (SELECT held.limit_key 
FROM held) RETURNING limit_key;

