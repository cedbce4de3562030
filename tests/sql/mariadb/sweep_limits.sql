SELECT DISTINCT shop.sqlq_workers.queues 
FROM shop.sqlq_workers 
WHERE shop.sqlq_workers.seen_at >= (UTC_TIMESTAMP(6) + INTERVAL (%(param_1)s) * 1000 MICROSECOND);

SELECT shop.jobs.id 
FROM shop.jobs 
WHERE shop.jobs.limit_key IS NOT NULL AND shop.jobs.blocked_by IS NULL AND shop.jobs.reserved_at IS NULL AND shop.jobs.queue IN (SELECT shop.sqlq_queues.queue 
FROM shop.sqlq_queues 
WHERE shop.sqlq_queues.paused_at IS NOT NULL) ORDER BY shop.jobs.id 
 LIMIT %(param_1)s;

SELECT limit_key FROM shop.jobs
 WHERE blocked_by >= 'limit' AND blocked_by <= 'limit' AND limit_key > %(after)s
 GROUP BY blocked_by, limit_key ORDER BY blocked_by, limit_key LIMIT %(most)s;

