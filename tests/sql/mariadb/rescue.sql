SELECT shop.jobs.id 
FROM shop.jobs 
WHERE shop.jobs.reserved_at IS NOT NULL AND coalesce(shop.jobs.lease_expires_at, shop.jobs.reserved_at) <= UTC_TIMESTAMP(6) ORDER BY shop.jobs.id 
 LIMIT %(most)s;

