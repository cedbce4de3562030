"""Several worker processes at one server, and producers at the isolation level that it gives them. Nobody
meets a deadlock, and each job runs once."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text

import sqlq
from tests.conftest import SERVERS
from tests.faults.processes import ROOT
from tests.faults.scorecard import record
from tests.waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.parametrize("database_url", SERVERS, indirect=True)]

WORKERS = PRODUCERS = 4
SEED = 20_261_125
DEADLOCKS = {
    "postgresql": "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()",
    "mariadb": "SELECT variable_value FROM information_schema.global_status "
    "WHERE variable_name = 'INNODB_DEADLOCKS'",
}
"""How many there have been."""


class Storm:
    """The processes at one server."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url, self._folder = url, folder
        self._alive: list[subprocess.Popen[str]] = []

    def start(self, role: str) -> None:
        arguments = [role, self._url, str(self._folder), str(len(self._alive) + 1), str(SEED)]
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.storm", *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._alive.append(process)

    def end(self, number: int) -> list[dict[str, Any]]:
        """Ask so many of those that started last to leave, and return what they have to say."""
        leaving, self._alive[-number:] = self._alive[-number:], []
        for process in leaving:
            assert process.stdin is not None
            process.stdin.close()
            process.stdin = None
        said = []
        for process in leaving:
            out, _ = process.communicate(timeout=120)
            assert process.returncode == 0
            said.append(json.loads(out.splitlines()[-1]))
        return said

    def kill(self) -> None:
        for process in self._alive:
            process.kill()
            process.communicate()

    def noted(self, what: str) -> list[int]:
        return [int(line) for file in self._folder.glob(f"{what}-*") for line in file.read_text().split()]


@pytest.fixture
def storm(database_url: str, tmp_path: Path) -> Iterator[Storm]:
    storm = Storm(database_url, tmp_path)
    yield storm
    storm.kill()


@pytest.mark.parametrize("seconds", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_workers_and_producers_meet_no_deadlock(
    storm: Storm, app: sqlq.App, engine: Engine, seconds: int
) -> None:
    deadlocks = text(DEADLOCKS[engine.dialect.name])

    def ask(statement: Any) -> int:
        with engine.connect() as conn:
            return int(conn.execute(statement).scalar_one())

    before = ask(deadlocks)
    for role in ("worker",) * WORKERS + ("producer",) * PRODUCERS:
        storm.start(role)
    wait_until(lambda: len(storm.noted("ran")) > 100, what="the first jobs done")
    threading.Event().wait(seconds)
    producers = storm.end(PRODUCERS)
    wait_until(lambda: ask(text("SELECT count(*) FROM jobs")) == 0, timeout=120, what="all jobs done")
    workers = storm.end(WORKERS)
    met = ask(deadlocks) - before
    acknowledged, ran = storm.noted("acknowledged"), Counter(storm.noted("ran"))
    refused = [error for each in producers for error in each["errors"]]
    failed = {error: times for each in workers for error, times in each["errors"].items()}
    twice = [n for n, times in ran.items() if times > 1]
    lost = set(acknowledged) - ran.keys()
    print(f"{len(acknowledged)} jobs, {met} deadlocks, of producers {refused[:5]}, of workers {failed}")
    record(
        "workers and producers meet no deadlock",
        cases=len(acknowledged),
        seconds=seconds,
        lost=len(lost),
        ran_twice=len(twice),
        refused=len(refused),
        deadlocks=met,
    )
    assert not refused
    assert not lost
    assert not twice
    assert not failed
    assert met <= seconds // 10
