SELECT shop.jobs.flow_id, shop.jobs.id, shop.jobs.blocked_by 
FROM shop.jobs 
WHERE shop.jobs.flow_id IS NOT NULL AND (shop.jobs.flow_id, shop.jobs.id) > (%(flow)s, %(step)s) ORDER BY shop.jobs.flow_id, shop.jobs.id 
 LIMIT %(most)s;

