SELECT STRAIGHT_JOIN shop.jobs.id, shop.jobs.id AS sqlq_0, shop.jobs.lease_token AS sqlq_1, shop.jobs.cancel_requested_at AS sqlq_2 
FROM (SELECT * FROM JSON_TABLE(%(batch)s, '$[*]' COLUMNS (`id` BIGINT PATH '$[0]', `token` BIGINT PATH '$[1]')) AS given) AS batch INNER JOIN shop.jobs FORCE INDEX (PRIMARY) ON shop.jobs.id = batch.id 
WHERE shop.jobs.lease_token = batch.token AND shop.jobs.reserved_at IS NOT NULL FOR UPDATE SKIP LOCKED;

SET STATEMENT innodb_lock_wait_timeout = 0 FOR UPDATE (SELECT * FROM JSON_TABLE(%(batch)s, '$[*]' COLUMNS (`id` BIGINT PATH '$[0]')) AS given) AS batch STRAIGHT_JOIN shop.jobs FORCE INDEX (PRIMARY) SET jobs.lease_expires_at=(UTC_TIMESTAMP(6) + INTERVAL (%(lease_ms)s) * 1000 MICROSECOND) WHERE shop.jobs.id = batch.id;

