"""The share of a slot's time that sqlq adds to jobs that take a while."""

from __future__ import annotations

from benchmarks.bench import Bench
from benchmarks.measures import Figure, Measure
from benchmarks.peers import find

MOST_JOBS = 10_000
CONCURRENCIES = (1, 10, 50)


def overhead(bench: Bench, database: str, case: str) -> dict[str, float]:
    """All slots times the time from the first call to the last settled job, divided by the jobs, less the
    time each sleeps."""
    name, ms, concurrency = _read(case)
    subject = find(name)
    rounds = max(3, min(int(bench.size.nap_seconds * 1000) // ms, MOST_JOBS // concurrency))
    jobs = concurrency * rounds
    with bench.place(subject, database) as place:
        bench.inside(subject, "fill", place.url, f"nap:{ms}", jobs)
        place.rest()
        with bench.workers(subject, place, concurrency=concurrency) as workers, place.questions() as number:
            ended = workers.wait_for(lambda: number(subject.left) == 0, "drained", look=0.005)
            elapsed_ms = (ended - workers.calls.first()) * 1000
            bench.check(subject, place, workers, jobs)
    each = elapsed_ms / rounds
    return {"overhead": each - ms, "share": (each - ms) / each * 100}


def _case(name: str, ms: int, concurrency: int) -> str:
    return f"{name}, {ms} ms, concurrency {concurrency}"


def _read(case: str) -> tuple[str, int, int]:
    name, duration, concurrency = case.split(", ")
    return name, int(duration.split()[0]), int(concurrency.split()[1])


MEASURES = [
    Measure(
        "overhead",
        "What is added to jobs that take a while",
        "Jobs that sleep; the slots' time from the first call to the last settled job, divided by the jobs, "
        "less the sleep. Sleeping "
        "longer than asked for (about 0.1 ms here and now) is part of it.",
        {
            "overhead": Figure("ms", more_is_better=False, decimals=2),
            "share": Figure("%", more_is_better=False, decimals=1),
        },
        overhead,
        lambda bench, asked: [
            ("postgresql", _case(name, ms, concurrency))
            for ms in bench.size.naps
            for concurrency in CONCURRENCIES
            for name in ("sqlq", "sqlq-async")
        ],
        subjects=False,
        smoke=lambda database, case: case == "sqlq, 10 ms, concurrency 10",
    )
]
