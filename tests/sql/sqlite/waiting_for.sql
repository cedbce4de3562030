SELECT DISTINCT job.id
  FROM json_each(?) AS ended
 CROSS JOIN main.sqlq_edges AS edge ON edge.depends_on = ended.value
 CROSS JOIN main.jobs AS job ON job.id = edge.job_id
 WHERE job.blocked_by = 'flow'
   AND (edge.on_outcome <> 'success' OR (
        SELECT id FROM main.failed_jobs WHERE id = ended.value) IS NULL);

