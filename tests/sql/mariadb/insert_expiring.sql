INSERT INTO shop.jobs (queue, task, payload, max_attempts, start_by) VALUES (%(queue)s, %(task)s, %(payload)s, %(max_attempts)s, (UTC_TIMESTAMP(6) + INTERVAL (%(start_within_ms)s) * 1000 MICROSECOND)) RETURNING shop.jobs.id;

