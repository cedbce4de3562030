"""Flows, limits and schedules: what a step, a turn and a tick cost, and what ordinary jobs pay for those that
wait.

All jobs are there before the workers start, unless a measure has its own order. The clock runs from the first
call until none is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

from benchmarks.bench import Bench
from benchmarks.measures import Figure, Measure, Medians, Target, ratio
from benchmarks.measures.latency import quantile, warm_up
from benchmarks.peers import find
from benchmarks.servers import Place
from benchmarks.subject import NOOP
from benchmarks.work import TICKS

SLOTS = 20
LOOK = 0.002
HELD, HELD_MS = 5, 20
"""The slots of a limit, and how long each job holds one."""
LIMITED = {"SQLQ_BENCHMARK_LIMITS": "1"}
"""The App of the workers declares a limit, as one that enqueues limited jobs does."""
TENANTS, RATE, TICKED = 100, 1_000, 20
DATABASES = ("postgresql", "sqlite")


def _worked(
    bench: Bench, database: str, jobs: int, command: str, *numbers: int, name: str = "sqlq"
) -> dict[str, float]:
    """Enqueue by a command, and return how fast workers get through it."""
    subject = find(name)
    with bench.place(subject, database) as place:
        bench.inside(subject, command, place.url, *numbers)
        place.rest()
        with (
            bench.workers(subject, place, concurrency=SLOTS, more=LIMITED) as workers,
            place.questions() as number,
        ):
            ended = workers.wait_for(
                lambda: workers.calls.count() >= jobs and number(subject.left) == 0, "done", look=LOOK
            )
            seconds = ended - workers.calls.first()
            bench.check(subject, place, workers, jobs)
    return {"rate": jobs / seconds, "ms": seconds / jobs * 1000}


def flows(bench: Bench, database: str, case: str) -> dict[str, float]:
    steps, width, number = bench.size.jobs // 20, bench.size.jobs // 2, bench.size.jobs // 20
    if case == "chain":
        return _worked(bench, database, steps, "chain", steps)
    if case == "1 → many → 1":
        return _worked(bench, database, width + 2, "fan", width)
    return _worked(bench, database, number * 10, "flows", number, 10)


def chains(bench: Bench, database: str, name: str) -> dict[str, float]:
    steps = bench.size.jobs // 100
    return _worked(bench, database, steps, "chain", steps, name=name)


def _who_chains(bench: Bench, asked: tuple[str, ...]) -> list[tuple[str, str]]:
    return [(kind, name) for name in ("sqlq", *asked) if find(name).chains for kind in find(name).databases]


def limits(bench: Bench, database: str, case: str) -> dict[str, float]:
    jobs = bench.size.jobs // 4
    if case == "serial keys":
        return _worked(bench, database, jobs * 4, "in_order", jobs * 2, 2)
    return _worked(bench, database, jobs, "of_one_key", jobs, 10 if case.endswith("10 ms") else 0)


def slots(bench: Bench, database: str, case: str) -> dict[str, float]:
    """How busy three workers keep the slots of a limit."""
    subject, jobs = find("sqlq"), bench.size.jobs // 50
    with bench.place(subject, database) as place:
        bench.inside(subject, "of_one_key", place.url, jobs, HELD_MS, HELD)
        with bench.workers(subject, place, processes=3, more=LIMITED) as workers:
            workers.wait_for(lambda: workers.calls.count() >= HELD, "at work", look=LOOK)
            ended = workers.wait_for(lambda: workers.calls.count() >= jobs, "started", look=LOOK)
            seconds = ended - workers.calls.first()
            workers.wait_for(lambda: place.number(subject.left) == 0, "done")
            bench.check(subject, place, workers, jobs)
    return {"busy": (jobs - HELD) * HELD_MS / 1000 / HELD / seconds}


def rates(bench: Bench, database: str, case: str) -> dict[str, float]:
    subject, jobs = find("sqlq"), bench.size.jobs // 4
    with bench.place(subject, database) as place:
        bench.inside(subject, "at_a_rate", place.url, jobs, RATE)
        with bench.workers(subject, place, concurrency=SLOTS, more=LIMITED) as workers:
            workers.wait_for(lambda: place.number(subject.left) == 0, "done")
            bench.check(subject, place, workers, jobs)
        granted = sorted(_moments(place, "available_at"))
    gaps = [later - earlier for earlier, later in pairwise(granted)]
    most = max(sum(at <= other < at + 1_000 for other in granted) for at in granted[:: max(1, jobs // 100)])
    return {
        "rate": (jobs - 1) / max(granted[-1] - granted[0], 1) * 1000,
        "most": most,
        "closest": min(gaps),
    }


def fairness(bench: Bench, database: str, case: str) -> dict[str, float]:
    """A newcomer's first job, behind one tenant's many."""
    subject, many = find("sqlq"), max(200, int(100_000 * bench.size.growth))
    windows = int(case == "window")
    with bench.place(subject, database) as place:
        bench.inside(subject, "of_tenants", place.url, TENANTS, 1, many, windows)
        with bench.workers(subject, place, concurrency=SLOTS, starts=TENANTS, more=LIMITED) as workers:
            workers.wait_for(lambda: workers.calls.count() >= 10, "at work", look=LOOK)
            moment = bench.inside(subject, "of_tenants", place.url, 0, TENANTS, 1, windows)
            workers.wait_for(lambda: all(workers.calls.starts()), "all newcomers called")
            late = [(start - moment) / 1e6 for start in workers.calls.starts()]
    return {"p50": quantile(late, 50), "p99": quantile(late, 99)}


def ticks(bench: Bench, database: str, case: str) -> dict[str, float]:
    subject, number = find("sqlq"), max(2, bench.size.ticks // 50)
    with bench.place(subject, database) as place, bench.workers(subject, place) as workers:
        jobs = warm_up(bench, "sqlq", place.url, workers) + number * TICKED
        bench.inside(subject, "schedules", place.url, number, TICKED)
        workers.wait_for(lambda: workers.calls.count() >= jobs, "ticked")
        workers.wait_for(lambda: place.number(subject.left) == 0, "settled")
        bench.check(subject, place, workers, jobs)
        late = _moments(place, "reserved_at", "scheduled_for", "scheduled_for IS NOT NULL")
    return {"p50": quantile(late, 50), "p99": quantile(late, 99)}


def each_second(bench: Bench, database: str, name: str) -> dict[str, float]:
    """A job each full second, by whatever has schedules."""
    subject = find(name)
    with (
        bench.place(subject, database) as place,
        bench.workers(subject, place, starts=TICKS, more={"SQLQ_BENCHMARK_TICKS": "1"}) as workers,
    ):
        if name == "sqlq":
            bench.inside(subject, "each_second", place.url)
        # those of the start are noted over
        workers.wait_for(lambda: workers.calls.count() >= TICKS + 5, "ticked")
        clock = time.time_ns() - time.monotonic_ns()
        late = [(start + clock) % 1_000_000_000 / 1e6 for start in workers.calls.starts()]
    return {"p50": quantile(late, 50), "p99": quantile(late, 99)}


def _who_ticks(bench: Bench, asked: tuple[str, ...]) -> list[tuple[str, str]]:
    return [(kind, name) for name in ("sqlq", *asked) if find(name).ticks for kind in find(name).databases]


def sweeps(bench: Bench, database: str, case: str) -> dict[str, float]:
    subject = find("sqlq")
    with bench.place(subject, database) as place:
        if case != "nothing":
            bench.inside(subject, "blocked", place.url, max(100, int(100_000 * bench.size.growth)))
        place.rest()
        found: dict[str, float] = bench.inside(subject, "sweeps", place.url, 3)
    return found


def beside(bench: Bench, database: str, case: str) -> dict[str, float]:
    """Ordinary jobs, with and without many that wait."""
    subject, jobs = find("sqlq"), bench.size.jobs
    with bench.place(subject, database) as place:
        waiting = 0 if case == "nothing" else max(100, int(100_000 * bench.size.growth))
        if waiting:
            bench.inside(subject, "blocked", place.url, waiting)
        bench.inside(subject, "fill", place.url, NOOP, jobs)
        place.rest()
        with bench.workers(subject, place) as workers:
            begun = workers.wait_for(lambda: workers.calls.count() >= jobs / 10, "through a tenth", look=LOOK)
            before = workers.calls.count()
            if before > jobs / 2:  # so few jobs that they were through between two looks
                begun, before = workers.calls.first(), 0
            ended = workers.wait_for(lambda: workers.calls.count() >= jobs, "done", look=LOOK)
        return {"rate": (jobs - before) / (ended - begun)}


def _moments(place: Place, column: str, since: str | None = None, which: str = "true") -> list[float]:
    """Return a time of finished jobs in ms, or how long after another one it was."""
    if place.kind == "sqlite":
        value = column if since is None else f"{column} - {since}"
    else:
        value = f"extract(epoch FROM {column}{'' if since is None else f' - {since}'}) * 1000"
    return [float(ms) for (ms,) in place.rows(f"SELECT {value} FROM finished_jobs WHERE {which}")]


def _cases(*names: str) -> Callable[[Bench, tuple[str, ...]], list[tuple[str, str]]]:
    return lambda bench, asked: [(database, name) for database in DATABASES for name in names]


def _of(measure: str, database: str, case: str, figure: str) -> Callable[[Medians], float | None]:
    return lambda medians: medians.get(measure, database, case, figure)


def _against(measure: str, database: str, case: str) -> Callable[[Medians], float | None]:
    return lambda m: ratio(
        m.get(measure, database, case, "rate"), m.get(measure, database, "nothing", "rate")
    )


_RATE, _MS = Figure("jobs/s"), Figure("ms", more_is_better=False, decimals=2)
_NAMES = ("chain", "1 → many → 1", "flows of 10")
MEASURES = [
    Measure(
        "flows",
        "Flows: chains, a fan and its join",
        "No-op steps, one process, concurrency 20: a chain of a twentieth of {jobs}, one step before and one "
        "behind half of {jobs}, and as many chains of ten.",
        {"ms": Figure("ms a step", more_is_better=False, decimals=2), "rate": Figure("steps/s")},
        flows,
        _cases(*_NAMES),
        [
            Target("postgresql", "chain", "ms a step", _of("flows", "postgresql", "chain", "ms"), most=4.0),
            Target("sqlite", "chain", "ms a step", _of("flows", "sqlite", "chain", "ms"), most=1.5),
        ],
        subjects=False,
        smoke=lambda database, case: case == "chain",
    ),
    Measure(
        "chains",
        "A chain, beside peers that have one",
        "A hundredth of {jobs} jobs that do nothing, of which each starts when the one before has succeeded; "
        "one process, concurrency 20.",
        {"ms": Figure("ms a step", more_is_better=False, decimals=2), "rate": Figure("steps/s")},
        chains,
        _who_chains,
        smoke=lambda database, case: False,
    ),
    Measure(
        "limits",
        "Limits: one key, many keys",
        "A quarter of {jobs} of one key of which ten run at a time, and two jobs each of half of "
        "{jobs} keys that run "
        "in order; one process, concurrency 20.",
        {"rate": _RATE, "ms": Figure("ms a job", more_is_better=False, decimals=2)},
        limits,
        _cases("ten of a key, 0 ms", "ten of a key, 10 ms", "serial keys"),
        subjects=False,
        smoke=lambda database, case: case == "ten of a key, 0 ms",
    ),
    Measure(
        "slots",
        "Limits: busy slots",
        f"Jobs of one key that take {HELD_MS} ms, of which {HELD} may run, and three worker processes: the "
        "share of the time in which a slot has a job.",
        {"busy": Figure("of the time", decimals=2)},
        slots,
        _cases("five of a key"),
        [
            Target(
                database, "five of a key", "busy", _of("slots", database, "five of a key", "busy"), least=0.9
            )
            for database in DATABASES
        ],
        subjects=False,
        smoke=lambda database, case: False,
    ),
    Measure(
        "rates",
        "Limits: a rate of 1,000 a second",
        "When a quarter of {jobs} jobs may start, by the database: their rate, the most in any second, "
        "and how far "
        "the closest two are apart.",
        {
            "rate": _RATE,
            "most": Figure("in a second", more_is_better=False),
            "closest": Figure("ms", decimals=2),
        },
        rates,
        _cases("1,000/1s"),
        [
            Target(
                database, "1,000/1s", "in any second", _of("rates", database, "1,000/1s", "most"), most=1_000
            )
            for database in DATABASES
        ],
        subjects=False,
        smoke=lambda database, case: False,
    ),
    Measure(
        "fairness",
        "Limits: newcomers behind one tenant's 100,000 jobs",
        "100 tenants enqueue one job each while one has 100,000: from their enqueue to the first line "
        "of the handler, "
        "with a window of ten jobs for each tenant and without.",
        {"p50": _MS, "p99": _MS},
        fairness,
        _cases("window", "none"),
        subjects=False,
        smoke=lambda database, case: False,
        rounds=1,
    ),
    Measure(
        "ticks",
        "Schedules: how late a tick's job starts",
        "Ten schedules that are due in the same moment of each second, beside one idle worker: from the "
        "moment to the claim of its job.",
        {"p50": _MS, "p99": _MS},
        ticks,
        _cases("each second"),
        [
            Target(database, "each second", "ms p99", _of("ticks", database, "each second", "p99"), most=50.0)
            for database in DATABASES
        ],
        subjects=False,
        smoke=lambda database, case: False,
    ),
    Measure(
        "each-second",
        "Schedules: a job each full second, beside peers that have schedules",
        "One schedule and one idle worker: from the full second to the first line of the handler. pgqueuer "
        "runs what is scheduled without making a job of it.",
        {"p50": _MS, "p99": _MS},
        each_second,
        _who_ticks,
        smoke=lambda database, case: False,
    ),
    Measure(
        "sweeps",
        "Sweeps beside open edges",
        "What the sweeps take: over what ended lately, over all steps of all flows, over the lines.",
        {"recent": _MS, "all": _MS, "lines": _MS},
        sweeps,
        _cases("nothing", "10⁵ open edges"),
        subjects=False,
        smoke=lambda database, case: False,
    ),
    Measure(
        "beside-blocked",
        "Ordinary jobs beside 100,000 that wait",
        "{jobs} jobs that do nothing, drained beside 100,000 blocked steps and without them.",
        {"rate": _RATE},
        beside,
        _cases("nothing", "10⁵ blocked"),
        [
            Target(
                database,
                "10⁵ blocked",
                "of the rate without",
                _against("beside-blocked", database, "10⁵ blocked"),
                least=0.9,
            )
            for database in DATABASES
        ],
        subjects=False,
        smoke=lambda database, case: False,
    ),
]
