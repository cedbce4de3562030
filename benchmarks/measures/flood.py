"""The cost of floods by strangers: of notifications, which every role that may connect may send, and of rows,
which a producer may insert."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.bench import Bench
from benchmarks.measures import Figure, Measure, Medians, Target
from benchmarks.measures.latency import EVERY_MS, quantile, warm_up
from benchmarks.peers import find
from benchmarks.subject import NOOP
from sqlq.config.durations import FAR

A_SECOND = 6_000
"""Notifications, of 600 ids each."""
FLOOD = f"""
import sys, time
import psycopg
from sqlalchemy import make_url
from sqlq.store.workers.notify import channel

url = make_url(sys.argv[1]).set(drivername="postgresql").render_as_string(hide_password=False)
words = "waits " + ",".join(str(10**9 + n) for n in range(600))
with psycopg.connect(url, autocommit=True) as connection:
    began, sent = time.monotonic(), 0
    while True:
        # texts that are alike are told once in a transaction
        connection.execute(
            "SELECT pg_notify(%s, %s || ',' || n) FROM generate_series(1, 100) n", (channel(None), words)
        )
        sent += 100
        print(sent, flush=True)
        time.sleep(max(0.0, began + sent / {A_SECOND} - time.monotonic()))
"""


ROWS = {
    "100,000 lines of limits": (
        "INSERT INTO jobs (task, blocked_by, limit_key, available_at) "
        f"SELECT 'flood', 'limit', 'k' || i, '{FAR}' FROM generate_series(1, 100000) i"
    ),
    "20,000 unknown tasks": (
        "INSERT INTO jobs (task) SELECT 'flood.' || i % 5000 FROM generate_series(1, 20000) i"
    ),
    "100 payloads of 1.5 MB": (
        "INSERT INTO jobs (task, payload) SELECT 'benchmarks.tasks.noop', "
        """'{"args":[' || repeat('[],', 500000) || '1]}' FROM generate_series(1, 100)"""
    ),
}
"""The rows that a producer inserts. No handler takes these arguments."""
FORGET = "DELETE FROM jobs WHERE task LIKE 'flood%' OR length(payload) > 1000000"


def flood(bench: Bench, database: str, case: str) -> dict[str, float]:
    """Jobs are enqueued one after the other, without a flood or within one; how soon each begins, and by how
    much the worker grows."""
    subject = find("sqlq")
    ticks = bench.size.ticks
    with bench.place(subject, database) as place, bench.workers(subject, place, starts=ticks) as workers:
        warmed = warm_up(bench, "sqlq", place.url, workers)
        before = _memory(workers.family())
        stranger = None
        if case == "flood":
            stranger = subprocess.Popen(
                [sys.executable, "-c", FLOOD, place.url], stdout=subprocess.PIPE, text=True
            )
            assert stranger.stdout is not None
            stranger.stdout.readline()
        elif case in ROWS:
            place.rows(ROWS[case])
        began = time.monotonic()
        try:
            moments = bench.inside(subject, "tick", place.url, NOOP, ticks, EVERY_MS)
            workers.wait_for(lambda: workers.calls.count() >= ticks + warmed, "called for each job")
            grown = _memory(workers.family()) - before
        finally:
            seconds = time.monotonic() - began
            said = "0"
            if stranger is not None:
                stranger.kill()
                said = (stranger.communicate()[0].split() or ["0"])[-1]
        place.rows(FORGET)
        workers.wait_for(lambda: place.number(subject.left) == 0, "settled")
        bench.check(subject, place, workers, ticks + warmed)
        starts = workers.calls.starts()
    waits = [(start - returned) / 1e6 for (_, returned), start in zip(moments, starts, strict=True)]
    return {
        "p50": quantile(waits, 50),
        "p99": quantile(waits, 99),
        "longest": max(waits),
        "grown": grown,
        "notifications": int(said) / seconds,
    }


def _memory(family: Sequence[Any]) -> float:
    return float(sum(process.memory_info().rss for process in family) / 2**20)


def _p99(medians: Medians) -> float | None:
    return medians.get("flood", "postgresql", "flood", "p99")


MEASURES = [
    Measure(
        "flood",
        "Floods of strangers",
        f"A stranger sends up to {A_SECOND:,} notifications of 600 ids a second, or inserts rows. Meanwhile "
        "jobs are enqueued one after the other: how soon each begins, and by how much the worker's processes "
        "grow.",
        {
            "p50": Figure("ms", more_is_better=False, decimals=2),
            "p99": Figure("ms", more_is_better=False, decimals=2),
            "longest": Figure("ms", more_is_better=False, decimals=2),
            "grown": Figure("MiB", more_is_better=False, decimals=2),
            "notifications": Figure("a second", more_is_better=True),
        },
        flood,
        lambda bench, asked: [("postgresql", case) for case in ("quiet", "flood", *ROWS)],
        [Target("postgresql", "flood", "ms to the start of a job, 99 %", _p99, most=50.0)],
        subjects=False,
        smoke=lambda database, case: case not in ROWS,
    )
]
