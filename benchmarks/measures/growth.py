"""The speed of the same drain and the same claims as the tables grow.

The rate counts the handler's calls, from the first to that of the last job measured; which rows are beside
them differs, nothing else. Claims are timed alone: 10 jobs at a time, each settled before the next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import quantiles

from benchmarks.bench import Bench, WrongCountError
from benchmarks.measures import EVERY_DATABASE, Figure, Measure, Medians, Target, ratio
from benchmarks.peers import find
from benchmarks.servers import Place

CLAIM = 10
DAY_MS = 86_400_000
EMPTY = "nothing"


@dataclass(frozen=True)
class Beside:
    """The rows in the tables beside the measured jobs."""

    available: int = 0
    scheduled: int = 0
    elsewhere: int = 0
    finished: int = 0
    failed: int = 0
    queues: int = 1
    """Over how many queues the measured jobs are spread."""


CASES = {
    EMPTY: Beside(),
    "10⁴ available": Beside(available=10**4),
    "10⁵ available": Beside(available=10**5),
    "10⁶ available": Beside(available=10**6),
    "3·10⁶ available": Beside(available=3 * 10**6),
    "10⁶ scheduled, higher priority": Beside(scheduled=10**6),
    "10⁶ in other queues": Beside(elsewhere=10**6),
    "100 queues": Beside(queues=100),
    "10⁷ finished": Beside(finished=10**7),
    "10⁵ failed": Beside(failed=10**5),
}


SMOKE = {
    "postgresql": ("10⁶ scheduled, higher priority", "100 queues", "10⁷ finished"),
    "sqlite": ("10⁴ available",),
    "mariadb": ("10⁶ scheduled, higher priority", "100 queues", "10⁷ finished"),
}


def growth(bench: Bench, database: str, case: str) -> dict[str, float]:
    subject = find("sqlq")
    beside, jobs = CASES[case], bench.size.jobs
    claims = max(30, jobs // 50)
    with bench.place(subject, database) as place:
        finished = fill(place, beside, bench.size.growth, jobs, claims * CLAIM)
        place.rest()
        took = bench.inside(subject, "claims", place.url, claims, CLAIM)
        options = () if beside.queues > 1 else ("-q", "default")
        with bench.workers(subject, place, options=options) as workers:
            ended = workers.wait_for(
                lambda: workers.calls.count() >= jobs, f"through {jobs} jobs", look=0.005
            )
            rate = workers.calls.count() / (ended - workers.calls.first())
        settled = place.number(subject.settled) - finished - claims * CLAIM
        if settled != workers.calls.count():
            raise WrongCountError(
                f"{settled} jobs are settled, the handler ran {workers.calls.count()} times"
            )
        p = quantiles(took, n=100, method="inclusive")
        return {"rate": rate, "claim p50": p[49], "claim p99": p[98]}


def fill(place: Place, beside: Beside, factor: float, jobs: int, claims: int) -> int:
    """Fill the tables; return how many finished jobs are there already."""
    place.rows(
        _insert(
            place,
            jobs + claims,
            queue="'default'" if beside.queues == 1 else f"'queue-' || (n % {beside.queues})",
        )
    )
    if beside.queues > 1:  # the claims that are timed alone are of one queue
        place.rows(_insert(place, claims))
    for number, options in (
        (beside.available, {}),
        (beside.scheduled, {"priority": "10", "due_ms": DAY_MS}),
        (beside.elsewhere, {"queue": "'other-' || (n % 10)"}),
    ):
        if number:
            place.rows(_insert(place, int(number * factor), **options))
    finished, failed = int(beside.finished * factor), int(beside.failed * factor)
    if finished:
        place.rows(
            _insert_ended(
                place, "finished_jobs", "finished_at", "outcome, result", "'finished', NULL", finished
            )
        )
    if failed:
        place.rows(
            _insert_ended(
                place, "failed_jobs", "failed_at", "reason, message", "'error', 'it failed'", failed
            )
        )
    return finished


def _insert(
    place: Place, number: int, *, queue: str = "'default'", priority: str = "0", due_ms: int = 0
) -> str:
    due = _moment(place, f"{due_ms}")
    return f"""
        INSERT INTO jobs (queue, task, payload, priority, available_at)
        SELECT {queue}, 'benchmarks.tasks.noop', '{{"args": [' || n || ']}}', {priority}, {due}
          FROM {_numbers(place, number)}"""


def _insert_ended(place: Place, table: str, moment: str, columns: str, values: str, number: int) -> str:
    """Jobs that ended within the last days, none of them old enough to be pruned."""
    ago = _moment(place, f"-1 * (n % {5 * DAY_MS})")
    return f"""
        INSERT INTO {table} (id, queue, task, payload, priority, attempts, max_attempts, available_at,
                             reserved_at, reserved_by,
                             lease_token, unique_until, releases, created_at, {columns}, {moment})
        SELECT 1000000000000 + n, 'default', 'benchmarks.tasks.noop', '{{"args": [' || n || ']}}', 0, 1, 5,
               {ago}, {ago}, 'earlier', 1,
               'finish', 0, {ago}, {values}, {ago}
          FROM {_numbers(place, number)}"""


def _numbers(place: Place, number: int) -> str:
    if place.kind == "sqlite":
        return (
            f"(WITH RECURSIVE up (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM up WHERE n < {number}) "
            "SELECT n FROM up)"
        )
    if place.kind == "mariadb":
        return f"(SELECT CAST(seq AS SIGNED) AS n FROM seq_1_to_{number}) AS numbers"
    return f"generate_series(1, {number}) AS n"


def _moment(place: Place, ms: str) -> str:
    if place.kind == "sqlite":
        return f"CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) + {ms}"
    if place.kind == "mariadb":
        return f"UTC_TIMESTAMP(6) + INTERVAL ({ms}) * 1000 MICROSECOND"
    return f"statement_timestamp() + ({ms}) * interval '1 millisecond'"


def _against_empty(database: str, case: str, figure: str) -> Callable[[Medians], float | None]:
    return lambda medians: ratio(
        medians.get("growth", database, case, figure), medians.get("growth", database, EMPTY, figure)
    )


MEASURES = [
    Measure(
        "growth",
        "How it grows: drain and claim beside other rows",
        "{jobs} jobs drained by one process, concurrency 10, and claims of 10 timed alone, beside the rows "
        "named.",
        {
            "rate": Figure("jobs/s"),
            "claim p50": Figure("ms", more_is_better=False, decimals=2),
            "claim p99": Figure("ms", more_is_better=False, decimals=2),
        },
        growth,
        lambda bench, asked: [(database, case) for database in EVERY_DATABASE for case in CASES],
        [
            target
            for database in EVERY_DATABASE
            for case in CASES
            if case != EMPTY
            for target in (
                Target(
                    database, case, "of the empty drain", _against_empty(database, case, "rate"), least=0.8
                ),
                Target(
                    database,
                    case,
                    "of the empty claim p99",
                    _against_empty(database, case, "claim p99"),
                    most=2.0,
                ),
            )
        ],
        subjects=False,
        smoke=lambda database, case: case in SMOKE[database],
    )
]
