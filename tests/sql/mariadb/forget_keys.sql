SELECT shop.sqlq_limits.limit_key 
FROM shop.sqlq_limits 
WHERE shop.sqlq_limits.used_at < (UTC_TIMESTAMP(6) + INTERVAL (%(param_1)s) * 1000 MICROSECOND) AND shop.sqlq_limits.pinned_at IS NULL AND (shop.sqlq_limits.next_free_at IS NULL OR shop.sqlq_limits.next_free_at < UTC_TIMESTAMP(6)) AND (shop.sqlq_limits.closed_until IS NULL OR shop.sqlq_limits.closed_until < UTC_TIMESTAMP(6)) AND NOT (EXISTS (SELECT * 
FROM shop.jobs 
WHERE shop.jobs.limit_key = shop.sqlq_limits.limit_key AND shop.jobs.blocked_by IS NULL)) AND NOT (EXISTS (SELECT * 
FROM shop.jobs 
WHERE shop.jobs.limit_key = shop.sqlq_limits.limit_key AND shop.jobs.blocked_by = 'limit')) AND NOT (EXISTS (SELECT * 
FROM shop.failed_jobs 
WHERE shop.failed_jobs.limit_key = shop.sqlq_limits.limit_key)) AND (shop.sqlq_limits.limit_key NOT IN (SELECT shop.jobs.limit_key 
FROM shop.jobs 
WHERE shop.jobs.flow_id IS NOT NULL AND shop.jobs.blocked_by = 'flow' AND shop.jobs.limit_key IS NOT NULL)) ORDER BY shop.sqlq_limits.used_at 
 LIMIT %(param_2)s;

