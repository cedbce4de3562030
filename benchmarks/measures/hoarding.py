"""Whether a worker takes more than its share: ten jobs of a second, two workers with five slots each, one of
them just busy."""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks.bench import Bench
from benchmarks.measures import Figure, Measure, Medians, Target
from benchmarks.peers import find
from benchmarks.subject import NOOP

SLOTS = 5
SHORT = 1_000
LONG_MS = 1_000
WORKERS = "SELECT count(*) FROM sqlq_workers"


def hoarding(bench: Bench, database: str, case: str) -> dict[str, float]:
    """Measure how two workers share ten long jobs.

    The first worker has just run many short jobs, so its pace is high. The second has just started and is
    idle.
    """
    subject = find("sqlq")
    jobs = 2 * SLOTS
    with (
        bench.place(subject, database) as place,
        bench.workers(subject, place, concurrency=SLOTS, starts=jobs) as workers,
    ):
        bench.inside(subject, "fill", place.url, NOOP, SHORT)
        workers.wait_for(
            lambda: workers.calls.count() >= SHORT and place.number(subject.left) == 0,
            "through the short jobs",
        )
        known = place.number(WORKERS)
        with bench.workers(subject, place, concurrency=SLOTS, starts=jobs) as second:
            second.wait_for(lambda: place.number(WORKERS) > known, "up")
            time.sleep(bench.size.warm_seconds)
            before = workers.calls.count()
            begin = time.monotonic()
            bench.inside(subject, "fill", place.url, f"nap:{LONG_MS}", jobs)
            workers.wait_for(
                lambda: workers.calls.count() - before + second.calls.count() >= jobs, "started", look=0.002
            )
            ended = workers.wait_for(lambda: place.number(subject.left) == 0, "settled")
            share = second.calls.count()
            # the short jobs of the same numbers started earlier
            starts = [max(pair) for pair in zip(workers.calls.starts(), second.calls.starts(), strict=True)]
        bench.check(subject, place, None, SHORT + jobs)
    return {
        "second's share": share,
        "all done": ended - begin,
        "last start": (max(starts) - min(starts)) / 1e6,
    }


def _get(figure: str, database: str) -> Callable[[Medians], float | None]:
    return lambda medians: medians.get("hoarding", database, "sqlq", figure)


MEASURES = [
    Measure(
        "hoarding",
        "Ten jobs of a second and a second worker",
        f"Two workers with {SLOTS} slots each; the first has just run {SHORT:,} short jobs, the second is "
        "idle. Ten jobs of one second "
        "come at once: how many the second runs, and how long after the first of them the last one starts.",
        {
            "second's share": Figure("jobs"),
            "all done": Figure("s", more_is_better=False, decimals=2),
            "last start": Figure("ms", more_is_better=False),
        },
        hoarding,
        lambda bench, asked: [(database, "sqlq") for database in ("postgresql", "sqlite")],
        [
            target
            for database in ("postgresql", "sqlite")
            for target in (
                Target(
                    database, "sqlq", "jobs run by the second", _get("second's share", database), least=SLOTS
                ),
                Target(
                    database, "sqlq", "ms until the last one starts", _get("last start", database), most=250.0
                ),
            )
        ],
        subjects=False,
        smoke=lambda database, case: database == "postgresql",
    )
]
