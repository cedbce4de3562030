INSERT INTO shop.jobs (queue, task, payload, max_attempts, priority) SELECT batch.queue, batch.task, batch.payload, batch.max_attempts, batch.priority 
FROM (SELECT * FROM JSON_TABLE(%(batch)s, '$[*]' COLUMNS (`n` INT PATH '$[0]', `queue` LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin PATH '$[1]', `task` LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin PATH '$[2]', `payload` LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin PATH '$[3]', `max_attempts` INT PATH '$[4]', `priority` INT PATH '$[5]')) AS given) AS batch ORDER BY batch.n RETURNING shop.jobs.id;

