WITH held AS MATERIALIZED 
(SELECT main.jobs.id AS id, batch."before" AS "before", batch."after" AS "after" 
FROM (SELECT CAST(json_extract("each".value, ?) AS BIGINT) AS id, CAST(json_extract("each".value, ?) AS BIGINT) AS token, CAST(json_extract("each".value, ?) AS TEXT) AS "before", CAST(json_extract("each".value, ?) AS TEXT) AS "after" 
FROM json_each(?) AS "each") AS batch JOIN main.jobs ON main.jobs.id = batch.id 
WHERE main.jobs.lease_token = batch.token AND main.jobs.reserved_at IS NOT NULL AND main.jobs.cursor IS batch."before" ORDER BY main.jobs.id)
 UPDATE main.jobs SET releases=CASE WHEN (main.jobs.cursor IS NOT held."after") THEN ? ELSE main.jobs.releases END, losses=CASE WHEN (main.jobs.cursor IS NOT held."after" AND main.jobs.losses > ?) THEN ? ELSE main.jobs.losses END, cursor=held."after" FROM held WHERE main.jobs.id = held.id RETURNING id, lease_token, cancel_requested_at;

