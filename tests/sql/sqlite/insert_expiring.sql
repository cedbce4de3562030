INSERT INTO main.jobs (queue, task, payload, max_attempts, start_by) VALUES (?, ?, ?, ?, (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)) + ?) RETURNING id;

