INSERT INTO main.jobs (queue, task, payload, max_attempts, priority) SELECT batch.queue, batch.task, batch.payload, batch.max_attempts, batch.priority 
FROM (SELECT CAST(json_extract("each".value, ?) AS INTEGER) AS n, CAST(json_extract("each".value, ?) AS TEXT) AS queue, CAST(json_extract("each".value, ?) AS TEXT) AS task, CAST(json_extract("each".value, ?) AS TEXT) AS payload, CAST(json_extract("each".value, ?) AS INTEGER) AS max_attempts, CAST(json_extract("each".value, ?) AS INTEGER) AS priority 
FROM json_each(?) AS "each") AS batch ORDER BY batch.n RETURNING id;

