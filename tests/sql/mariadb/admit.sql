INSERT INTO shop.sqlq_wakes (limit_key, max_running, rate, period_ms, in_order, holds, at) SELECT batch.limit_key, batch.max_running, batch.rate, batch.period_ms, batch.in_order = %(in_order_1)s AS anon_1, batch.holds = %(holds_1)s AS anon_2, coalesce(batch.moment, (UTC_TIMESTAMP(6) + INTERVAL (batch.delay_ms) * 1000 MICROSECOND)) AS coalesce_1 
FROM (SELECT * FROM JSON_TABLE(%(batch)s, '$[*]' COLUMNS (`limit_key` LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin PATH '$[0]', `max_running` INT PATH '$[1]', `rate` INT PATH '$[2]', `period_ms` BIGINT PATH '$[3]', `in_order` INT PATH '$[4]', `holds` INT PATH '$[5]', `moment` DATETIME(6) PATH '$[6]', `delay_ms` BIGINT PATH '$[7]')) AS given) AS batch ORDER BY batch.limit_key RETURNING shop.sqlq_wakes.id;

INSERT INTO shop.jobs (queue, task, max_attempts, payload, limit_key, available_at, blocked_by, due_at) SELECT %(queue)s AS anon_2, %(task)s AS anon_3, %(max_attempts)s AS anon_4, texts.value, %(limit)s AS anon_5, CASE WHEN (%(limit)s IS NOT NULL) THEN TIMESTAMP '9998-01-01 00:00:00' ELSE UTC_TIMESTAMP(6) END AS anon_6, CASE WHEN (%(limit)s IS NOT NULL) THEN %(param_4)s ELSE NULL END AS anon_7, CASE WHEN (%(limit)s IS NOT NULL) THEN UTC_TIMESTAMP(6) ELSE NULL END AS anon_8 
FROM (SELECT * FROM JSON_TABLE(%(texts)s, '$[*]' COLUMNS (place FOR ORDINALITY, value LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin PATH '$')) AS given) AS texts ORDER BY texts.place RETURNING shop.jobs.id, CASE WHEN (shop.jobs.available_at >= TIMESTAMP '9998-01-01 00:00:00') THEN %(param_1)s ELSE CASE WHEN (shop.jobs.available_at <= UTC_TIMESTAMP(6)) THEN %(param_2)s ELSE %(param_3)s END END AS anon_1;

SELECT shop.sqlq_wakes.id 
FROM shop.sqlq_wakes 
WHERE shop.sqlq_wakes.at <= UTC_TIMESTAMP(6) ORDER BY shop.sqlq_wakes.at, shop.sqlq_wakes.id 
 LIMIT %(most)s;

SELECT shop.sqlq_wakes.id, shop.sqlq_wakes.id AS sqlq_0, shop.sqlq_wakes.limit_key AS sqlq_1, shop.sqlq_wakes.max_running AS sqlq_2, shop.sqlq_wakes.rate AS sqlq_3, shop.sqlq_wakes.period_ms AS sqlq_4, shop.sqlq_wakes.in_order AS sqlq_5, shop.sqlq_wakes.holds AS sqlq_6 
FROM shop.sqlq_wakes FORCE INDEX (PRIMARY) 
WHERE shop.sqlq_wakes.at <= UTC_TIMESTAMP(6) AND shop.sqlq_wakes.id IN (%(sqlq_ids_1)s) ORDER BY shop.sqlq_wakes.id FOR UPDATE SKIP LOCKED;

SET STATEMENT innodb_lock_wait_timeout = 0 FOR DELETE FROM shop.sqlq_wakes USING (SELECT * FROM JSON_TABLE(%(batch)s, '$[*]' COLUMNS (`id` BIGINT PATH '$[0]')) AS given) AS batch STRAIGHT_JOIN shop.sqlq_wakes FORCE INDEX (PRIMARY) WHERE shop.sqlq_wakes.id = batch.id;

INSERT INTO shop.sqlq_limits (limit_key, max_running, rate, period_ms, in_order, holds) VALUES (%(limit_key)s, %(max_running)s, %(rate)s, %(period_ms)s, %(in_order)s, %(holds)s) ON DUPLICATE KEY UPDATE max_running = shop.sqlq_limits.max_running;

SELECT shop.sqlq_limits.limit_key, shop.sqlq_limits.max_running, shop.sqlq_limits.rate, shop.sqlq_limits.period_ms, shop.sqlq_limits.in_order, shop.sqlq_limits.holds, shop.sqlq_limits.next_free_at, shop.sqlq_limits.pinned_at, shop.sqlq_limits.used_at, shop.sqlq_limits.closed_until, UTC_TIMESTAMP(6) AS moment 
FROM shop.sqlq_limits FORCE INDEX (PRIMARY) 
WHERE shop.sqlq_limits.limit_key IN (%(keys_1)s) ORDER BY shop.sqlq_limits.limit_key FOR UPDATE;

SELECT shop.jobs.limit_key, count(*) AS count_1 
FROM shop.jobs 
WHERE shop.jobs.limit_key IN (%(keys_1)s) AND shop.jobs.blocked_by IS NULL GROUP BY shop.jobs.limit_key;

SELECT DISTINCT shop.sqlq_workers.queues 
FROM shop.sqlq_workers 
WHERE shop.sqlq_workers.seen_at >= (UTC_TIMESTAMP(6) + INTERVAL (%(param_1)s) * 1000 MICROSECOND);

SELECT shop.jobs.id, shop.jobs.limit_key 
FROM shop.jobs 
WHERE shop.jobs.limit_key = %(line_key)s AND shop.jobs.blocked_by = 'limit' AND shop.jobs.due_at <= UTC_TIMESTAMP(6) AND (shop.jobs.queue NOT IN (SELECT shop.sqlq_queues.queue 
FROM shop.sqlq_queues 
WHERE shop.sqlq_queues.paused_at IS NOT NULL)) AND (%(serves_all)s = %(param_1)s OR shop.jobs.queue IN (NULL) AND (1 != 1)) AND (shop.jobs.id NOT IN (NULL) OR (1 = 1)) ORDER BY shop.jobs.priority DESC, shop.jobs.due_at, shop.jobs.id 
 LIMIT %(number)s;

SAVEPOINT sa_savepoint_1;

SET STATEMENT innodb_lock_wait_timeout = 0 FOR UPDATE (SELECT * FROM JSON_TABLE(%(batch)s, '$[*]' COLUMNS (`id` BIGINT PATH '$[0]', `start` DATETIME(6) PATH '$[1]')) AS given) AS batch STRAIGHT_JOIN shop.jobs FORCE INDEX (PRIMARY) SET jobs.available_at=coalesce(batch.start, UTC_TIMESTAMP(6)), jobs.blocked_by=NULL WHERE shop.jobs.id = batch.id AND shop.jobs.blocked_by = 'limit';

RELEASE SAVEPOINT sa_savepoint_1;

UPDATE shop.sqlq_limits FORCE INDEX (PRIMARY) SET max_running=%(max_running)s, rate=%(rate)s, period_ms=%(period_ms)s, in_order=%(in_order)s, holds=%(holds)s, next_free_at=%(at)s, used_at=UTC_TIMESTAMP(6) WHERE shop.sqlq_limits.limit_key = %(of)s;

