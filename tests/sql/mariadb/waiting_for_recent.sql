SELECT job.id
  FROM shop.finished_jobs AS ended FORCE INDEX (finished_jobs_unblock)
 STRAIGHT_JOIN shop.sqlq_edges AS edge FORCE INDEX (sqlq_edges_parent) ON edge.depends_on = ended.id
 STRAIGHT_JOIN shop.jobs AS job FORCE INDEX (PRIMARY) ON job.id = edge.job_id
 WHERE ended.unblocks_at > UTC_TIMESTAMP(6) - INTERVAL %s * 1000 MICROSECOND AND job.blocked_by = 'flow'
 UNION
SELECT job.id
  FROM shop.failed_jobs AS ended FORCE INDEX (failed_jobs_unblock)
 STRAIGHT_JOIN shop.sqlq_edges AS edge FORCE INDEX (sqlq_edges_parent) ON edge.depends_on = ended.id
 STRAIGHT_JOIN shop.jobs AS job FORCE INDEX (PRIMARY) ON job.id = edge.job_id
 WHERE ended.unblocks_at > UTC_TIMESTAMP(6) - INTERVAL %s * 1000 MICROSECOND AND job.blocked_by = 'flow' AND edge.on_outcome <> 'success';

