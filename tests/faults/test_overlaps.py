"""While its lease is renewed a job runs once at a time, however long it takes and whoever else is looking for
work."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from sqlalchemy import Engine

import sqlq
from tests.faults import guard
from tests.faults.scorecard import record
from tests.kit import wait_until
from tests.kit.processes import worker_process

pytestmark = pytest.mark.integration

MODULE = '''
import os, threading, time
import sqlq
app = sqlq.App()

@app.task
def long(n):
    """Runs for several leases, and leaves a line when it begins and one when it ends."""
    began = time.monotonic()
    threading.Event().wait(8)
    fd = os.open("ran.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, f"{n} {began} {time.monotonic()}\\n".encode())
    os.close(fd)
'''
JOBS = 12


@pytest.mark.slow
def test_long_jobs_do_not_overlap(app: sqlq.App, engine: Engine, tmp_path: Path, database_url: str) -> None:
    guard.install(engine)
    folder = tmp_path / "overlaps"
    folder.mkdir()
    (folder / "overlaps.py").write_text(MODULE)
    task = app.task(name="overlaps.long")(lambda n: None)
    options = ("--lease", "3s", "-c", "3")
    with (
        worker_process(folder, "overlaps:app", database_url, *options) as one,
        worker_process(folder, "overlaps:app", database_url, *options),
    ):
        app.enqueue_many([task.new(n) for n in range(JOBS)])
        wait_until(lambda: len(app.jobs.list(state="finished")) == JOBS, timeout=120, what="all jobs done")
        assert one.stop() == 0
        assert guard.ILLEGAL not in one.log.read_text()
    runs = sorted(
        (int(n), float(began), float(ended))
        for n, began, ended in map(str.split, (folder / "ran.txt").read_text().splitlines())
    )
    overlaps = sum(first[0] == second[0] and second[1] < first[2] for first, second in pairwise(runs))
    record(
        "G5: long jobs under short leases",
        cases=len(runs),
        overlaps=overlaps,
        lost=JOBS - len({n for n, _, _ in runs}),
    )
    assert [n for n, _, _ in runs] == list(range(JOBS))
