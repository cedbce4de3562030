WITH held AS MATERIALIZED 
(SELECT main.jobs.id AS id 
FROM main.jobs 
WHERE main.jobs.reserved_at IS NOT NULL AND main.jobs.reserved_by IN (?) ORDER BY main.jobs.reserved_by, main.jobs.id)
 UPDATE main.jobs SET lease_expires_at=(CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) + ?) FROM held WHERE main.jobs.id = held.id RETURNING reserved_by, id, lease_token, cancel_requested_at;

WITH held AS MATERIALIZED 
(SELECT main.sqlq_workers.id AS id 
FROM main.sqlq_workers 
WHERE main.sqlq_workers.id IN (?) ORDER BY main.sqlq_workers.id)
 UPDATE main.sqlq_workers SET seen_at=(CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)), clock_at=? FROM held WHERE main.sqlq_workers.id = held.id RETURNING id;

SELECT main.sqlq_workers.id 
FROM main.sqlq_workers 
WHERE main.sqlq_workers.id IN (?) ORDER BY main.sqlq_workers.id;

