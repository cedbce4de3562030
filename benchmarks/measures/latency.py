"""How soon an idle worker picks a job up: from the return of the call that committed it to the first line of
its handler.

Both times are of the machine's one monotonic clock. Where the call takes longer to return than the worker to
start, the latency is negative; it is reported as it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import quantiles

from benchmarks.bench import Bench, Workers
from benchmarks.measures import EVERY_DATABASE, Figure, Measure, Medians, Target, ratio, subjects
from benchmarks.peers import find
from benchmarks.subject import NOOP

EVERY_MS = 20
LONE, LONE_MS = 20, 1_700


def latency(bench: Bench, database: str, name: str) -> dict[str, float]:
    return _picked_up(bench, database, name, bench.size.ticks, EVERY_MS)


def lone(bench: Bench, database: str, name: str) -> dict[str, float]:
    """Jobs that each meet a worker at rest."""
    return _picked_up(bench, database, name, min(LONE, bench.size.ticks), LONE_MS)


def _picked_up(bench: Bench, database: str, name: str, ticks: int, every_ms: int) -> dict[str, float]:
    subject = find(name)
    with bench.place(subject, database) as place, bench.workers(subject, place, starts=ticks) as workers:
        warmed = warm_up(bench, name, place.url, workers)
        moments = bench.inside(subject, "tick", place.url, NOOP, ticks, every_ms)
        workers.wait_for(lambda: workers.calls.count() >= ticks + warmed, "called for each job")
        workers.wait_for(lambda: place.number(subject.left) == 0, "settled")
        bench.check(subject, place, workers, ticks + warmed)
        return _figures(moments, workers.calls.starts())


def late(bench: Bench, database: str, name: str) -> dict[str, float]:
    """Jobs whose transaction commits long after the insert."""
    subject = find(name)
    jobs = min(bench.size.ticks, 150)  # each holds a connection of the server's 200
    with bench.place(subject, database) as place, bench.workers(subject, place, starts=jobs) as workers:
        warmed = warm_up(bench, name, place.url, workers)
        moments = bench.inside(
            subject, "late", place.url, jobs, int(bench.size.late_seconds * 1000), EVERY_MS
        )
        workers.wait_for(lambda: workers.calls.count() >= jobs + warmed, "called for each job")
        workers.wait_for(lambda: place.number(subject.left) == 0, "settled")
        bench.check(subject, place, workers, jobs + warmed)
        return _figures(moments, workers.calls.starts())


def warm_up(bench: Bench, name: str, url: str, workers: Workers) -> int:
    """Have a job run, so that the workers are up, then let them come to rest; their starts are overwritten
    later."""
    bench.inside(find(name), "one", url, NOOP, WARM_UP)
    workers.wait_for(lambda: workers.calls.count() >= WARM_UP, "up")
    time.sleep(bench.size.warm_seconds)
    return WARM_UP


WARM_UP = 20


def _figures(moments: list[list[int]], starts: list[int]) -> dict[str, float]:
    found = [(start - returned) / 1e6 for (_, returned), start in zip(moments, starts, strict=True)]
    whole = [(start - called) / 1e6 for (called, _), start in zip(moments, starts, strict=True)]
    return {
        "p50": quantile(found, 50),
        "p99": quantile(found, 99),
        "p50 from the call": quantile(whole, 50),
    }


def quantile(values: list[float], percent: int) -> float:
    return quantiles(values, n=100, method="inclusive")[percent - 1]


def _own(measure: str, database: str, figure: str) -> Callable[[Medians], float | None]:
    return lambda medians: medians.get(measure, database, "sqlq", figure)


def _of_limit(database: str, figure: str) -> Callable[[Medians], float | None]:
    return lambda medians: ratio(
        medians.get("latency", database, "sqlq", figure), medians.get("latency", database, "limit", figure)
    )


FIGURES = {
    "p50": Figure("ms", more_is_better=False, decimals=2),
    "p99": Figure("ms", more_is_better=False, decimals=2),
    "p50 from the call": Figure("ms", more_is_better=False, decimals=2),
}
MEASURES = [
    Measure(
        "latency",
        "Pick-up latency, idle worker",
        f"One job each {EVERY_MS} ms, one worker process, concurrency 10: from the return of the enqueue to "
        "the start of the handler. "
        "The limit: an INSERT that notifies in its own transaction, and a loop that waits for the "
        "notification.",
        FIGURES,
        latency,
        subjects(databases=EVERY_DATABASE),
        [
            *(
                Target(
                    "postgresql",
                    "sqlq",
                    f"of the limit's {figure}",
                    _of_limit("postgresql", figure),
                    most=most,
                )
                for figure, most in (("p50", 1.2), ("p99", 1.3))
            ),
            Target("sqlite", "sqlq", "ms p50", _own("latency", "sqlite", "p50"), most=2.0),
        ],
        smoke=lambda database, case: case == "sqlq" or (database, case) == ("postgresql", "limit"),
    ),
    Measure(
        "latency-lone",
        "Pick-up latency of lone jobs",
        f"{LONE} jobs, one each {LONE_MS / 1000:g} s, which another process of the machine enqueues.",
        FIGURES,
        lone,
        subjects(databases=EVERY_DATABASE, ours=("sqlq",), peers=False),
        [
            Target("mariadb", "sqlq", f"ms {figure}", _own("latency-lone", "mariadb", figure), most=most)
            for figure, most in (("p50", 20.0), ("p99", 60.0))
        ],
        smoke=lambda database, case: False,
    ),
    Measure(
        "latency-late",
        "Pick-up latency of jobs whose transaction commits late",
        "Jobs are inserted in transactions that stay open for a while (10 s in a full run); then one "
        "commits each 20 ms. From the "
        "return of the COMMIT to the start of the handler.",
        FIGURES,
        late,
        subjects(databases=("postgresql",), ours=("sqlq",), peers=False),
        [
            Target("postgresql", "sqlq", "ms p50", _own("latency-late", "postgresql", "p50"), most=1.5),
            Target("postgresql", "sqlq", "ms p99", _own("latency-late", "postgresql", "p99"), most=3.0),
        ],
    ),
]
