"""Notes when a job passes the stages from the call that enqueues it to its handler, on both sides.

What is noted is kept in memory and written when the process ends, so that noting costs a fraction of a
microsecond.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlq.store.postgresql import PostgreSQL
from sqlq.store.sqlite import SQLite

Noted = dict[str, list[int]]
"""Moments by stage, in ns of the machine's monotonic clock."""


def note_statements(noted: Noted, before: str, after: str) -> None:
    """Note when the main thread's statements begin and end that go past SQLAlchemy: inserts of one job, and
    claims."""
    for dialect in (PostgreSQL, SQLite):
        setattr(dialect, "run", _timed(dialect.run, noted, before, after))  # noqa: B010 - for type checkers


def _timed(run: Callable[..., Any], noted: Noted, before: str, after: str) -> Callable[..., Any]:
    begun, ended = noted.setdefault(before, []), noted.setdefault(after, [])

    def timed(*args: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return run(*args)
        begun.append(time.monotonic_ns())
        try:
            return run(*args)
        finally:
            ended.append(time.monotonic_ns())

    return timed


class _NotedEvent(threading.Event):
    """Notes when it is set."""

    def __init__(self, moments: list[int]) -> None:
        super().__init__()
        self._moments = moments

    def set(self) -> None:
        self._moments.append(time.monotonic_ns())
        super().set()


def note_into(folder: str) -> None:
    """Note what this process does as a worker, into a file of its own."""
    from sqlq.worker.executors import Executors
    from sqlq.worker.wake import Wake

    noted: Noted = {"hinted": [], "awake": [], "taken": []}
    note_statements(noted, "claiming", "claimed")
    init, wait, attempt = Wake.__init__, Wake.wait, Executors._attempt  # noqa: SLF001

    def noted_init(wake: Any, *args: Any, **options: Any) -> None:
        init(wake, *args, **options)
        wake._called = _NotedEvent(noted["hinted"])  # noqa: SLF001

    def noted_wait(wake: Any, *args: Any) -> bool:
        result = wait(wake, *args)
        noted["awake"].append(time.monotonic_ns())
        return result

    def noted_attempt(executors: Any, job: Any) -> Any:
        noted["taken"].append(time.monotonic_ns())
        return attempt(executors, job)

    for owner, name, function in (
        (Wake, "__init__", noted_init),
        (Wake, "wait", noted_wait),
        (Executors, "_attempt", noted_attempt),
    ):
        setattr(owner, name, function)
    file = Path(folder) / f"trace-{os.getpid()}"
    atexit.register(lambda: file.write_text(json.dumps(noted)))
