"""Notes when a job passes the stages from the call that enqueues it to its handler, on both sides: of sqlq,
and of peers.

The notes are kept in memory and written when the process ends, so that noting costs a fraction of a
microsecond. The module runs in the environments of peers, too.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.subject import Subject

TRACE = "SQLQ_BENCHMARK_TRACE"
"""Names the folder for what workers note."""

Noted = dict[str, list[int]]
"""Times by stage, in ns of the machine's monotonic clock."""


def note_worker(subject: Subject) -> None:
    """Note when this process of a peer claims, if an environment variable names a folder for its file."""
    if folder := os.environ.get(TRACE):
        noted: Noted = {}
        subject.note_claims(noted)
        write_at_exit(noted, folder)


def write_at_exit(noted: Noted, folder: str) -> None:
    """Write what was noted into a file of this process."""
    file = Path(folder) / f"trace-{os.getpid()}"
    atexit.register(lambda: file.write_text(json.dumps(noted)))


def note_calls(
    noted: Noted,
    owner: type,
    name: str,
    before: str | None,
    after: str | None,
    counts: Callable[..., bool] = lambda result, *args: True,
) -> None:
    """Note when calls of a method begin and end, of those that count by their result and arguments."""
    function = getattr(owner, name)

    def note(begun: int, result: Any, args: tuple[Any, ...]) -> None:
        ended = time.monotonic_ns()
        if counts(result, *args):
            for stage, moment in ((before, begun), (after, ended)):
                if stage is not None:
                    noted.setdefault(stage, []).append(moment)

    @functools.wraps(function)
    def timed(self: Any, *args: Any, **options: Any) -> Any:
        begun = time.monotonic_ns()
        result = function(self, *args, **options)
        note(begun, result, args)
        return result

    @functools.wraps(function)
    async def atimed(self: Any, *args: Any, **options: Any) -> Any:
        begun = time.monotonic_ns()
        result = await function(self, *args, **options)
        note(begun, result, args)
        return result

    setattr(owner, name, atimed if inspect.iscoroutinefunction(function) else timed)


# -- sqlq's own ----------------------------------------------------------------------------------------------


def note_statements(noted: Noted, before: str, after: str) -> None:
    """Note when the main thread's statements begin and end that go past SQLAlchemy: inserts of one job, and
    claims."""
    from sqlq.database.postgresql.driver import PostgreSQLDriver
    from sqlq.database.sqlite.driver import SQLiteDriver

    for kind in (PostgreSQLDriver, SQLiteDriver):
        setattr(kind, "run", _timed(kind.run, noted, before, after))  # noqa: B010 - for type checkers


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
    """Note what this process does as a worker of sqlq, into a file of its own."""
    from sqlq.worker.run.executor import Executor
    from sqlq.worker.wait.wake import Wake

    noted: Noted = {"hinted": [], "awake": [], "taken": []}
    note_statements(noted, "claiming", "claimed")
    init, wait, attempt = Wake.__init__, Wake.wait, Executor._attempt  # noqa: SLF001

    def noted_init(wake: Any, *args: Any, **options: Any) -> None:
        init(wake, *args, **options)
        wake._called = _NotedEvent(noted["hinted"])

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
        (Executor, "_attempt", noted_attempt),
    ):
        setattr(owner, name, function)
    write_at_exit(noted, folder)
