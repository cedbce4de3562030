"""Limits while workers are killed in the middle of their jobs.

Never do more jobs run at a time, no slot is lost, and serial jobs keep their order. Handlers note the begin
and the end of every run.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
from sqlalchemy import Engine, text

import sqlq
from tests.faults import guard
from tests.faults.scorecard import record
from tests.kit import wait_until
from tests.kit.processes import worker_process

pytestmark = pytest.mark.integration

RUNNING, ACCOUNTS = 4, 3
MODULE = f"""
import os, time, threading
import sqlq

app = sqlq.App()
file = os.open("ran.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def note(what, key, n):
    os.write(file, f"{{what}} {{key}} {{n}} {{os.getpid()}} {{time.monotonic()}}\\n".encode())

def run(key, n):
    note("begin", key, n)
    threading.Event().wait(0.1)
    if n % 7 == 3 and sqlq.current_job().attempt == 1:
        note("end", key, n)
        raise ValueError("not yet")
    note("end", key, n)

@app.task(limit=sqlq.Limit("stripe", running={RUNNING}), max_attempts=20, backoff="10ms")
def call(n):
    run("stripe", n)

@app.task(limit=sqlq.Serial("account:{{account}}"), max_attempts=20, backoff="10ms")
def book(account, n):
    run(f"account:{{account}}", n)
"""


class Note(NamedTuple):
    what: str
    key: str
    n: int
    pid: int
    at: float


def notes(folder: Path) -> list[Note]:
    file = folder / "ran.txt"
    lines = file.read_text().splitlines() if file.exists() else []
    return [Note(what, key, int(n), int(pid), float(at)) for what, key, n, pid, at in map(str.split, lines)]


def open_runs(found: list[Note]) -> dict[tuple[int, str, int], Note]:
    """Return the runs that have begun and not ended, by process, key and number."""
    still: dict[tuple[int, str, int], Note] = {}
    for each in found:
        if each.what == "begin":
            still[each.pid, each.key, each.n] = each
        else:
            still.pop((each.pid, each.key, each.n), None)
    return still


def kill_one(folder: Path, killed: dict[int, float], chance: random.Random) -> bool:
    """Kill a process in the middle of a job; return whether there was one."""
    pids = {pid for pid, _, _ in open_runs(notes(folder))} - killed.keys()
    if not pids:
        return False
    pid = chance.choice(sorted(pids))
    at = time.monotonic()  # before it: afterwards another may have begun already
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    killed[pid] = at
    return True


@pytest.mark.parametrize(
    ("calls", "turns", "kills"), [(20, 4, 3), pytest.param(60, 12, 8, marks=pytest.mark.slow)]
)
def test_workers_that_are_killed_lose_no_slot_and_exceed_no_limit(
    app: sqlq.App, engine: Engine, database_url: str, tmp_path: Path, calls: int, turns: int, kills: int
) -> None:
    guard.install(engine, owners_may_be_known_dead=True)
    folder = tmp_path / "fire"
    folder.mkdir()
    (folder / "fire.py").write_text(MODULE)
    call = app.task(name="fire.call", limit=sqlq.Limit("stripe", running=RUNNING), max_attempts=20)(
        lambda n: None
    )
    book = app.task(name="fire.book", limit=sqlq.Serial("account:{account}"), max_attempts=20)(
        lambda account, n: None
    )
    chance, killed = random.Random(7), dict[int, float]()
    options = ("-c", "6", "-p", "2")
    with (
        worker_process(folder, "fire:app", database_url, *options) as one,
        worker_process(folder, "fire:app", database_url, *options) as two,
    ):
        # ids rise with n in each account
        app.enqueue_many([book.new(account, n) for n in range(turns) for account in range(ACCOUNTS)])
        app.enqueue_many([call.new(n) for n in range(calls)])
        for _ in range(kills):
            wait_until(
                lambda: kill_one(folder, killed, chance) or done(app, calls + ACCOUNTS * turns),
                what="a job to be killed in",
            )
        wait_until(lambda: done(app, calls + ACCOUNTS * turns), timeout=120, what="all jobs done")
        assert guard.ILLEGAL not in one.log.read_text() + two.log.read_text()
    runs = intervals(notes(folder), killed)
    assert killed
    most = most_at_once(runs["stripe"])
    serial = [runs[f"account:{account}"] for account in range(ACCOUNTS)]
    doubled = sum(max(0, most_at_once(each) - 1) for each in serial)
    out_of_order = sum(later[2] < earlier[2] for each in serial for earlier, later in pairwise(each))
    lost = calls - len({n for _, _, n in runs["stripe"]})
    lost += sum(turns - len({n for _, _, n in each}) for each in serial)
    with app.database.read() as conn:
        held = conn.scalar(text("SELECT count(*) FROM jobs WHERE limit_key IS NOT NULL"))
    record(
        "Limits under SIGKILL",
        cases=calls + ACCOUNTS * turns,
        kills=len(killed),
        over_the_limit=max(0, most - RUNNING) + doubled,
        out_of_order=out_of_order,
        lost=lost,
    )
    assert most <= RUNNING
    assert (doubled, out_of_order, lost, held) == (0, 0, 0, 0)
    assert most_at_once(runs["stripe"]) > 1, "nothing ran side by side, so nothing was tried"


def done(app: sqlq.App, number: int) -> bool:
    return len(app.jobs.list(state="finished", limit=1000)) == number


def intervals(found: list[Note], killed: dict[int, float]) -> dict[str, list[tuple[float, float, int]]]:
    """Return begin, end and number of each run by its key, in the order in which they began.

    A run in a process that was killed ended then.
    """
    runs: dict[str, list[tuple[float, float, int]]] = defaultdict(list)
    begun: dict[tuple[int, str, int], float] = {}
    for each in found:
        run = each.pid, each.key, each.n
        if each.what == "begin":
            begun[run] = each.at
        else:
            runs[each.key].append((begun.pop(run), each.at, each.n))
    for (pid, key, n), at in begun.items():
        runs[key].append((at, max(at, killed.get(pid, at)), n))
    return {key: sorted(each) for key, each in runs.items()}


def most_at_once(runs: list[tuple[float, float, int]]) -> int:
    """Return how many of these runs there were at the same time, at the most."""
    changes = sorted([(end, -1) for _, end, _ in runs] + [(begin, 1) for begin, _, _ in runs])
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most
