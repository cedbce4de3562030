SELECT main.jobs.id, main.jobs.task, main.jobs.queue, main.jobs.label, main.jobs.limit_key 
FROM main.jobs 
WHERE start_by IS NOT NULL AND reserved_at IS NULL AND attempts = 0 AND main.jobs.start_by <= (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)) ORDER BY main.jobs.start_by, main.jobs.id
 LIMIT ? OFFSET ?;

