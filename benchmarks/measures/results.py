"""How soon a waiter has the result of a job: from the settle, in which the job ends, to the return of
`app.result`.

The time of the settle is when its statement began, by the clock of the database, which is that of the
machine. So the figure includes the settle itself and its commit. On SQLite the time is a whole millisecond.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.bench import Bench
from benchmarks.measures import Figure, Measure, Medians, Target, subjects
from benchmarks.measures.latency import quantile, warm_up
from benchmarks.peers import find
from benchmarks.subject import NOOP

NAP_MS = 20


def results(bench: Bench, database: str, name: str) -> dict[str, float]:
    subject = find(name)
    jobs = bench.size.ticks
    with bench.place(subject, database) as place, bench.workers(subject, place) as workers:
        warm_up(bench, name, place.url, workers)
        found: list[float] = bench.inside(subject, "results", place.url, jobs, NAP_MS)
        return {"p50": quantile(found, 50), "p99": quantile(found, 99)}


def answers(bench: Bench, database: str, name: str) -> dict[str, float]:
    subject = find(name)
    with bench.place(subject, database) as place, bench.workers(subject, place):
        found: list[float] = bench.inside(subject, "answers", place.url, NOOP, bench.size.ticks)
        return {"p50": quantile(found, 50), "p99": quantile(found, 99)}


def _who_answers(bench: Bench, asked: tuple[str, ...]) -> list[tuple[str, str]]:
    names = [name for name in ("sqlq", "sqlq-async", *asked) if find(name).answers]
    return [(database, name) for name in names for database in find(name).databases]


def _own(database: str, figure: str) -> Callable[[Medians], float | None]:
    return lambda medians: medians.get("results", database, "sqlq", figure)


MEASURES = [
    Measure(
        "results",
        "From the settle of a job to who waits for its result",
        f"One job after the other, of {NAP_MS} ms each, one worker process; another process waits for each "
        "result. From the begin of the settle's statement to the return of `app.result`.",
        {
            "p50": Figure("ms", more_is_better=False, decimals=2),
            "p99": Figure("ms", more_is_better=False, decimals=2),
        },
        results,
        subjects(ours=("sqlq",), peers=False),
        [
            Target("postgresql", "sqlq", "ms p50", _own("postgresql", "p50"), most=20.0),
            Target("sqlite", "sqlq", "ms p50", _own("sqlite", "p50"), most=20.0),
        ],
    ),
    Measure(
        "answers",
        "A call through the queue",
        "One job that does nothing after the other, one worker process, concurrency 10: from the call that "
        "enqueues it to the return of the call that waits for its result.",
        {
            "p50": Figure("ms", more_is_better=False, decimals=2),
            "p99": Figure("ms", more_is_better=False, decimals=2),
        },
        answers,
        _who_answers,
    ),
]
