BEGIN;

SELECT shop.jobs.id 
FROM shop.jobs 
WHERE shop.jobs.id IN (SELECT shop.sqlq_edges.job_id 
FROM shop.sqlq_edges 
WHERE shop.sqlq_edges.depends_on IN (SELECT batch.id 
FROM (SELECT * FROM JSON_TABLE(%(batch)s, '$[*]' COLUMNS (`id` BIGINT PATH '$[0]')) AS given) AS batch) AND (shop.sqlq_edges.on_outcome != %(on_outcome_1)s OR (SELECT shop.failed_jobs.id 
FROM shop.failed_jobs 
WHERE shop.failed_jobs.id = shop.sqlq_edges.depends_on) IS NULL)) AND shop.jobs.blocked_by = 'flow' AND shop.jobs.reserved_at IS NULL AND CASE WHEN ((SELECT shop.sqlq_edges.depends_on 
FROM shop.sqlq_edges 
WHERE shop.sqlq_edges.job_id = shop.jobs.id AND (SELECT parents.id 
FROM shop.jobs AS parents 
WHERE parents.id = shop.sqlq_edges.depends_on) IS NOT NULL ORDER BY shop.sqlq_edges.depends_on DESC 
 LIMIT %(param_1)s) IS NULL) THEN (SELECT max(CASE WHEN ((SELECT shop.failed_jobs.id 
FROM shop.failed_jobs 
WHERE shop.failed_jobs.id = shop.sqlq_edges.depends_on) IS NOT NULL) THEN CASE WHEN (shop.sqlq_edges.on_outcome = %(on_outcome_2)s) THEN %(param_2)s ELSE %(param_3)s END WHEN (shop.sqlq_edges.on_outcome = %(on_outcome_3)s) THEN %(param_4)s WHEN (shop.sqlq_edges.on_outcome = %(on_outcome_4)s AND (SELECT shop.finished_jobs.outcome 
FROM shop.finished_jobs 
WHERE shop.finished_jobs.id = shop.sqlq_edges.depends_on) = %(param_5)s) THEN %(param_6)s ELSE %(param_7)s END) AS max_1 
FROM shop.sqlq_edges 
WHERE shop.sqlq_edges.job_id = shop.jobs.id) END != %(param_8)s ORDER BY shop.jobs.id 
 LIMIT %(param_9)s;

SELECT shop.jobs.id, CASE WHEN ((SELECT shop.sqlq_edges.depends_on 
FROM shop.sqlq_edges 
WHERE shop.sqlq_edges.job_id = shop.jobs.id AND (SELECT parents.id 
FROM shop.jobs AS parents 
WHERE parents.id = shop.sqlq_edges.depends_on) IS NOT NULL ORDER BY shop.sqlq_edges.depends_on DESC 
 LIMIT %(param_1)s) IS NULL) THEN (SELECT max(CASE WHEN ((SELECT shop.failed_jobs.id 
FROM shop.failed_jobs 
WHERE shop.failed_jobs.id = shop.sqlq_edges.depends_on) IS NOT NULL) THEN CASE WHEN (shop.sqlq_edges.on_outcome = %(on_outcome_1)s) THEN %(param_2)s ELSE %(param_3)s END WHEN (shop.sqlq_edges.on_outcome = %(on_outcome_2)s) THEN %(param_4)s WHEN (shop.sqlq_edges.on_outcome = %(on_outcome_3)s AND (SELECT shop.finished_jobs.outcome 
FROM shop.finished_jobs 
WHERE shop.finished_jobs.id = shop.sqlq_edges.depends_on) = %(param_5)s) THEN %(param_6)s ELSE %(param_7)s END) AS max_1 
FROM shop.sqlq_edges 
WHERE shop.sqlq_edges.job_id = shop.jobs.id) END AS verdict 
FROM shop.jobs FORCE INDEX (PRIMARY) 
WHERE shop.jobs.id IN (SELECT shop.sqlq_edges.job_id 
FROM shop.sqlq_edges 
WHERE shop.sqlq_edges.depends_on IN (SELECT batch.id 
FROM (SELECT * FROM JSON_TABLE(%(batch)s, '$[*]' COLUMNS (`id` BIGINT PATH '$[0]')) AS given) AS batch) AND (shop.sqlq_edges.on_outcome != %(on_outcome_4)s OR (SELECT shop.failed_jobs.id 
FROM shop.failed_jobs 
WHERE shop.failed_jobs.id = shop.sqlq_edges.depends_on) IS NULL)) AND shop.jobs.blocked_by = 'flow' AND shop.jobs.reserved_at IS NULL AND CASE WHEN ((SELECT shop.sqlq_edges.depends_on 
FROM shop.sqlq_edges 
WHERE shop.sqlq_edges.job_id = shop.jobs.id AND (SELECT parents.id 
FROM shop.jobs AS parents 
WHERE parents.id = shop.sqlq_edges.depends_on) IS NOT NULL ORDER BY shop.sqlq_edges.depends_on DESC 
 LIMIT %(param_1)s) IS NULL) THEN (SELECT max(CASE WHEN ((SELECT shop.failed_jobs.id 
FROM shop.failed_jobs 
WHERE shop.failed_jobs.id = shop.sqlq_edges.depends_on) IS NOT NULL) THEN CASE WHEN (shop.sqlq_edges.on_outcome = %(on_outcome_1)s) THEN %(param_2)s ELSE %(param_3)s END WHEN (shop.sqlq_edges.on_outcome = %(on_outcome_2)s) THEN %(param_4)s WHEN (shop.sqlq_edges.on_outcome = %(on_outcome_3)s AND (SELECT shop.finished_jobs.outcome 
FROM shop.finished_jobs 
WHERE shop.finished_jobs.id = shop.sqlq_edges.depends_on) = %(param_5)s) THEN %(param_6)s ELSE %(param_7)s END) AS max_1 
FROM shop.sqlq_edges 
WHERE shop.sqlq_edges.job_id = shop.jobs.id) END != %(param_8)s AND shop.jobs.id IN (%(sqlq_ids_1)s, %(sqlq_ids_2)s) ORDER BY shop.jobs.id FOR UPDATE SKIP LOCKED;

SET STATEMENT innodb_lock_wait_timeout = 0 FOR UPDATE (SELECT * FROM JSON_TABLE(%(batch)s, '$[*]' COLUMNS (`id` BIGINT PATH '$[0]', `verdict` INT PATH '$[1]')) AS given) AS batch STRAIGHT_JOIN shop.jobs FORCE INDEX (PRIMARY) SET jobs.available_at=CASE WHEN (batch.verdict = %(verdict_1)s AND shop.jobs.task != %(task_1)s) THEN CASE WHEN (shop.jobs.limit_key IS NOT NULL) THEN TIMESTAMP '9998-01-01 00:00:00' ELSE CASE WHEN (shop.jobs.due_at > UTC_TIMESTAMP(6)) THEN shop.jobs.due_at ELSE UTC_TIMESTAMP(6) END END ELSE shop.jobs.available_at END, jobs.blocked_by=CASE WHEN (batch.verdict = %(verdict_1)s AND shop.jobs.task != %(task_1)s) THEN CASE WHEN (shop.jobs.limit_key IS NOT NULL) THEN %(param_1)s ELSE NULL END ELSE shop.jobs.blocked_by END, jobs.due_at=CASE WHEN (batch.verdict = %(verdict_1)s AND shop.jobs.task != %(task_1)s) THEN CASE WHEN (shop.jobs.limit_key IS NOT NULL) THEN CASE WHEN (shop.jobs.due_at > UTC_TIMESTAMP(6)) THEN shop.jobs.due_at ELSE UTC_TIMESTAMP(6) END ELSE NULL END ELSE shop.jobs.due_at END WHERE shop.jobs.id = batch.id;

SELECT shop.jobs.id, shop.jobs.limit_key, shop.jobs.blocked_by 
FROM shop.jobs 
WHERE shop.jobs.id IN (%(sqlq_ids_1)s, %(sqlq_ids_2)s) ORDER BY shop.jobs.id;

BEGIN;

SELECT shop.jobs.id 
FROM shop.jobs 
WHERE shop.jobs.id IN (%(ids_1)s) AND shop.jobs.blocked_by = 'flow' AND shop.jobs.reserved_at IS NULL ORDER BY shop.jobs.id;

SELECT shop.jobs.id, shop.jobs.task, shop.jobs.label, shop.jobs.timeout_ms 
FROM shop.jobs FORCE INDEX (PRIMARY) 
WHERE shop.jobs.id IN (%(ids_1)s) AND shop.jobs.blocked_by = 'flow' AND shop.jobs.reserved_at IS NULL AND shop.jobs.id IN (%(sqlq_ids_1)s) ORDER BY shop.jobs.id FOR UPDATE SKIP LOCKED;

SELECT waits.job_id, CASE WHEN ((SELECT shop.sqlq_edges.depends_on 
FROM shop.sqlq_edges 
WHERE shop.sqlq_edges.job_id = waits.job_id AND (SELECT parents.id 
FROM shop.jobs AS parents 
WHERE parents.id = shop.sqlq_edges.depends_on) IS NOT NULL ORDER BY shop.sqlq_edges.depends_on DESC 
 LIMIT %(param_1)s) IS NULL) THEN (SELECT max(CASE WHEN ((SELECT shop.failed_jobs.id 
FROM shop.failed_jobs 
WHERE shop.failed_jobs.id = shop.sqlq_edges.depends_on) IS NOT NULL) THEN CASE WHEN (shop.sqlq_edges.on_outcome = %(on_outcome_1)s) THEN %(param_2)s ELSE %(param_3)s END WHEN (shop.sqlq_edges.on_outcome = %(on_outcome_2)s) THEN %(param_4)s WHEN (shop.sqlq_edges.on_outcome = %(on_outcome_3)s AND (SELECT shop.finished_jobs.outcome 
FROM shop.finished_jobs 
WHERE shop.finished_jobs.id = shop.sqlq_edges.depends_on) = %(param_5)s) THEN %(param_6)s ELSE %(param_7)s END) AS max_1 
FROM shop.sqlq_edges 
WHERE shop.sqlq_edges.job_id = waits.job_id) END AS verdict, waits.depends_on, waits.on_outcome, ended.outcome, ended.reason 
FROM shop.sqlq_edges AS waits LEFT OUTER JOIN shop.finished_jobs AS ended ON ended.id = waits.depends_on 
WHERE waits.job_id IN (%(ids_1)s) ORDER BY waits.job_id;

INSERT INTO shop.finished_jobs (id, queue, task, payload, priority, attempts, max_attempts, available_at, reserved_at, reserved_by, lease_token, unique_key, unique_until, on_success, on_failure, timeout_ms, releases, errors, headers, label, batch_key, backoff, retention_ms, progress, progress_of, progress_note, schedule, scheduled_for, `cursor`, start_by, flow_id, limit_key, replay_of, created_at, outcome, reason) SELECT shop.jobs.id, shop.jobs.queue, shop.jobs.task, shop.jobs.payload, shop.jobs.priority, shop.jobs.attempts, shop.jobs.max_attempts, shop.jobs.available_at, shop.jobs.reserved_at, shop.jobs.reserved_by, shop.jobs.lease_token, shop.jobs.unique_key, shop.jobs.unique_until, shop.jobs.on_success, shop.jobs.on_failure, shop.jobs.timeout_ms, shop.jobs.releases, shop.jobs.errors, shop.jobs.headers, shop.jobs.label, shop.jobs.batch_key, shop.jobs.backoff, shop.jobs.retention_ms, shop.jobs.progress, shop.jobs.progress_of, shop.jobs.progress_note, shop.jobs.schedule, shop.jobs.scheduled_for, shop.jobs.`cursor`, shop.jobs.start_by, shop.jobs.flow_id, shop.jobs.limit_key, shop.jobs.replay_of, shop.jobs.created_at, %(param_1)s AS anon_1, %(param_2)s AS anon_2 
FROM shop.jobs 
WHERE shop.jobs.id IN (%(id_1_1)s) ORDER BY shop.jobs.id;

SET STATEMENT innodb_lock_wait_timeout = 0 FOR DELETE FROM shop.jobs USING (SELECT * FROM JSON_TABLE(%(batch)s, '$[*]' COLUMNS (`id` BIGINT PATH '$[0]')) AS given) AS batch STRAIGHT_JOIN shop.jobs FORCE INDEX (PRIMARY) WHERE shop.jobs.id = batch.id;

BEGIN;

SELECT shop.jobs.id 
FROM shop.jobs 
WHERE shop.jobs.id IN (SELECT shop.sqlq_edges.job_id 
FROM shop.sqlq_edges 
WHERE shop.sqlq_edges.depends_on IN (SELECT batch.id 
FROM (SELECT * FROM JSON_TABLE(%(batch)s, '$[*]' COLUMNS (`id` BIGINT PATH '$[0]')) AS given) AS batch) AND (shop.sqlq_edges.on_outcome != %(on_outcome_1)s OR (SELECT shop.failed_jobs.id 
FROM shop.failed_jobs 
WHERE shop.failed_jobs.id = shop.sqlq_edges.depends_on) IS NULL)) AND shop.jobs.blocked_by = 'flow' AND shop.jobs.reserved_at IS NULL AND CASE WHEN ((SELECT shop.sqlq_edges.depends_on 
FROM shop.sqlq_edges 
WHERE shop.sqlq_edges.job_id = shop.jobs.id AND (SELECT parents.id 
FROM shop.jobs AS parents 
WHERE parents.id = shop.sqlq_edges.depends_on) IS NOT NULL ORDER BY shop.sqlq_edges.depends_on DESC 
 LIMIT %(param_1)s) IS NULL) THEN (SELECT max(CASE WHEN ((SELECT shop.failed_jobs.id 
FROM shop.failed_jobs 
WHERE shop.failed_jobs.id = shop.sqlq_edges.depends_on) IS NOT NULL) THEN CASE WHEN (shop.sqlq_edges.on_outcome = %(on_outcome_2)s) THEN %(param_2)s ELSE %(param_3)s END WHEN (shop.sqlq_edges.on_outcome = %(on_outcome_3)s) THEN %(param_4)s WHEN (shop.sqlq_edges.on_outcome = %(on_outcome_4)s AND (SELECT shop.finished_jobs.outcome 
FROM shop.finished_jobs 
WHERE shop.finished_jobs.id = shop.sqlq_edges.depends_on) = %(param_5)s) THEN %(param_6)s ELSE %(param_7)s END) AS max_1 
FROM shop.sqlq_edges 
WHERE shop.sqlq_edges.job_id = shop.jobs.id) END != %(param_8)s ORDER BY shop.jobs.id 
 LIMIT %(param_9)s;

