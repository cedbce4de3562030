INSERT INTO shop.jobs (queue, task, max_attempts, payload) SELECT %(queue)s AS anon_1, %(task)s AS anon_2, %(max_attempts)s AS anon_3, texts.value 
FROM (SELECT * FROM JSON_TABLE(%(texts)s, '$[*]' COLUMNS (place FOR ORDINALITY, value LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin PATH '$')) AS given) AS texts ORDER BY texts.place RETURNING shop.jobs.id;

