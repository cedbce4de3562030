SELECT id FROM public.jobs
      WHERE id OPERATOR(pg_catalog.=) ANY(ARRAY(
            SELECT edge.job_id
              FROM (SELECT id FROM public.finished_jobs
                     WHERE finished_at OPERATOR(pg_catalog.>) (pg_catalog.statement_timestamp()
                                        OPERATOR(pg_catalog.-) (CAST(%(ms)s AS bigint) OPERATOR(pg_catalog.*) interval '1 millisecond'))
                       AND (flow_id IS NOT NULL OR limit_key IS NOT NULL) OFFSET 0) AS ended
             CROSS JOIN LATERAL (SELECT job_id FROM public.sqlq_edges
                                  WHERE depends_on OPERATOR(pg_catalog.=) ended.id
                                    AND (on_outcome OPERATOR(pg_catalog.<>) 'success' OR (
                                         SELECT id FROM public.failed_jobs WHERE id OPERATOR(pg_catalog.=) ended.id) IS NULL)
                                 OFFSET 0) AS edge))
        AND blocked_by OPERATOR(pg_catalog.=) 'flow' UNION 
     SELECT id FROM public.jobs
      WHERE id OPERATOR(pg_catalog.=) ANY(ARRAY(
            SELECT edge.job_id
              FROM (SELECT id FROM public.failed_jobs
                     WHERE failed_at OPERATOR(pg_catalog.>) (pg_catalog.statement_timestamp()
                                        OPERATOR(pg_catalog.-) (CAST(%(ms)s AS bigint) OPERATOR(pg_catalog.*) interval '1 millisecond'))
                       AND (flow_id IS NOT NULL OR limit_key IS NOT NULL) OFFSET 0) AS ended
             CROSS JOIN LATERAL (SELECT job_id FROM public.sqlq_edges
                                  WHERE depends_on OPERATOR(pg_catalog.=) ended.id
                                    AND (on_outcome OPERATOR(pg_catalog.<>) 'success' OR (
                                         SELECT id FROM public.failed_jobs WHERE id OPERATOR(pg_catalog.=) ended.id) IS NULL)
                                 OFFSET 0) AS edge))
        AND blocked_by OPERATOR(pg_catalog.=) 'flow';

