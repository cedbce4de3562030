INSERT INTO main.jobs (queue, task, max_attempts, payload) SELECT ? AS anon_2, ? AS anon_3, ? AS anon_4, texts.value 
FROM (SELECT "each".value AS value, "each"."key" AS place 
FROM json_each(?) AS "each") AS texts ORDER BY texts.place RETURNING id, CASE WHEN (available_at <= (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER))) THEN ? ELSE ? END AS anon_1;

