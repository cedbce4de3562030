"""The whole fault suite by one command, and the scorecard it ends with.

    python -m tests.faults [--markdown FILE] [--mariadb] [--operated] [--patroni [N]] [what pytest takes …]

It runs on PostgreSQL and SQLite, with --mariadb on MariaDB.
With --operated the tests that start workers run in their short forms, with encrypted payloads, a waiter for
each job, and metrics on.
With --patroni it runs N failovers of a cluster of three nodes, 30 without a number.

It exits with 1 when a test fails, or when a figure that must be zero is not. A figure that was not measured
fails, too, unless the command line names tests.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.faults.account import DISTRIBUTIONS, MUST_BE_ZERO, ROUNDS, VARIABLE
from tests.kit.processes import OPERATED

OPERATED_TESTS = (
    *("crash_points", "kills", "many_workers", "nothing_is_lost"),
    *("slices", "supervisor", "zombies"),
)
"""Not those which look at payloads themselves, or count connections, nor the storm, which has it all on."""
ROOT = Path(__file__).parents[2]
Rows = list[tuple[str, str, str]]


def percentile(samples: list[float], share: float) -> float:
    """Return the smallest sample that at least this share of them does not exceed."""
    return sorted(samples)[max(0, math.ceil(share * len(samples)) - 1)]


def summed(records: list[dict[str, Any]]) -> tuple[Rows, bool]:
    """Return the scorecard's rows (figure, value, verdict), and whether every figure that must be zero was
    measured and is."""
    rows: Rows = []
    good = True
    for name, words in MUST_BE_ZERO.items():
        values = [record[name] for record in records if name in record]
        if not values:
            rows.append((words, "not measured", "MISSING"))
            good = False
            continue
        rows.append((words, str(sum(values)), "ok" if sum(values) == 0 else "NOT ZERO"))
        good &= sum(values) == 0
    for name, words in DISTRIBUTIONS.items():
        samples = [float(sample) for record in records for sample in record.get(name, [])]
        if not samples:
            rows.append((words, "not measured", "?"))
            continue
        p50, p99, largest = percentile(samples, 0.5), percentile(samples, 0.99), max(samples)
        rows.append((words, f"p50 {p50:.2f} · p99 {p99:.2f} · max {largest:.2f}", f"{len(samples)} samples"))
    return rows, good


def by_guarantee(records: list[dict[str, Any]]) -> Rows:
    """Return a row for each guarantee: how many cases were tried, in how many tests, with which seeds."""
    rows: Rows = []
    for guarantee in sorted({record["guarantee"] for record in records}):
        these = [record for record in records if record["guarantee"] == guarantee]
        seeds = sorted({str(record["seed"]) for record in these if "seed" in record})
        cases = sum(record.get("cases", 1) for record in these)
        rows.append((guarantee, f"{cases:,} cases in {len(these)} runs", ", ".join(seeds)))
    return rows


def markdown(parts: list[tuple[tuple[str, str, str], Rows]]) -> str:
    """Return the tables as Markdown."""
    lines: list[str] = []
    for heads, rows in parts:
        lines += ["| " + " | ".join(heads) + " |", "|---|---|---|"]
        lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows] + [""]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.faults", description="Run the whole fault suite.")
    option = parser.add_argument
    option("--markdown", type=Path, metavar="FILE", help="write the scorecard to a file, too")
    option("--mariadb", action="store_true", help="on MariaDB, and on no other database")
    option("--operated", action="store_true", help="with encrypted payloads, waiters and metrics")
    option("--patroni", type=int, nargs="?", const=30, metavar="N", help="N failovers alone (30)")
    options, pytest_options = parser.parse_known_args()
    chosen = [option for option in pytest_options if Path(option.partition("::")[0]).exists()]
    environment = {**os.environ, "SQLQ_TEST_ALL": "1"}
    if options.mariadb:
        environment["SQLQ_TEST_DATABASES"] = "mariadb"
        pytest_options = ["-k", "mariadb", *pytest_options]  # tests of one other database have its name
    if options.patroni:
        environment[ROUNDS] = str(options.patroni)
        chosen = ["tests/faults/test_patroni.py"]
        pytest_options = ["-s", *pytest_options, *chosen]
    if options.operated:
        environment[OPERATED] = "1"
        chosen = chosen or [f"tests/faults/test_{name}.py" for name in OPERATED_TESTS]
        pytest_options += [name for name in chosen if name not in pytest_options]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "records.jsonl"
        file.touch()
        marks = "not debian and not slow" if options.operated else "not debian"
        # what it measures, it measures one after the other
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "0", "-m", marks]
        command += [*pytest_options, *([] if chosen else ["tests/faults"])]
        environment[VARIABLE] = str(file)
        tests = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        records = [json.loads(line) for line in file.read_text().splitlines()]
    rows, good = summed(records)
    measured, must = ("what was tried", "cases", "seeds"), ("figure", "value", "verdict")
    passed = ("passed", "ok") if tests == 0 else (f"FAILED (pytest ended with {tests})", "NOT ZERO")
    rows.insert(0, ("tests", *passed))
    parts = [(must, rows), (measured, by_guarantee(records))]
    console = Console(width=140)
    for heads, lines in parts:
        table = Table(*heads)
        for line in lines:
            table.add_row(*line)
        console.print(table)
    console.print(f"Python {platform.python_version()} · {platform.machine()} · {os.cpu_count()} cores")
    if options.markdown:
        options.markdown.write_text(markdown(parts))
    if chosen:  # a part of the suite measures a part of the figures
        good = not any(verdict == "NOT ZERO" for *_, verdict in rows)
    return 0 if good and tests == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
