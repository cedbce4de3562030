"""The bytes of log and of tables, the dead rows and the commits that a job costs PostgreSQL."""

from __future__ import annotations

from benchmarks.bench import Bench
from benchmarks.measures import Figure, Measure
from benchmarks.peers import find
from benchmarks.servers import Place
from benchmarks.subject import NOOP

BATCHES = "in batches"
CASES = ("one by one", BATCHES)
EVERY_MS = 5
WAL = "SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint"


def weight(bench: Bench, database: str, case: str) -> dict[str, float]:
    """Enqueue jobs without a worker, then let a worker run as many: those that wait, in batches, or others
    that come one by one."""
    subject, jobs = find("sqlq"), bench.size.jobs if case == BATCHES else bench.size.jobs // 10
    enqueue = "fill" if case == BATCHES else "one"
    with bench.place(subject, database) as place:
        place.rows("ALTER TABLE jobs SET (autovacuum_enabled = off)")
        place.rest()
        before, empty = place.number(WAL), _size(place, "jobs")
        bench.inside(subject, enqueue, place.url, NOOP, jobs)
        enqueued = (place.number(WAL) - before) / jobs
        waiting = (_size(place, "jobs") - empty) / jobs
        with bench.workers(subject, place) as workers:
            commits, before, own = _commits(place), place.number(WAL), 0.0
            if case != BATCHES:
                workers.wait_for(lambda: place.number(subject.settled) >= jobs, "settled")
                commits, before, own = _commits(place), place.number(WAL), enqueued
                bench.inside(subject, "tick", place.url, NOOP, jobs, EVERY_MS)
            ended = jobs if case == BATCHES else 2 * jobs
            workers.wait_for(lambda: place.number(subject.settled) >= ended, "settled")
            logged = (place.number(WAL) - before) / jobs
            counted = (_commits(place) - commits) / jobs
        dead = place.number("SELECT n_dead_tup FROM pg_stat_user_tables WHERE relname = 'jobs'")
        return {
            "wal enqueue": enqueued,
            "wal run": logged - own,
            "waiting": waiting,
            "finished": _size(place, "finished_jobs") / ended,
            "dead": dead / ended,
            "commits": counted,
        }


def _size(place: Place, table: str) -> int:
    return place.number(f"SELECT pg_total_relation_size('{table}')")


def _commits(place: Place) -> int:
    place.rows("SELECT pg_stat_force_next_flush()")
    return place.number("SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()")


MEASURES = [
    Measure(
        "weight",
        "What a job weighs",
        "Bytes of PostgreSQL's log for an enqueue and for all that follows until the job has finished, bytes "
        "of a waiting and of a finished job with their indexes, dead row versions, and commits. Payloads are "
        "of some ten bytes.",
        {
            "wal enqueue": Figure("bytes", more_is_better=False),
            "wal run": Figure("bytes", more_is_better=False),
            "waiting": Figure("bytes", more_is_better=False),
            "finished": Figure("bytes", more_is_better=False),
            "dead": Figure("rows", more_is_better=False, decimals=2),
            "commits": Figure("commits", more_is_better=False, decimals=3),
        },
        weight,
        lambda bench, asked: [("postgresql", case) for case in CASES],
        [],
        smoke=lambda database, case: case == BATCHES,
        subjects=False,
        rounds=1,
    )
]
