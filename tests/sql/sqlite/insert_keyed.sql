INSERT INTO main.jobs (queue, task, payload, max_attempts, unique_key) VALUES (?, ?, ?, ?, ?) ON CONFLICT (queue, unique_key) WHERE unique_key IS NOT NULL AND (unique_until <> 'start' OR lease_token = 0) DO NOTHING RETURNING queue, unique_key, id, CASE WHEN (available_at <= (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER))) THEN ? ELSE ? END AS anon_1;

