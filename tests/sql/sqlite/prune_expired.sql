DELETE FROM main.finished_jobs WHERE main.finished_jobs.id IN (SELECT main.finished_jobs.id 
FROM main.finished_jobs 
WHERE main.finished_jobs.expires_at < (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)) ORDER BY main.finished_jobs.expires_at
 LIMIT ? OFFSET ?);

DELETE FROM main.failed_jobs WHERE main.failed_jobs.id IN (SELECT main.failed_jobs.id 
FROM main.failed_jobs 
WHERE main.failed_jobs.expires_at < (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)) ORDER BY main.failed_jobs.expires_at
 LIMIT ? OFFSET ?);

