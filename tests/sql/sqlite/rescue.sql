SELECT main.jobs.id, main.jobs.lease_token 
FROM main.jobs 
WHERE main.jobs.reserved_at IS NOT NULL AND coalesce(main.jobs.lease_expires_at, main.jobs.reserved_at) <= (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)) AND (main.jobs.id NOT IN (SELECT 1 FROM (SELECT 1) WHERE 1!=1)) ORDER BY main.jobs.reserved_by, main.jobs.id
 LIMIT ? OFFSET ?;

