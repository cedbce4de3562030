SELECT shop.jobs.id 
FROM shop.jobs 
WHERE shop.jobs.reserved_at IS NOT NULL AND coalesce(shop.jobs.lease_expires_at, shop.jobs.reserved_at) <= UTC_TIMESTAMP(6) AND (shop.jobs.id NOT IN (NULL) OR (1 = 1)) ORDER BY shop.jobs.reserved_by, shop.jobs.id 
 LIMIT %(param_1)s;

