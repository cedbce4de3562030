SELECT id FROM public.jobs
      WHERE id OPERATOR(pg_catalog.=) ANY(ARRAY(
            SELECT edge.job_id
              FROM pg_catalog.unnest(CAST(%(ids)s AS bigint[])) AS ended (id)
             CROSS JOIN LATERAL (SELECT job_id FROM public.sqlq_edges
                                  WHERE depends_on OPERATOR(pg_catalog.=) ended.id
                                    AND (on_outcome OPERATOR(pg_catalog.<>) 'success' OR (
                                         SELECT id FROM public.failed_jobs WHERE id OPERATOR(pg_catalog.=) ended.id) IS NULL)
                                 OFFSET 0) AS edge))
        AND blocked_by OPERATOR(pg_catalog.=) 'flow';

