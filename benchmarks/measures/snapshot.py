"""A transaction that holds an old snapshot keeps dead rows from being vacuumed: what becomes of speed while
jobs pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import quantiles

import psycopg

from benchmarks.bench import Bench, Workers, WrongCountError
from benchmarks.measures import Figure, Measure, Medians, Target, ratio
from benchmarks.peers import find
from benchmarks.servers import Place, mariadb_connection
from benchmarks.subject import NOOP

CLAIM = 10


def snapshot(bench: Bench, database: str, case: str) -> dict[str, float]:
    """Pass jobs in batches under a REPEATABLE READ snapshot that is taken before the first batch.

    Each batch is enqueued at once, and drained before the next. Claims are timed alone before, while the
    snapshot is still held, and after it has ended. Nothing is vacuumed by hand.
    """
    subject = find("sqlq")
    lots, lot = bench.size.lots, bench.size.passing // bench.size.lots
    with bench.place(subject, database) as place:
        times = max(20, min(500, bench.size.passing // 50))
        claims = [_claims(bench, place, times)]
        with _held(place):
            with bench.workers(subject, place) as workers:
                rates = [_pass(bench, place, workers, lot) for _ in range(lots)]
            claims.append(_claims(bench, place, times))
        with bench.workers(subject, place) as workers:
            recovered = _pass(bench, place, workers, lot)
        claims.append(_claims(bench, place, times))
        expected = lot * (lots + 1) + 3 * times * CLAIM
        if place.number(subject.settled) != expected:
            raise WrongCountError(f"{place.number(subject.settled)} jobs are settled instead of {expected}")
    return {
        "first": rates[0],
        "last": rates[-1],
        "after": recovered,
        "claim p99 before": claims[0],
        "claim p99 held": claims[1],
        "claim p99 after": claims[2],
    }


@contextmanager
def _held(place: Place) -> Iterator[None]:
    """Hold a snapshot."""
    if place.kind == "mariadb":
        with mariadb_connection(place.url) as report, report.cursor() as cursor:
            cursor.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT")
            yield
    else:
        with psycopg.connect(place.url, application_name="old-report") as old:
            old.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            old.execute("SELECT count(*) FROM jobs").fetchone()
            yield


def _pass(bench: Bench, place: Place, workers: Workers, jobs: int) -> float:
    before = workers.calls.count()
    subject = find("sqlq")
    bench.inside(subject, "many", place.url, NOOP, jobs, jobs)  # one transaction: they are all there at once
    with place.questions() as number:
        workers.wait_for(
            lambda: workers.calls.count() - before >= jobs and number(subject.left) == 0,
            f"through {jobs} jobs",
        )
        last = f"(SELECT reserved_at, finished_at FROM finished_jobs ORDER BY id DESC LIMIT {jobs}) AS lot"
        took = (
            "TIMESTAMPDIFF(MICROSECOND, min(reserved_at), max(finished_at)) / 1000"
            if place.kind == "mariadb"
            else "extract(epoch FROM max(finished_at) - min(reserved_at)) * 1000"
        )
        ms = place.number(f"SELECT {took} FROM {last}")
    return jobs / max(ms, 1) * 1000


def _claims(bench: Bench, place: Place, times: int) -> float:
    """Return the p99 of some claims, in ms."""
    subject = find("sqlq")
    bench.inside(subject, "many", place.url, NOOP, times * CLAIM, times * CLAIM)
    took: list[float] = bench.inside(subject, "claims", place.url, times, CLAIM)
    return quantiles(took, n=100, method="inclusive")[98]


def _over(database: str, over: str, under: str) -> Callable[[Medians], float | None]:
    return lambda m: ratio(
        m.get("snapshot", database, "sqlq", over), m.get("snapshot", database, "sqlq", under)
    )


def _targets(database: str) -> list[Target]:
    held = _over(database, "claim p99 held", "claim p99 before")
    return [
        Target(database, "sqlq", "last lot, of the first", _over(database, "last", "first"), least=0.7),
        Target(database, "sqlq", "claim p99 held, of before", held, most=3.0),
        Target(
            database, "sqlq", "after it ended, of the first", _over(database, "after", "first"), least=0.9
        ),
    ]


_RATE, _MS = Figure("jobs/s"), Figure("ms", more_is_better=False, decimals=2)
MEASURES = [
    Measure(
        "snapshot",
        "Beside a transaction that keeps dead rows from being vacuumed",
        "{passing} jobs pass in {lots} lots while a REPEATABLE READ snapshot is held: rate of the first and "
        "of the last lot, and of one after the snapshot has ended; p99 of claims of 10.",
        {
            "first": _RATE,
            "last": _RATE,
            "after": _RATE,
            "claim p99 before": _MS,
            "claim p99 held": _MS,
            "claim p99 after": _MS,
        },
        snapshot,
        lambda bench, asked: [("postgresql", "sqlq"), ("mariadb", "sqlq")],
        [*_targets("postgresql"), *_targets("mariadb")],
        subjects=False,
        rounds=1,
    )
]
