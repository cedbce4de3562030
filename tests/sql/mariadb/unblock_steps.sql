BEGIN;

SELECT shop.jobs.id 
FROM shop.jobs 
WHERE shop.jobs.id IN (SELECT batch.id 
FROM (SELECT * FROM JSON_TABLE(%(batch)s, '$[*]' COLUMNS (`id` BIGINT PATH '$[0]')) AS given) AS batch) AND shop.jobs.blocked_by = 'flow' AND shop.jobs.reserved_at IS NULL AND CASE WHEN ((SELECT shop.sqlq_edges.depends_on 
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
WHERE shop.jobs.id IN (SELECT batch.id 
FROM (SELECT * FROM JSON_TABLE(%(batch)s, '$[*]' COLUMNS (`id` BIGINT PATH '$[0]')) AS given) AS batch) AND shop.jobs.blocked_by = 'flow' AND shop.jobs.reserved_at IS NULL AND CASE WHEN ((SELECT shop.sqlq_edges.depends_on 
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
WHERE shop.sqlq_edges.job_id = shop.jobs.id) END != %(param_8)s AND shop.jobs.id IN (%(sqlq_ids_1)s) ORDER BY shop.jobs.id FOR UPDATE SKIP LOCKED;

SET STATEMENT innodb_lock_wait_timeout = 0 FOR UPDATE (SELECT * FROM JSON_TABLE(%(batch)s, '$[*]' COLUMNS (`id` BIGINT PATH '$[0]', `verdict` INT PATH '$[1]')) AS given) AS batch STRAIGHT_JOIN shop.jobs FORCE INDEX (PRIMARY) SET jobs.available_at=CASE WHEN (batch.verdict = %(verdict_1)s AND shop.jobs.task != %(task_1)s) THEN CASE WHEN (shop.jobs.limit_key IS NOT NULL) THEN TIMESTAMP '9998-01-01 00:00:00' ELSE CASE WHEN (shop.jobs.due_at > UTC_TIMESTAMP(6)) THEN shop.jobs.due_at ELSE UTC_TIMESTAMP(6) END END ELSE shop.jobs.available_at END, jobs.blocked_by=CASE WHEN (batch.verdict = %(verdict_1)s AND shop.jobs.task != %(task_1)s) THEN CASE WHEN (shop.jobs.limit_key IS NOT NULL) THEN %(param_1)s ELSE NULL END ELSE shop.jobs.blocked_by END, jobs.due_at=CASE WHEN (batch.verdict = %(verdict_1)s AND shop.jobs.task != %(task_1)s) THEN CASE WHEN (shop.jobs.limit_key IS NOT NULL) THEN CASE WHEN (shop.jobs.due_at > UTC_TIMESTAMP(6)) THEN shop.jobs.due_at ELSE UTC_TIMESTAMP(6) END ELSE NULL END ELSE shop.jobs.due_at END WHERE shop.jobs.id = batch.id;

SELECT shop.jobs.id, shop.jobs.limit_key, shop.jobs.blocked_by 
FROM shop.jobs 
WHERE shop.jobs.id IN (%(sqlq_ids_1)s) ORDER BY shop.jobs.id;

