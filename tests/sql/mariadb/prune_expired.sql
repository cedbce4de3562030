SELECT shop.finished_jobs.id 
FROM shop.finished_jobs 
WHERE shop.finished_jobs.expires_at < (UTC_TIMESTAMP(6) + INTERVAL (%(param_1)s) * 1000 MICROSECOND) AND (shop.finished_jobs.id NOT IN (NULL) OR (1 = 1)) AND (shop.finished_jobs.flow_id IS NULL OR NOT ((EXISTS (SELECT shop.sqlq_edges.job_id 
FROM shop.sqlq_edges 
WHERE shop.sqlq_edges.depends_on = shop.finished_jobs.id AND (EXISTS (SELECT * 
FROM shop.jobs 
WHERE shop.jobs.id = shop.sqlq_edges.job_id)))) OR (EXISTS (SELECT shop.sqlq_edges.job_id 
FROM shop.sqlq_edges 
WHERE shop.sqlq_edges.depends_on = shop.finished_jobs.id AND (EXISTS (SELECT * 
FROM shop.failed_jobs AS failed_step 
WHERE failed_step.id = shop.sqlq_edges.job_id)))))) ORDER BY shop.finished_jobs.expires_at 
 LIMIT %(param_2)s;

SELECT shop.failed_jobs.id 
FROM shop.failed_jobs 
WHERE shop.failed_jobs.expires_at < (UTC_TIMESTAMP(6) + INTERVAL (%(param_1)s) * 1000 MICROSECOND) AND (shop.failed_jobs.id NOT IN (NULL) OR (1 = 1)) AND (shop.failed_jobs.flow_id IS NULL OR NOT ((EXISTS (SELECT shop.sqlq_edges.job_id 
FROM shop.sqlq_edges 
WHERE shop.sqlq_edges.depends_on = shop.failed_jobs.id AND (EXISTS (SELECT * 
FROM shop.jobs 
WHERE shop.jobs.id = shop.sqlq_edges.job_id)))) OR (EXISTS (SELECT shop.sqlq_edges.job_id 
FROM shop.sqlq_edges 
WHERE shop.sqlq_edges.depends_on = shop.failed_jobs.id AND (EXISTS (SELECT * 
FROM shop.failed_jobs AS failed_step 
WHERE failed_step.id = shop.sqlq_edges.job_id)))))) ORDER BY shop.failed_jobs.expires_at 
 LIMIT %(param_2)s;

