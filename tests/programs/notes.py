"""The notes of handlers, one line each in ran.txt, and their waits for the test."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import NamedTuple

import sqlq


class Note(NamedTuple):
    """A run that began, or ended: of a handler, or under the key of its limit."""

    what: str
    key: str
    n: int
    job: int
    attempt: int
    pid: int
    at: float
    """By the monotonic clock, which is one for all processes."""


def note(key: str, n: int = 0, what: str = "begin") -> None:
    """Append a line, whole or not at all, and before this returns."""
    job = sqlq.current_job()
    line = f"{what} {key} {n} {job.id} {job.attempt} {os.getpid()} {time.monotonic()}\n"
    file = os.open("ran.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, line.encode())
    os.close(file)


def notes(folder: Path) -> list[Note]:
    """Return the notes of a folder's workers, in their order."""
    file = folder / "ran.txt"
    lines = file.read_text().splitlines() if file.exists() else []
    return [
        Note(what, key, int(n), int(job), int(attempt), int(pid), float(at))
        for what, key, n, job, attempt, pid, at in map(str.split, lines)
    ]


def until(file: str) -> None:
    """Wait until a file is there, or the job should stop."""
    while not Path(file).exists() and not sqlq.current_job().should_stop():
        threading.Event().wait(0.01)


def nap(seconds: float = 0.02) -> None:
    """Take so long that some jobs run, and are not settled, when their worker is killed."""
    threading.Event().wait(seconds)
