WITH RECURSIVE names (queue) AS (
      SELECT min(queue) FROM main.jobs WHERE reserved_at IS NULL
      UNION ALL
      SELECT (SELECT min(j.queue) FROM main.jobs j WHERE j.reserved_at IS NULL AND j.queue > names.queue)
        FROM names WHERE names.queue IS NOT NULL),
levels (queue, priority, available_at) AS (
      SELECT j.queue, j.priority, j.available_at FROM names JOIN main.jobs j ON j.id = (
             SELECT id FROM main.jobs WHERE queue = names.queue AND reserved_at IS NULL
              ORDER BY priority DESC, available_at, id LIMIT 1)
      UNION ALL
      SELECT j.queue, j.priority, j.available_at FROM levels JOIN main.jobs j ON j.id = (
             SELECT id FROM main.jobs WHERE queue = levels.queue AND reserved_at IS NULL
                AND priority < levels.priority
              ORDER BY priority DESC, available_at, id LIMIT 1))
SELECT queue, min(available_at) - CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) FROM levels
 WHERE queue NOT IN (SELECT queue FROM main.sqlq_queues WHERE paused_at IS NOT NULL)
 GROUP BY queue;

