SELECT shop.jobs.id 
FROM shop.jobs 
WHERE shop.jobs.reserved_at IS NOT NULL AND shop.jobs.reserved_by IN (%(owners_1)s) ORDER BY shop.jobs.reserved_by, shop.jobs.id;

SELECT shop.jobs.id, shop.jobs.reserved_by AS sqlq_0, shop.jobs.id AS sqlq_1, shop.jobs.lease_token AS sqlq_2, shop.jobs.cancel_requested_at AS sqlq_3 
FROM shop.jobs FORCE INDEX (PRIMARY) 
WHERE shop.jobs.reserved_at IS NOT NULL AND shop.jobs.reserved_by IN (%(owners_1)s) AND shop.jobs.id IN (%(sqlq_ids_1)s, %(sqlq_ids_2)s) ORDER BY shop.jobs.id FOR UPDATE SKIP LOCKED;

SET STATEMENT innodb_lock_wait_timeout = 0 FOR UPDATE shop.jobs FORCE INDEX (PRIMARY) SET lease_expires_at=(UTC_TIMESTAMP(6) + INTERVAL (%(lease_ms)s) * 1000 MICROSECOND) WHERE shop.jobs.id IN (%(sqlq_ids_1)s, %(sqlq_ids_2)s);

SELECT shop.sqlq_workers.id, shop.sqlq_workers.id AS sqlq_0 
FROM shop.sqlq_workers FORCE INDEX (PRIMARY) 
WHERE shop.sqlq_workers.id IN (%(owners_1)s) ORDER BY shop.sqlq_workers.id FOR UPDATE SKIP LOCKED;

SELECT shop.sqlq_workers.id 
FROM shop.sqlq_workers 
WHERE shop.sqlq_workers.id IN (%(owners_1)s) ORDER BY shop.sqlq_workers.id;

