SELECT flow_id, id, blocked_by IS 'flow' FROM main.jobs
 WHERE flow_id IS NOT NULL AND (flow_id, id) > (?, ?)
 ORDER BY flow_id, id
 LIMIT ?;

