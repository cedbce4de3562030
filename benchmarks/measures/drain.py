"""How fast workers get through jobs that do nothing.

All jobs are there before the workers start. The clock starts when a tenth of the jobs are called, and stops
when none is left. It counts the jobs between. By its start, every subject has all of its processes up and
has found its pace. The counts are in memory (benchmarks.work). The jobs left are counted in the store each
20 ms.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.bench import Bench
from benchmarks.measures import EVERY_DATABASE, Figure, Measure, Medians, Target, ratio, subjects
from benchmarks.peers import find
from benchmarks.subject import NOOP


def drain(bench: Bench, database: str, name: str, concurrency: int, processes: int) -> dict[str, float]:
    subject = find(name)
    jobs = bench.size.jobs
    with bench.place(subject, database) as place:
        bench.inside(subject, "fill", place.url, NOOP, jobs)
        place.rest()
        with (
            bench.workers(subject, place, concurrency=concurrency, processes=processes) as workers,
            place.questions() as number,
        ):
            begun = workers.wait_for(
                lambda: workers.calls.count() >= jobs / 10, "through a tenth", look=0.002
            )
            before, processor = workers.calls.count(), workers.processor_seconds()
            if before > jobs / 2:  # so few jobs that they were through between two looks
                begun, before, processor = workers.calls.first(), 0, 0.0
            # huey takes jobs out of its store before it runs them, so the calls are counted, too
            ended = workers.wait_for(
                lambda: number(subject.left) == 0 and workers.calls.count() >= jobs, "drained"
            )
            processor = (workers.processor_seconds() - processor) / (jobs - before) * 1e6
            if subject.name == "sqlq-lines":
                workers.wait_for(lambda: workers.words().count(" finished in ") == jobs, "all lines there")
            bench.check(subject, place, workers, jobs)
            return {"rate": (jobs - before) / (ended - begun), "processor": processor}


def with_workers(concurrency: int, processes: int = 1) -> Callable[[Bench, str, str], dict[str, float]]:
    return lambda bench, database, name: drain(bench, database, name, concurrency, processes)


def _of(measure: str, database: str, case: str, other: str) -> Callable[[Medians], float | None]:
    return lambda medians: ratio(
        medians.get(measure, database, case, "rate"), medians.get(measure, database, other, "rate")
    )


def _of_one(database: str) -> Callable[[Medians], float | None]:
    return lambda medians: ratio(
        medians.get("drain-two", database, "sqlq", "rate"), medians.get("drain", database, "sqlq", "rate")
    )


def _of_best_peer(measure: str, case: str) -> Callable[[Medians], float | None]:
    return lambda medians: ratio(
        medians.get(measure, "postgresql", case, "rate"), medians.best_peer(measure, "postgresql", "rate")
    )


_WHAT = "{jobs} jobs that do nothing, all enqueued before the workers start; finished jobs are kept. "
RATE = {
    "rate": Figure("jobs/s"),
    "processor": Figure("µs/job", more_is_better=False, decimals=1),
}
"""`processor` is the time that the workers' processes have used of it, the database's not among them."""
TOGETHER = {"1 process": 1, "8 processes": 8, "24 processes": 24}
MEASURES = [
    Measure(
        "drain",
        "Drain, one process, concurrency 10",
        _WHAT
        + "The limits: a loop in one thread that claims 100 and moves 100, on sqlq's tables or lean ones.",
        RATE,
        with_workers(10),
        subjects(databases=EVERY_DATABASE),
        [
            *(
                Target(
                    "postgresql",
                    name,
                    "of the lean limit",
                    _of("drain", "postgresql", name, "lean"),
                    least=least,
                )
                for name, least in (("sqlq", 0.95), ("sqlq-async", 0.9))
            ),
            *(
                Target("postgresql", name, "of the best peer", _of_best_peer("drain", name), least=1.0)
                for name in ("sqlq", "sqlq-async")
            ),
            *(
                Target("sqlite", name, "of huey", _of("drain", "sqlite", name, "huey"), least=5.0)
                for name in ("sqlq", "sqlq-async")
            ),
            Target("sqlite", "sqlq", "of the lean limit", _of("drain", "sqlite", "sqlq", "lean"), least=0.5),
            *(
                Target("mariadb", "sqlq", f"of {other}", _of("drain", "mariadb", "sqlq", other), least=least)
                for other, least in (("lean", 0.8), ("django-tasks-db", 5.0))
            ),
        ],
        smoke=lambda database, case: (database, case) != ("sqlite", "sqlq-async"),
    ),
    Measure(
        "drain-lines",
        "Drain, with a line for each job",
        _WHAT + "As installed, where a line for each job goes to a file, and without these lines.",
        RATE,
        with_workers(10),
        subjects(ours=("sqlq", "sqlq-lines"), peers=False),
        [
            Target(
                database,
                "sqlq-lines",
                "of the rate without lines",
                _of("drain-lines", database, "sqlq-lines", "sqlq"),
                least=0.9,
            )
            for database in ("postgresql", "sqlite")
        ],
        smoke=lambda database, case: (database, case) == ("sqlite", "sqlq-lines"),
    ),
    Measure(
        "drain-100",
        "Drain, one process, concurrency 100",
        _WHAT,
        RATE,
        with_workers(100),
        subjects(databases=("postgresql",)),
        [
            Target("postgresql", name, "of the best peer", _of_best_peer("drain-100", name), least=1.0)
            for name in ("sqlq", "sqlq-async")
        ],
        smoke=lambda database, case: False,
    ),
    Measure(
        "drain-two",
        "Drain, two processes, concurrency 10 each",
        _WHAT,
        RATE,
        with_workers(10, processes=2),
        subjects(databases=("postgresql", "mariadb")),
        [
            *(
                Target(d, "sqlq", "of one process", _of_one(d), least=least)
                for d, least in (("postgresql", 1.0), ("mariadb", 1.4))
            ),
            Target(
                "postgresql",
                "sqlq",
                "of the lean limit",
                _of("drain-two", "postgresql", "sqlq", "lean"),
                least=1.0,
            ),
            Target("postgresql", "sqlq", "of the best peer", _of_best_peer("drain-two", "sqlq"), least=1.0),
        ],
        smoke=lambda database, case: case == "sqlq",
    ),
    Measure(
        "drain-together",
        "Drain, processes that start together",
        _WHAT + "One host (`sqlq work -p N`), concurrency 10 for each process.",
        RATE,
        lambda bench, database, case: drain(bench, database, "sqlq", 10, TOGETHER[case]),
        lambda bench, asked: [("postgresql", case) for case in TOGETHER],
        [
            Target(
                "postgresql",
                case,
                "of one process",
                _of("drain-together", "postgresql", case, "1 process"),
                least=least,
            )
            for case, least in (("8 processes", 1.1), ("24 processes", 0.9))
        ],
        subjects=False,
        smoke=lambda database, case: False,
    ),
]
