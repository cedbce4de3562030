"""How late delayed jobs start that are due at times of their own, beside an otherwise idle worker."""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks.bench import Bench
from benchmarks.measures import Figure, Measure, Medians, Target, subjects
from benchmarks.measures.latency import quantile, warm_up
from benchmarks.peers import find

JOBS = 100


def moments(bench: Bench, database: str, name: str) -> dict[str, float]:
    subject = find(name)
    jobs = min(JOBS, bench.size.ticks)
    with bench.place(subject, database) as place, bench.workers(subject, place, starts=jobs) as workers:
        warmed = warm_up(bench, name, place.url, workers)
        due = bench.inside(subject, "at_moments", place.url, jobs, int(bench.size.late_seconds * 1000))
        begun, processor = time.monotonic(), workers.processor_seconds()
        ended = workers.wait_for(lambda: workers.calls.count() >= jobs + warmed, "called for each job")
        processor = (workers.processor_seconds() - processor) / (ended - begun)
        workers.wait_for(lambda: place.number(subject.left) == 0, "settled")
        bench.check(subject, place, workers, jobs + warmed)
        late = [(start - at) / 1e6 for at, start in zip(due, workers.calls.starts(), strict=True)]
    return {
        "earliest": min(late),
        "p50": quantile(late, 50),
        "p99": quantile(late, 99),
        "processor": processor * 100,
    }


def _own(database: str, figure: str) -> Callable[[Medians], float | None]:
    return lambda medians: medians.get("moments", database, "sqlq", figure)


MEASURES = [
    Measure(
        "moments",
        "Delayed jobs at moments of their own",
        f"{JOBS} jobs, each due at a random millisecond of the next ten seconds, beside one idle worker: "
        "from the moment at which a job is due to the first line of its handler, and what the processes "
        "of the worker use of one core meanwhile. Earlier than its moment is none.",
        {
            "earliest": Figure("ms", more_is_better=False, decimals=2),
            "p50": Figure("ms", more_is_better=False, decimals=2),
            "p99": Figure("ms", more_is_better=False, decimals=2),
            "processor": Figure("%", more_is_better=False, decimals=2),
        },
        moments,
        subjects(ours=("sqlq",), peers=False),
        [
            target
            for database in ("postgresql", "sqlite")
            for target in (
                Target(database, "sqlq", "ms late at the least", _own(database, "earliest"), least=0.0),
                Target(database, "sqlq", "ms p50", _own(database, "p50"), most=3.0),
                Target(database, "sqlq", "ms p99", _own(database, "p99"), most=15.0),
            )
        ],
    )
]
