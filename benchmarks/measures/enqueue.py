"""How long enqueuing takes: alone, in the caller's transaction, many at once, and from several processes with
wake-ups."""

from __future__ import annotations

import json
from collections.abc import Callable

from benchmarks.bench import Bench, WrongCountError
from benchmarks.inside import WARM_UP
from benchmarks.measures import EVERY_DATABASE, Figure, Measure, Medians, Target, ratio, subjects
from benchmarks.peers import find
from benchmarks.servers import Place
from benchmarks.subject import NOOP

MANY = 1_000
RATE = {"rate": Figure("jobs/s")}


def one(bench: Bench, database: str, name: str) -> dict[str, float]:
    subject = find(name)
    jobs = bench.size.enqueued
    with bench.place(subject, database) as place:
        seconds = bench.inside(subject, "one", place.url, NOOP, jobs)
        _check_enqueued(name, place, jobs)
        return {"rate": (jobs - WARM_UP) / seconds}


def many(bench: Bench, database: str, name: str) -> dict[str, float]:
    subject = find(name)
    jobs = max(bench.size.jobs, 3 * MANY)
    with bench.place(subject, database) as place:
        seconds = bench.inside(subject, "many", place.url, NOOP, jobs, MANY)
        _check_enqueued(name, place, jobs)
        return {"rate": (jobs - MANY) / seconds}


def _check_enqueued(name: str, place: Place, jobs: int) -> None:
    """Raise `WrongCountError` unless the store holds so many jobs."""
    found = place.number(find(name).enqueued)
    if found != jobs:
        raise WrongCountError(f"{found} jobs are there instead of {jobs}")


def session(bench: Bench, database: str, name: str) -> dict[str, float]:
    subject = find(name)
    jobs = max(bench.size.enqueued, 400)
    with bench.place(subject, database) as place:
        found: dict[str, float] = bench.inside(subject, "session", place.url, jobs)
        _check_enqueued(name, place, (jobs // 200 + 1) * 200)
        return found


def producers(bench: Bench, database: str, case: str) -> dict[str, float]:
    """Enqueue from several processes at once, beside a worker that sleeps because it serves another queue."""
    number, wake_ups = int(case.split(maxsplit=1)[0]), case.endswith("on")
    subject = find("sqlq")
    jobs = bench.size.enqueued
    with bench.place(subject, database) as place:
        with bench.workers(subject, place, options=("-q", "another")):
            started = [
                bench.started_inside(subject, "produce", place.url, jobs, int(wake_ups))
                for _ in range(number)
            ]
            try:
                for process in started:
                    assert process.stdout is not None
                    process.stdout.readline()  # it is ready
                for process in started:
                    assert process.stdin is not None
                    process.stdin.write("go\n")
                    process.stdin.flush()
                seconds = [
                    json.loads(process.communicate(timeout=bench.patience)[0].splitlines()[-1])
                    for process in started
                ]
            finally:
                for process in started:
                    process.kill()
        _check_enqueued("sqlq", place, (jobs + 20) * number)
        return {"rate": sum(jobs / took for took in seconds)}


def _producers(bench: Bench, asked: tuple[str, ...]) -> list[tuple[str, str]]:
    return [
        ("postgresql", f"{n} producer{'s' if n > 1 else ''}, wake-ups {w}")
        for n in bench.size.producers
        for w in ("off", "on")
    ]


def _of_limit(
    measure: str, database: str, figure: str = "rate", limit: str = "lean"
) -> Callable[[Medians], float | None]:
    def value(medians: Medians) -> float | None:
        return ratio(
            medians.get(measure, database, "sqlq", figure), medians.get(measure, database, limit, figure)
        )

    return value


def _wake_ups(number: int) -> Target:
    name = f"{number} producer{'s' if number > 1 else ''}, wake-ups "

    def value(medians: Medians) -> float | None:
        rate = {w: medians.get("producers", "postgresql", name + w, "rate") for w in ("on", "off")}
        return ratio(rate["on"], rate["off"])

    return Target("postgresql", name + "on", "of the rate with wake-ups off", value, least=0.9)


MEASURES = [
    Measure(
        "enqueue-one",
        "Enqueue, one job per transaction",
        "One process enqueues jobs one after the other, each committed when the call returns. The limits: "
        "one autocommitted INSERT … RETURNING id, into sqlq's table or a lean one. On SQLite each commit is "
        "flushed to disk (synchronous FULL).",
        RATE,
        one,
        subjects(databases=EVERY_DATABASE, ours=("sqlq", "limit", "lean")),
        [
            *(
                Target(d, "sqlq", "of the lean limit", _of_limit("enqueue-one", d), least=0.85)
                for d in ("postgresql", "sqlite")
            ),
            Target(
                "sqlite",
                "sqlq",
                "of huey",
                lambda m: ratio(
                    m.get("enqueue-one", "sqlite", "sqlq", "rate"),
                    m.get("enqueue-one", "sqlite", "huey", "rate"),
                ),
                least=1.0,
            ),
            Target("mariadb", "sqlq", "of the lean limit", _of_limit("enqueue-one", "mariadb"), least=0.7),
        ],
    ),
    Measure(
        "enqueue-session",
        "Enqueue in the caller's open transaction",
        "Time for one call inside a transaction of 100, BEGIN and COMMIT not counted, through a Session and "
        "through a Connection. "
        "The limits: the caller's own Core INSERT of such a row, or of a lean one.",
        {
            "session": Figure("µs", more_is_better=False, decimals=1),
            "connection": Figure("µs", more_is_better=False, decimals=1),
        },
        session,
        subjects(databases=EVERY_DATABASE, ours=("sqlq", "limit", "lean"), peers=False),
        [
            Target(
                database,
                "sqlq",
                f"of the caller's own INSERT ({figure})",
                _of_limit("enqueue-session", database, figure, "limit"),
                most=1.05,
            )
            for database in EVERY_DATABASE
            for figure in ("session", "connection")
        ],
    ),
    Measure(
        "enqueue-many",
        f"Enqueue {MANY:,} jobs at once",
        f"One process enqueues lots of {MANY:,}, each in a transaction of its own, with the ids returned "
        "where the API does that. The "
        f"limits: one multi-row INSERT … RETURNING id per {MANY:,}, the JSON made in the loop.",
        RATE,
        many,
        subjects(databases=EVERY_DATABASE, ours=("sqlq", "limit", "lean"), many=True),
        [
            Target(d, "sqlq", "of the lean limit", _of_limit("enqueue-many", d), least=least)
            for d, least in (("postgresql", 0.95), ("mariadb", 0.7), ("sqlite", 0.5))
        ],
        smoke=lambda database, case: (database, case) == ("postgresql", "sqlq"),
    ),
    Measure(
        "producers",
        "Enqueue from several processes, with and without wake-ups",
        "Processes that enqueue one by one, all at the same time, beside a worker that listens. Their rates "
        "are added up.",
        RATE,
        producers,
        _producers,
        [_wake_ups(n) for n in (1, 2, 4, 8)],
        subjects=False,
    ),
]
