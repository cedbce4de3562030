SELECT id FROM public.jobs
      WHERE id = ANY(ARRAY(
            SELECT edge.job_id
              FROM unnest(CAST(%(ids)s AS bigint[])) AS ended (id)
             CROSS JOIN LATERAL (SELECT job_id FROM public.sqlq_edges
                                  WHERE depends_on = ended.id
                                    AND (on_outcome <> 'success' OR (
                                         SELECT id FROM public.failed_jobs WHERE id = ended.id) IS NULL)
                                 OFFSET 0) AS edge))
        AND blocked_by = 'flow';

