"""The memory, processor time and statements of an idle worker, and how soon the command line answers."""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.bench import Bench
from benchmarks.environments import TREE, variables
from benchmarks.measures import Figure, Measure, Medians, Target, subjects
from benchmarks.peers import find
from benchmarks.servers import Place
from benchmarks.subject import NOOP

SETTLING_SECONDS = 10.0
JOBS_BEFORE, TRIES = 200, 5
SENT = {"postgresql": "transactions", "sqlite": "statements"}
"""The requests for the worker: on PostgreSQL the supervisor looks, and does most maintenance."""


def idle(bench: Bench, database: str, name: str) -> dict[str, float]:
    """A worker that has run some jobs and then found none for ten seconds."""
    subject = find(name)
    with bench.place(subject, database) as place, tempfile.TemporaryDirectory() as folder:
        bench.inside(subject, "fill", place.url, NOOP, JOBS_BEFORE)
        with bench.workers(subject, place, more={"SQLQ_BENCHMARK_STATEMENTS": folder}) as workers:
            workers.wait_for(
                lambda: place.number(subject.left) == 0 and workers.calls.count() >= JOBS_BEFORE, "drained"
            )
            time.sleep(min(SETTLING_SECONDS, bench.size.idle_seconds))
            before, statements, transactions = (
                workers.processor_seconds(),
                _letters(folder),
                _transactions(place),
            )
            time.sleep(bench.size.idle_seconds)
            cpu = (workers.processor_seconds() - before) / bench.size.idle_seconds * 100
            sent = (_letters(folder) - statements) / bench.size.idle_seconds
            committed = (_transactions(place) - transactions) / bench.size.idle_seconds
            memory = [process.memory_info().rss / 2**20 for process in workers.family()]
        bench.check(subject, place, workers, JOBS_BEFORE)
        figures = {"largest process": max(memory), "all processes": sum(memory), "processor": cpu}
        figures |= {"statements": sent} if name == "sqlq" else {}
        return figures | ({"transactions": committed} if database == "postgresql" else {})


def _transactions(place: Place) -> int:
    """Return how many transactions the database has counted.

    Its processes report about once a second, the one that answers here included.
    """
    if place.kind != "postgresql":
        return 0
    return place.number(
        "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
    )


def _letters(folder: str) -> int:
    return sum(file.stat().st_size for file in Path(folder).iterdir())


def command_line(bench: Bench, database: str, name: str) -> dict[str, float]:
    command = [str(Path(sys.executable).parent / "sqlq"), "--help"]
    begin = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=TREE, env=variables({}))
    return {"seconds": time.perf_counter() - begin}


def memory(bench: Bench, database: str, name: str) -> dict[str, float]:
    """Return the memory of one worker process with its supervisor, and of each further process."""
    subject = find(name)
    held: dict[int, float] = {}
    for number in (1, 4):
        with (
            bench.place(subject, database) as place,
            bench.workers(subject, place, options=("-p", str(number))) as workers,
        ):
            entered = "SELECT count(*) FROM sqlq_workers"
            workers.wait_for(lambda: place.number(entered) == number, "up")  # noqa: B023 - called at once
            time.sleep(bench.size.warm_seconds)
            held[number] = sum(process.memory_full_info().pss for process in workers.family()) / 2**20
    return {"one": held[1], "further": (held[4] - held[1]) / 3}


def status(bench: Bench, database: str, name: str) -> dict[str, float]:
    """Return the processor time of `sqlq status`, and how many imports of SQLAlchemy it is worth."""
    subject = find(name)
    with bench.place(subject, database) as place:
        bench.inside(subject, "fill", place.url, NOOP, JOBS_BEFORE)
        program = str(Path(sys.executable).parent / "sqlq")
        seconds = min(_processor([program, "-d", place.url, "status"]) for _ in range(TRIES))
        imports = min(_processor([sys.executable, "-c", "import sqlalchemy"]) for _ in range(TRIES))
    return {"imports": seconds / imports, "seconds": seconds}


def _processor(command: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=TREE, env=variables({}))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _own(measure: str, database: str, figure: str) -> Callable[[Medians], float | None]:
    return lambda medians: medians.get(measure, database, "sqlq", figure)


MEASURES = [
    Measure(
        "idle",
        "An idle worker",
        "A worker with concurrency 10 that ran 200 jobs and then found none for ten seconds: the resident "
        "memory of its processes, the "
        "processor time it takes of one core, the statements it sends through SQLAlchemy (SQLite's looks at "
        "data_version not counted), "
        "and the transactions PostgreSQL counts.",
        {
            "largest process": Figure("MB", more_is_better=False, decimals=1),
            "all processes": Figure("MB", more_is_better=False, decimals=1),
            "processor": Figure("%", more_is_better=False, decimals=2),
            "statements": Figure("per s", more_is_better=False, decimals=2),
            "transactions": Figure("per s", more_is_better=False, decimals=2),
        },
        idle,
        subjects(ours=("sqlq",)),
        [
            target
            for database in ("postgresql", "sqlite")
            for target in (
                Target(
                    database,
                    "sqlq",
                    "MB in a worker process",
                    _own("idle", database, "largest process"),
                    most=60.0,
                ),
                Target(database, "sqlq", "% of one core", _own("idle", database, "processor"), most=0.5),
                Target(
                    database,
                    "sqlq",
                    f"{SENT[database]} per second",
                    _own("idle", database, SENT[database]),
                    most=1.0,
                ),
            )
        ],
    ),
    Measure(
        "command",
        "sqlq --help",
        "From the start of the process to its end.",
        {"seconds": Figure("s", more_is_better=False, decimals=2)},
        command_line,
        lambda bench, asked: [("none", "sqlq")],
        [Target("none", "sqlq", "seconds", _own("command", "none", "seconds"), most=0.4)],
    ),
    Measure(
        "memory",
        "Memory of idle workers",
        "The memory of all processes of `sqlq work` (PSS: shared pages are counted once), and of each "
        "further worker process.",
        {
            "one": Figure("MB", more_is_better=False, decimals=1),
            "further": Figure("MB a further process", more_is_better=False, decimals=1),
        },
        memory,
        subjects(ours=("sqlq",), peers=False),
        [
            Target(database, "sqlq", text, _own("memory", database, figure), most=most)
            for database in ("postgresql", "sqlite")
            for figure, text, most in (("one", "MB", 55.0), ("further", "MB a further process", 18.0))
        ],
        smoke=lambda database, case: False,
    ),
    Measure(
        "status",
        "sqlq status",
        "The least processor time of five runs, and that of `import sqlalchemy` in the same minute.",
        {
            "imports": Figure("imports of SQLAlchemy", more_is_better=False, decimals=2),
            "seconds": Figure("s", more_is_better=False, decimals=2),
        },
        status,
        subjects(ours=("sqlq",), peers=False),
        [
            Target(d, "sqlq", "imports of SQLAlchemy", _own("status", d, "imports"), most=0.6)
            for d in ("postgresql", "sqlite")
        ],
        smoke=lambda database, case: False,
    ),
]
