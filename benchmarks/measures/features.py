"""The costs of each feature that a job uses, beside a job that uses none."""

from __future__ import annotations

from benchmarks.bench import Bench
from benchmarks.features import FEATURES
from benchmarks.measures import Figure, Measure
from benchmarks.peers import find

PROCESSOR = Figure("µs", more_is_better=False, decimals=1)


def features(bench: Bench, database: str, case: str) -> dict[str, float]:
    subject = find("sqlq")
    with bench.place(subject, database) as place:
        found: dict[str, float] = bench.inside(
            subject, "feature", place.url, list(FEATURES).index(case), bench.size.jobs
        )
        return found


MEASURES = [
    Measure(
        "features",
        "What a feature costs",
        "Processor time of one process for each job, not that of the database: to enqueue it alone, to "
        "enqueue it among 1,000, and to run it with ten threads, from the claim to its outcome.",
        {"enqueue": PROCESSOR, "enqueue_many": PROCESSOR, "run": PROCESSOR},
        features,
        lambda bench, asked: [(database, case) for database in ("postgresql", "sqlite") for case in FEATURES],
        smoke=lambda database, case: case in ("plain", "on_success", "limit"),
        subjects=False,
    )
]
