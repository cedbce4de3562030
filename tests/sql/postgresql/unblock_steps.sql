WITH step AS MATERIALIZED (SELECT pg_catalog.unnest(CAST(%(ids)s AS bigint[])) AS id),
quiet AS MATERIALIZED (
     SELECT step.id FROM step
      WHERE NOT EXISTS (
            SELECT 1
              FROM (SELECT depends_on FROM public.sqlq_edges
                     WHERE job_id OPERATOR(pg_catalog.=) step.id ORDER BY depends_on DESC OFFSET 0) AS edge
             WHERE (SELECT id FROM public.jobs WHERE id OPERATOR(pg_catalog.=) edge.depends_on) IS NOT NULL)),
verdict AS MATERIALIZED (
     SELECT quiet.id,
            pg_catalog.bool_or(failed IS NULL AND on_outcome OPERATOR(pg_catalog.<>) 'ended'
                    AND (on_outcome OPERATOR(pg_catalog.=) 'failure' OR finished IS NULL OR finished OPERATOR(pg_catalog.<>) 'completed')) AS never,
            pg_catalog.bool_or(failed IS NOT NULL AND on_outcome OPERATOR(pg_catalog.=) 'success') AS waits
       FROM quiet
      CROSS JOIN LATERAL (
            SELECT edge.on_outcome,
                   (SELECT outcome FROM public.finished_jobs WHERE id OPERATOR(pg_catalog.=) edge.depends_on) AS finished,
                   (SELECT id FROM public.failed_jobs WHERE id OPERATOR(pg_catalog.=) edge.depends_on) AS failed
              FROM public.sqlq_edges AS edge WHERE edge.job_id OPERATOR(pg_catalog.=) quiet.id OFFSET 0) AS before
      GROUP BY quiet.id),
locked AS MATERIALIZED (
     SELECT id FROM public.jobs
      WHERE id OPERATOR(pg_catalog.=) ANY(ARRAY(SELECT id FROM verdict WHERE never OR NOT waits))
        AND blocked_by OPERATOR(pg_catalog.=) 'flow' AND reserved_at IS NULL
        FOR UPDATE SKIP LOCKED),
free AS (
     UPDATE public.jobs
        SET available_at=CASE WHEN limit_key IS NULL THEN greatest(pg_catalog.statement_timestamp(), due_at)
                                ELSE available_at END,
            blocked_by=CASE WHEN limit_key IS NOT NULL THEN 'limit' END,
            due_at=CASE WHEN limit_key IS NOT NULL THEN greatest(pg_catalog.statement_timestamp(), due_at) END
      WHERE id OPERATOR(pg_catalog.=) ANY(ARRAY(SELECT locked.id FROM locked JOIN verdict ON verdict.id OPERATOR(pg_catalog.=) locked.id
                            WHERE NOT never))
  RETURNING id, limit_key),
woken AS (
     INSERT INTO public.sqlq_wakes (limit_key)
     SELECT DISTINCT limit_key FROM free WHERE limit_key IS NOT NULL),
gone AS (
     DELETE FROM public.jobs
      WHERE id OPERATOR(pg_catalog.=) ANY(ARRAY(SELECT locked.id FROM locked JOIN verdict ON verdict.id OPERATOR(pg_catalog.=) locked.id
                            WHERE never))
  RETURNING id, queue, task, payload, priority, attempts, max_attempts, available_at, reserved_at, reserved_by, lease_token, unique_key, unique_until, on_success, on_failure, timeout_ms, releases, errors, headers, label, group_key, backoff, retention_ms, progress, progress_of, progress_note, schedule, scheduled_for, cursor, start_by, flow_id, limit_key, replay_of, created_at),
cancelled AS (
     INSERT INTO public.finished_jobs (id, queue, task, payload, priority, attempts, max_attempts, available_at, reserved_at, reserved_by, lease_token, unique_key, unique_until, on_success, on_failure, timeout_ms, releases, errors, headers, label, group_key, backoff, retention_ms, progress, progress_of, progress_note, schedule, scheduled_for, cursor, start_by, flow_id, limit_key, replay_of, created_at, outcome, reason)
     SELECT id, queue, task, payload, priority, attempts, max_attempts, available_at, reserved_at, reserved_by, lease_token, unique_key, unique_until, on_success, on_failure, timeout_ms, releases, errors, headers, label, group_key, backoff, retention_ms, progress, progress_of, progress_note, schedule, scheduled_for, cursor, start_by, flow_id, limit_key, replay_of, created_at, 'cancelled', %(reason)s FROM gone
  RETURNING id)
SELECT id, 'free' FROM free
 UNION ALL
SELECT id, 'cancelled' FROM cancelled
 UNION ALL
SELECT pg_catalog.count(*), 'found' FROM step;

