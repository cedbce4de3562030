SELECT DISTINCT shop.sqlq_workers.queues 
FROM shop.sqlq_workers 
WHERE shop.sqlq_workers.seen_at >= (UTC_TIMESTAMP(6) + INTERVAL (%(param_1)s) * 1000 MICROSECOND);

SELECT shop.jobs.id 
FROM shop.jobs 
WHERE shop.jobs.limit_key IS NOT NULL AND shop.jobs.blocked_by IS NULL AND shop.jobs.reserved_at IS NULL AND NOT ((shop.jobs.queue NOT IN (SELECT shop.sqlq_queues.queue 
FROM shop.sqlq_queues 
WHERE shop.sqlq_queues.paused_at IS NOT NULL)) AND (%(serves_all)s = %(param_1)s OR shop.jobs.queue IN (NULL) AND (1 != 1))) ORDER BY shop.jobs.id 
 LIMIT %(most)s;

SELECT limit_key FROM shop.jobs
 WHERE blocked_by >= 'limit' AND blocked_by <= 'limit' AND limit_key > %(after)s
 GROUP BY blocked_by, limit_key ORDER BY blocked_by, limit_key LIMIT %(most)s;

