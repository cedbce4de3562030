WITH RECURSIVE
names (queue, place) AS (
      SELECT queue, max(place) FROM (
             SELECT value AS queue, NULL AS place FROM json_each(?))
       GROUP BY queue),
levels (queue, place, priority, available_at) AS (
      SELECT j.queue, names.place, j.priority, j.available_at FROM names JOIN main.jobs j ON j.id = (
             SELECT id FROM main.jobs WHERE queue = names.queue AND reserved_at IS NULL
              ORDER BY priority DESC, available_at, id LIMIT 1)
      UNION ALL
      SELECT j.queue, levels.place, j.priority, j.available_at FROM levels JOIN main.jobs j ON j.id = (
             SELECT id FROM main.jobs WHERE queue = levels.queue AND reserved_at IS NULL
                AND priority < levels.priority
              ORDER BY priority DESC, available_at, id LIMIT 1))
SELECT queue,
       CASE WHEN queue NOT IN (SELECT queue FROM main.sqlq_queues WHERE paused_at IS NOT NULL)
            THEN min(available_at) - CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) END,
       max(place)
  FROM levels
 GROUP BY queue;

