"""How long a prune takes with and without partitions of finished jobs, and what partitions cost a drain."""

from __future__ import annotations

import time
from functools import partial

from benchmarks.bench import Bench, WrongCountError
from benchmarks.measures import Figure, Measure, Medians, Target, ratio
from benchmarks.measures.growth import DAY_MS
from benchmarks.peers import find
from benchmarks.subject import NOOP

FINISHED = 10**7
DAYS = 8
PLAIN, PARTITIONED = "one table", "daily partitions"
PAST = """
DO $$
DECLARE today timestamp := date_trunc('day', now() AT TIME ZONE 'UTC');
BEGIN
    DROP TABLE finished_jobs_before;  -- which is empty, and takes all times until now
    FOR n IN -3..{days} LOOP
        EXECUTE format('CREATE TABLE %I PARTITION OF finished_jobs FOR VALUES FROM (%L) TO (%L)',
                       'finished_jobs_' || to_char(today - n * interval '1 day', 'YYYYMMDD'),
                       (today - n * interval '1 day') AT TIME ZONE 'UTC',
                       (today - (n - 1) * interval '1 day') AT TIME ZONE 'UTC');
    END LOOP;
END $$
"""


def history(bench: Bench, database: str, case: str) -> dict[str, float]:
    import sqlq
    from sqlq.worker.maintain.services import Prune

    subject, jobs = find("sqlq"), bench.size.jobs
    number = int(FINISHED * bench.size.growth)
    with bench.place(subject, database) as place:
        app = sqlq.App(place.url)
        if case == PARTITIONED:
            app.migrate(partition_finished="daily")
            place.rows(PAST.format(days=DAYS + 1))
        place.rows(
            f"""
            INSERT INTO finished_jobs (id, queue, task, payload, priority, attempts, max_attempts,
                   available_at, reserved_at, reserved_by, lease_token, unique_until, releases, created_at,
                   outcome, finished_at)
            SELECT 1000000000000 + n, 'default', 'benchmarks.tasks.noop', '{{"args": [' || n || ']}}', 0, 1,
                   5, ago, ago, 'earlier', 1, 'finish', 0, ago, 'completed', ago
              FROM (SELECT n, date_trunc('day', now()) - interval '25 hours'
                              - n * {(DAYS - 1) * DAY_MS // number} * interval '1 millisecond' AS ago
                      FROM generate_series(1, {number}) AS n) AS past"""
        )
        place.rest()
        bench.inside(subject, "fill", place.url, NOOP, jobs)
        with bench.workers(subject, place, options=("-q", "default")) as workers:
            ended = workers.wait_for(
                lambda: workers.calls.count() >= jobs, f"through {jobs} jobs", look=0.005
            )
            rate = workers.calls.count() / (ended - workers.calls.first())
        prune = Prune(app.database, DAY_MS)
        prune.run()  # its first turn only waits
        began = time.monotonic()
        while prune.run() < 1:
            pass
        took = time.monotonic() - began
        app.close()
        left = place.number("SELECT count(*) FROM finished_jobs WHERE id > 1000000000000")
        if left:
            raise WrongCountError(f"{left} of {number} finished jobs are left after the prune")
    return {"prune": took, "drain": rate}


def _over(figure: str, medians: Medians) -> float | None:
    one, other = (medians.get("history", "postgresql", case, figure) for case in (PARTITIONED, PLAIN))
    return ratio(one, other)


MEASURES = [
    Measure(
        "history",
        "History: finished jobs in one table, and in partitions",
        "{jobs} jobs drained by one process beside 10⁷ finished ones of the days before, and then the prune "
        "of those.",
        {"prune": Figure("s", more_is_better=False, decimals=1), "drain": Figure("jobs/s")},
        history,
        lambda bench, asked: [("postgresql", case) for case in (PLAIN, PARTITIONED)],
        [
            Target(
                "postgresql", PARTITIONED, "of the drain into one table", partial(_over, "drain"), least=0.9
            ),
            Target("postgresql", PARTITIONED, "of the prune of one table", partial(_over, "prune"), most=0.1),
        ],
        subjects=False,
        smoke=lambda database, case: True,
    )
]
