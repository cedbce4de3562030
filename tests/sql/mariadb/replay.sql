SELECT STRAIGHT_JOIN shop.jobs.id, batch.outcome, batch.result, batch.reason, shop.jobs.lease_token 
FROM (SELECT * FROM JSON_TABLE(%(batch)s, '$[*]' COLUMNS (`id` BIGINT PATH '$[0]', `token` BIGINT PATH '$[1]', `outcome` LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin PATH '$[2]', `result` LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin PATH '$[3]', `reason` LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin PATH '$[4]')) AS given) AS batch INNER JOIN shop.jobs FORCE INDEX (PRIMARY) ON shop.jobs.id = batch.id 
WHERE shop.jobs.lease_token = batch.token AND shop.jobs.reserved_at IS NOT NULL FOR UPDATE SKIP LOCKED;

INSERT INTO shop.finished_jobs (id, queue, task, payload, priority, attempts, max_attempts, available_at, reserved_at, reserved_by, lease_token, unique_key, unique_until, on_success, on_failure, timeout_ms, releases, errors, headers, label, group_key, backoff, retention_ms, progress, progress_of, progress_note, schedule, scheduled_for, `cursor`, start_by, flow_id, limit_key, replay_of, created_at, outcome, result, reason) SELECT STRAIGHT_JOIN shop.jobs.id, shop.jobs.queue, shop.jobs.task, shop.jobs.payload, shop.jobs.priority, shop.jobs.attempts, shop.jobs.max_attempts, shop.jobs.available_at, shop.jobs.reserved_at, shop.jobs.reserved_by, shop.jobs.lease_token, shop.jobs.unique_key, shop.jobs.unique_until, shop.jobs.on_success, shop.jobs.on_failure, shop.jobs.timeout_ms, shop.jobs.releases, shop.jobs.errors, shop.jobs.headers, shop.jobs.label, shop.jobs.group_key, shop.jobs.backoff, shop.jobs.retention_ms, shop.jobs.progress, shop.jobs.progress_of, shop.jobs.progress_note, shop.jobs.schedule, shop.jobs.scheduled_for, shop.jobs.`cursor`, shop.jobs.start_by, shop.jobs.flow_id, shop.jobs.limit_key, shop.jobs.replay_of, shop.jobs.created_at, batch.outcome, batch.result, batch.reason 
FROM (SELECT * FROM JSON_TABLE(%(batch)s, '$[*]' COLUMNS (`id` BIGINT PATH '$[0]', `token` BIGINT PATH '$[1]', `outcome` LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin PATH '$[2]', `result` LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin PATH '$[3]', `reason` LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin PATH '$[4]')) AS given) AS batch INNER JOIN shop.jobs FORCE INDEX (PRIMARY) ON shop.jobs.id = batch.id;

SET STATEMENT innodb_lock_wait_timeout = 0 FOR DELETE FROM shop.jobs USING (SELECT * FROM JSON_TABLE(%(batch)s, '$[*]' COLUMNS (`id` BIGINT PATH '$[0]')) AS given) AS batch STRAIGHT_JOIN shop.jobs FORCE INDEX (PRIMARY) WHERE shop.jobs.id = batch.id;

SELECT max(shop.jobs.id) AS max_1 
FROM shop.jobs;

SELECT max(shop.finished_jobs.id) AS max_1 
FROM shop.finished_jobs;

SELECT max(shop.failed_jobs.id) AS max_1 
FROM shop.failed_jobs;

SELECT UTC_TIMESTAMP(6) AS anon_1;

SELECT shop.finished_jobs.id 
FROM shop.finished_jobs 
WHERE shop.finished_jobs.id <= %(id_1)s AND CASE WHEN (shop.finished_jobs.outcome = %(outcome_1)s) THEN %(param_1)s ELSE %(param_2)s END IN (%(param_3_1)s, %(param_3_2)s) AND shop.finished_jobs.task = %(task_1)s AND shop.finished_jobs.flow_id IS NULL AND shop.finished_jobs.replayed_as IS NULL AND shop.finished_jobs.replay_of IS NULL AND shop.finished_jobs.id > %(id_2)s ORDER BY shop.finished_jobs.id 
 LIMIT %(param_4)s;

SELECT shop.finished_jobs.id, shop.finished_jobs.limit_key 
FROM shop.finished_jobs FORCE INDEX (PRIMARY) 
WHERE shop.finished_jobs.id <= %(id_1)s AND CASE WHEN (shop.finished_jobs.outcome = %(outcome_1)s) THEN %(param_1)s ELSE %(param_2)s END IN (%(param_3_1)s, %(param_3_2)s) AND shop.finished_jobs.task = %(task_1)s AND shop.finished_jobs.flow_id IS NULL AND shop.finished_jobs.replayed_as IS NULL AND shop.finished_jobs.replay_of IS NULL AND shop.finished_jobs.id > %(id_2)s AND shop.finished_jobs.id IN (%(sqlq_ids_1)s, %(sqlq_ids_2)s) ORDER BY shop.finished_jobs.id FOR UPDATE SKIP LOCKED;

SELECT shop.failed_jobs.id 
FROM shop.failed_jobs 
WHERE shop.failed_jobs.id <= %(id_1)s AND shop.failed_jobs.task = %(task_1)s AND shop.failed_jobs.flow_id IS NULL AND shop.failed_jobs.replayed_as IS NULL AND shop.failed_jobs.replay_of IS NULL AND shop.failed_jobs.id > %(id_2)s ORDER BY shop.failed_jobs.id 
 LIMIT %(param_1)s;

INSERT INTO shop.jobs (queue, task, payload, priority, max_attempts, timeout_ms, on_success, on_failure, headers, label, backoff, retention_ms, schedule, scheduled_for, limit_key, group_key, replay_of, available_at, blocked_by, due_at) SELECT ended.queue, ended.task, ended.payload, ended.priority, ended.max_attempts, ended.timeout_ms, ended.on_success, ended.on_failure, CASE WHEN (ended.headers LIKE %(headers_1)s AND CHAR_LENGTH(ended.headers) <= %(length_1)s) THEN concat(substr(ended.headers, %(substr_1)s, CHAR_LENGTH(ended.headers) - %(length_2)s), %(param_1)s, CAST(ended.id AS CHAR), %(param_2)s, %(param_3)s) ELSE ended.headers END AS anon_1, ended.label, ended.backoff, ended.retention_ms, ended.schedule, ended.scheduled_for, ended.limit_key, ended.group_key, ended.id, CASE WHEN (ended.limit_key IS NOT NULL) THEN TIMESTAMP '9998-01-01 00:00:00' ELSE (UTC_TIMESTAMP(6) + INTERVAL (CAST(FLOOR((((row_number() OVER (ORDER BY ended.id) - %(param_4)s) + %(param_5)s) * %(param_6)s) / %(param_7)s) - %(param_8)s AS SIGNED INTEGER)) * 1000 MICROSECOND) END AS anon_2, CASE WHEN (ended.limit_key IS NOT NULL) THEN %(param_9)s ELSE NULL END AS anon_3, CASE WHEN (ended.limit_key IS NOT NULL) THEN (UTC_TIMESTAMP(6) + INTERVAL (CAST(FLOOR((((row_number() OVER (ORDER BY ended.id) - %(param_4)s) + %(param_5)s) * %(param_6)s) / %(param_7)s) - %(param_8)s AS SIGNED INTEGER)) * 1000 MICROSECOND) ELSE NULL END AS anon_4 
FROM (SELECT shop.finished_jobs.id AS id, shop.finished_jobs.queue AS queue, shop.finished_jobs.task AS task, shop.finished_jobs.payload AS payload, shop.finished_jobs.priority AS priority, shop.finished_jobs.max_attempts AS max_attempts, shop.finished_jobs.timeout_ms AS timeout_ms, shop.finished_jobs.on_success AS on_success, shop.finished_jobs.on_failure AS on_failure, shop.finished_jobs.headers AS headers, shop.finished_jobs.label AS label, shop.finished_jobs.backoff AS backoff, shop.finished_jobs.retention_ms AS retention_ms, shop.finished_jobs.schedule AS schedule, shop.finished_jobs.scheduled_for AS scheduled_for, shop.finished_jobs.limit_key AS limit_key, shop.finished_jobs.group_key AS group_key 
FROM shop.finished_jobs 
WHERE shop.finished_jobs.id IN (%(id_1_1)s, %(id_1_2)s) UNION ALL SELECT shop.failed_jobs.id AS id, shop.failed_jobs.queue AS queue, shop.failed_jobs.task AS task, shop.failed_jobs.payload AS payload, shop.failed_jobs.priority AS priority, shop.failed_jobs.max_attempts AS max_attempts, shop.failed_jobs.timeout_ms AS timeout_ms, shop.failed_jobs.on_success AS on_success, shop.failed_jobs.on_failure AS on_failure, shop.failed_jobs.headers AS headers, shop.failed_jobs.label AS label, shop.failed_jobs.backoff AS backoff, shop.failed_jobs.retention_ms AS retention_ms, shop.failed_jobs.schedule AS schedule, shop.failed_jobs.scheduled_for AS scheduled_for, shop.failed_jobs.limit_key AS limit_key, shop.failed_jobs.group_key AS group_key 
FROM shop.failed_jobs 
WHERE shop.failed_jobs.id IN (%(id_2_1)s, %(id_2_2)s)) AS ended ORDER BY ended.id RETURNING shop.jobs.id, shop.jobs.replay_of, shop.jobs.task, shop.jobs.queue, shop.jobs.label, shop.jobs.max_attempts;

SET STATEMENT innodb_lock_wait_timeout = 0 FOR UPDATE (SELECT * FROM JSON_TABLE(%(batch)s, '$[*]' COLUMNS (`id` BIGINT PATH '$[0]', `replay` BIGINT PATH '$[1]')) AS given) AS batch STRAIGHT_JOIN shop.finished_jobs FORCE INDEX (PRIMARY) SET finished_jobs.replayed_as=batch.replay WHERE shop.finished_jobs.id = batch.id;

SET STATEMENT innodb_lock_wait_timeout = 0 FOR UPDATE (SELECT * FROM JSON_TABLE(%(batch)s, '$[*]' COLUMNS (`id` BIGINT PATH '$[0]', `replay` BIGINT PATH '$[1]')) AS given) AS batch STRAIGHT_JOIN shop.failed_jobs FORCE INDEX (PRIMARY) SET failed_jobs.replayed_as=batch.replay WHERE shop.failed_jobs.id = batch.id;

