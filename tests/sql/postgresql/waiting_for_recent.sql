SELECT id FROM public.jobs
      WHERE id = ANY(ARRAY(
            SELECT edge.job_id
              FROM (SELECT id FROM public.finished_jobs
                     WHERE finished_at > statement_timestamp()
                                        - CAST(%(ms)s AS bigint) * interval '1 millisecond'
                       AND (flow_id IS NOT NULL OR limit_key IS NOT NULL) OFFSET 0) AS ended
             CROSS JOIN LATERAL (SELECT job_id FROM public.sqlq_edges
                                  WHERE depends_on = ended.id
                                    AND (on_outcome <> 'success' OR (
                                         SELECT id FROM public.failed_jobs WHERE id = ended.id) IS NULL)
                                 OFFSET 0) AS edge))
        AND blocked_by = 'flow' UNION 
     SELECT id FROM public.jobs
      WHERE id = ANY(ARRAY(
            SELECT edge.job_id
              FROM (SELECT id FROM public.failed_jobs
                     WHERE failed_at > statement_timestamp()
                                        - CAST(%(ms)s AS bigint) * interval '1 millisecond'
                       AND (flow_id IS NOT NULL OR limit_key IS NOT NULL) OFFSET 0) AS ended
             CROSS JOIN LATERAL (SELECT job_id FROM public.sqlq_edges
                                  WHERE depends_on = ended.id
                                    AND (on_outcome <> 'success' OR (
                                         SELECT id FROM public.failed_jobs WHERE id = ended.id) IS NULL)
                                 OFFSET 0) AS edge))
        AND blocked_by = 'flow';

