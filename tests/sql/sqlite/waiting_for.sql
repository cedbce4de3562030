SELECT DISTINCT job.id
  FROM main.sqlq_edges AS edge
 CROSS JOIN main.jobs AS job ON job.id = edge.job_id
 WHERE edge.depends_on IN (1, 2) AND job.blocked_by = 'flow'
   AND (edge.on_outcome <> 'success'
        OR NOT EXISTS (SELECT 1 FROM main.failed_jobs AS failed WHERE failed.id = edge.depends_on));

