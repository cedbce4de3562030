DELETE FROM main.finished_jobs WHERE main.finished_jobs.id IN (SELECT main.finished_jobs.id 
FROM main.finished_jobs 
WHERE main.finished_jobs.finished_at < (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) + ?) AND main.finished_jobs.expires_at IS NULL ORDER BY main.finished_jobs.finished_at
 LIMIT ? OFFSET ?);

