INSERT INTO shop.jobs (queue, task, payload, max_attempts) VALUES (%(queue)s, %(task)s, %(payload)s, %(max_attempts)s) RETURNING shop.jobs.id;

