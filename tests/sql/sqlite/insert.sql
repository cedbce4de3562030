INSERT INTO main.jobs (queue, task, payload, max_attempts) VALUES (?, ?, ?, ?) RETURNING id;

