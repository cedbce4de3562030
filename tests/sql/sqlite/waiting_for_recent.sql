SELECT job.id
  FROM main.finished_jobs AS ended
 CROSS JOIN main.sqlq_edges AS edge ON edge.depends_on = ended.id
 CROSS JOIN main.jobs AS job ON job.id = edge.job_id
 WHERE ended.finished_at > CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) - ? AND (ended.flow_id IS NOT NULL OR ended.limit_key IS NOT NULL) AND job.blocked_by = 'flow'
 UNION
SELECT job.id
  FROM main.failed_jobs AS ended
 CROSS JOIN main.sqlq_edges AS edge ON edge.depends_on = ended.id
 CROSS JOIN main.jobs AS job ON job.id = edge.job_id
 WHERE ended.failed_at > CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) - ? AND (ended.flow_id IS NOT NULL OR ended.limit_key IS NOT NULL) AND job.blocked_by = 'flow' AND edge.on_outcome <> 'success';

