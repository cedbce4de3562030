SELECT shop.jobs.id 
FROM shop.jobs 
WHERE start_by IS NOT NULL AND reserved_at IS NULL AND attempts = 0 AND shop.jobs.start_by <= UTC_TIMESTAMP(6) ORDER BY shop.jobs.start_by, shop.jobs.id 
 LIMIT %(most)s;

