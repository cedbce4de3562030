"""How soon the jobs of a host that died can be claimed again, and how long others wait for that meanwhile."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

from benchmarks.bench import Bench
from benchmarks.measures import Figure, Measure, Medians, Target
from benchmarks.peers import find
from benchmarks.subject import NOOP

RESCUERS = {"1 worker": 1, "4 workers": 4}
HELD = "SELECT count(*) FROM jobs WHERE reserved_at IS NOT NULL AND reserved_by = 'a dead worker'"
EXPIRED = {
    "sqlite": "CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) - 1000",
    "postgresql": "now() - interval '1 second'",
}
DIE = (
    "UPDATE jobs SET attempts = 1, lease_token = 1, reserved_by = 'a dead worker', "
    "reserved_at = {past}, lease_expires_at = {past}"
)
CALM_SECONDS = 0.5
"""How long others enqueue and claim before the first look, and after the last."""
PAUSE_SECONDS = 0.005
OTHERS = "others"


def rescue(bench: Bench, database: str, case: str) -> dict[str, float]:
    """Measure the rescue of a dead worker's jobs by as many others as the case has.

    Two clients go on beside: one enqueues and one claims, again and again.
    """
    import sqlq
    from tests.kit import claim_on

    subject = find("sqlq")
    with bench.place(subject, database) as place:
        bench.inside(subject, "fill", place.url, NOOP, bench.size.jobs // 2)
        place.rows(DIE.format(past=EXPIRED[database]))
        place.rest()
        app = sqlq.App(place.url)
        other = app.task(name="benchmarks.tasks.noop", queue=OTHERS)(lambda number: None)
        over = threading.Event()

        def claim() -> None:
            with app.database.begin() as conn:
                claim_on(conn, [OTHERS], limit=1, owner="a live worker", lease_ms=300_000)

        slowest = {"enqueue": 0.0, "claim": 0.0}
        doing = {"enqueue": lambda: app.enqueue(other.new(1)), "claim": claim}
        for once in doing.values():
            once()
        beside = [
            threading.Thread(target=_again, args=(over, slowest, name, once)) for name, once in doing.items()
        ]
        for thread in beside:
            thread.start()
        time.sleep(CALM_SECONDS)
        command = [sys.executable, "-m", "benchmarks.rescuing", place.url]
        rescuers = [
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            for _ in range(RESCUERS[case])
        ]
        with place.questions() as ask:
            deadline = time.monotonic() + bench.patience
            while ask(HELD) and time.monotonic() < deadline:
                time.sleep(0.02)
        free_at = time.time()
        time.sleep(CALM_SECONDS)
        over.set()
        for thread in beside:
            thread.join()
        said = [json.loads(process.communicate(timeout=bench.patience)[0]) for process in rescuers]
        app.close()
    return {
        "free": free_at - min(one["first_at"] for one in said),
        "turns": sum(one["turns"] for one in said),
        "longest": max(one["longest"] for one in said) * 1000,
        **{name: seconds * 1000 for name, seconds in slowest.items()},
    }


def _again(over: threading.Event, slowest: dict[str, float], name: str, once: Callable[[], object]) -> None:
    while not over.wait(PAUSE_SECONDS):
        began = time.monotonic()
        once()
        slowest[name] = max(slowest[name], time.monotonic() - began)


def _get(figure: str, database: str, case: str, medians: Medians) -> float | None:
    return medians.get("rescue", database, case, figure)


DATABASES = ("postgresql", "sqlite")
MEASURES = [
    Measure(
        "rescue",
        "The jobs of a host that died",
        "10,000 jobs are reserved by a worker that is gone: from the first look of those that rescue until "
        "all can be claimed, the longest transaction of a rescue, and the slowest enqueue and claim of "
        "others meanwhile.",
        {
            "free": Figure("s", more_is_better=False, decimals=2),
            "turns": Figure("turns", more_is_better=False),
            "longest": Figure("ms", more_is_better=False),
            "enqueue": Figure("ms", more_is_better=False),
            "claim": Figure("ms", more_is_better=False),
        },
        rescue,
        lambda bench, asked: [(database, case) for database in DATABASES for case in RESCUERS],
        [
            Target(database, "1 worker", text, partial(_get, figure, database, "1 worker"), most=most)
            for database in DATABASES
            for figure, text, most in (
                ("free", "s until all can be claimed", 2.0),
                ("longest", "ms in the longest transaction", 100.0),
            )
        ],
        subjects=False,
        smoke=lambda database, case: case == "1 worker",
    )
]
