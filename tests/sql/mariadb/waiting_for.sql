SELECT DISTINCT job.id
  FROM shop.sqlq_edges AS edge FORCE INDEX (sqlq_edges_parent)
 STRAIGHT_JOIN shop.jobs AS job FORCE INDEX (PRIMARY) ON job.id = edge.job_id
 WHERE edge.depends_on IN (1, 2) AND job.blocked_by = 'flow'
   AND (edge.on_outcome <> 'success'
        OR NOT EXISTS (SELECT 1 FROM shop.failed_jobs AS failed WHERE failed.id = edge.depends_on));

