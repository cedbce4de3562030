SELECT main.jobs.flow_id, main.jobs.id, main.jobs.blocked_by 
FROM main.jobs 
WHERE main.jobs.flow_id IS NOT NULL AND (main.jobs.flow_id, main.jobs.id) > (?, ?) ORDER BY main.jobs.flow_id, main.jobs.id
 LIMIT ? OFFSET ?;

