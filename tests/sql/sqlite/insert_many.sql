INSERT INTO main.jobs (queue, task, max_attempts, payload) SELECT ? AS anon_1, ? AS anon_2, ? AS anon_3, texts.value 
FROM (SELECT "each".value AS value, "each"."key" AS place 
FROM json_each(?) AS "each") AS texts ORDER BY texts.place RETURNING id;

