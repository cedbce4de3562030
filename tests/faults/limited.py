"""Handlers under limits that note their begins and ends, and the intervals of these notes."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

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
