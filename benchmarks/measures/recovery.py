"""How soon the job of a killed worker process starts again."""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

from benchmarks.bench import Bench, Workers
from benchmarks.environments import variables
from benchmarks.measures import Figure, Measure
from benchmarks.peers import find
from benchmarks.work import Calls

IMPORTS = {"bare": 0.0, "1 s": 1.0, "5 s": 5.0}
"""Seconds of processor time that the import of the App takes."""
MIB = 1024 * 1024


def recovery(bench: Bench, database: str, case: str) -> dict[str, float]:
    """Kill the process that runs a job, again and again; each time the next attempt runs in another one."""
    import sqlq

    subject = find("sqlq")
    seconds: list[float] = []
    with (
        bench.place(subject, database) as place,
        tempfile.TemporaryDirectory(dir=bench.servers.folder) as folder,
    ):
        workers = Workers(Calls(Path(folder)), Path(folder) / "words", bench.patience)
        command = ["sqlq", "-d", place.url, "-a", "benchmarks.recovering:app", "work"]
        imported = Path(folder) / "imported"
        told = {
            "SQLQ_BENCHMARK_IMPORT_SECONDS": str(IMPORTS[case]),
            "SQLQ_BENCHMARK_IMPORTED": str(imported),
        }
        app = sqlq.App(place.url)
        task = app.task(name="benchmarks.recovering.wait_to_be_killed")(lambda file: None)
        memory = 0.0
        try:
            started = bench.environments.command(subject, [*command, "--log-level", "debug"])
            workers.start(started, variables(told))
            workers.wait_for(lambda: "working on" in workers.words(), "up")
            for number in range(bench.size.kills):
                file = Path(folder) / f"starts-{number}"
                app.enqueue(task.new(str(file)))
                workers.wait_for(partial(_started, file, 1), "running")
                workers.wait_for(partial(_all_there, workers, imported), "all there")
                memory = sum(process.memory_full_info().pss for process in workers.family()) / MIB
                pid = int(file.read_text().split()[0])
                killed_at = time.time()
                os.kill(pid, signal.SIGKILL)
                workers.wait_for(partial(_started, file, 2), "running again", look=0.005)
                seconds.append(float(file.read_text().split()[3]) - killed_at)
                workers.wait_for(lambda: place.number(subject.left) == 0, "settled")
        finally:
            workers.stop()
            app.close()
    seconds.sort()
    return {
        "p50": statistics.median(seconds) * 1000,
        "worst": seconds[-1] * 1000,
        "memory": memory,
    }


def _started(file: Path, times: int) -> bool:
    return file.exists() and file.read_text().count("\n") >= times


def _all_there(workers: Workers, imported: Path) -> bool:
    """Return whether every process without children has imported the App. The supervisor and its fork server
    import none."""
    there = {int(pid) for pid in imported.read_text().split()}
    serving = {process.pid for process in workers.family() if not process.children()}
    return serving <= there


MEASURES = [
    Measure(
        "recovery",
        "After the kill of a worker process",
        "One worker process runs a job and is killed: from the kill to the start of the job's next attempt, "
        "by what the import of the App takes; the worst of the kills, and the memory of all processes (PSS) "
        "before one.",
        {
            "p50": Figure("ms", more_is_better=False),
            "worst": Figure("ms", more_is_better=False),
            "memory": Figure("MiB", more_is_better=False),
        },
        recovery,
        lambda bench, asked: [(database, case) for database in ("postgresql", "sqlite") for case in IMPORTS],
        subjects=False,
        smoke=lambda database, case: case == "bare",
        rounds=1,
    )
]
