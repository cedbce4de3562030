WITH held AS MATERIALIZED 
(SELECT main.jobs.id AS id 
FROM (SELECT CAST(json_extract("each".value, ?) AS BIGINT) AS id, CAST(json_extract("each".value, ?) AS BIGINT) AS token 
FROM json_each(?) AS "each") AS batch JOIN main.jobs ON main.jobs.id = batch.id 
WHERE main.jobs.lease_token = batch.token AND main.jobs.reserved_at IS NOT NULL ORDER BY main.jobs.id)
 UPDATE main.jobs SET lease_expires_at=(CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) + ?) FROM held WHERE main.jobs.id = held.id RETURNING id, lease_token, cancel_requested_at;

