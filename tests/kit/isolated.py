"""Isolated subprocesses, and the programs that they run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlq.model.job import ClaimedJob
from sqlq.model.outcome import Outcome
from sqlq.worker.attempt.attempt import Attempt, Target
from sqlq.worker.run.isolated import IsolatedProcesses
from tests.kit import run_isolated
from tests.kit.preloaded import Forked, preloaded

ISOLATE = """
import sys
from sqlq.worker.ipc.pipe import Pipe
link = Pipe.inherited(int(sys.argv[1]))
link.send(up=True)
while (message := link.receive()) is not None and "leave" not in message:
    link.send(began=True)
    link.send(outcome={"is": "Finished", "result": None})
"""


HANGS = "import threading; threading.Event().wait()"
"""The program of a subprocess that never comes up; no test waits by it."""


DEAF = """
import sys, time
from sqlq.worker.ipc.pipe import Pipe
link = Pipe.inherited(int(sys.argv[1]))
link.send(up=True)
link.receive()
link.send(began=True)
time.sleep(600)
"""


def forked(*words: str, passed: int, **environment: str) -> Forked:
    """Run a program with these arguments in a process that has this descriptor."""
    names = {**os.environ, **environment}
    return preloaded().start(["python", "-c", *words], Path.cwd(), names, 1, 2, passed=[passed])


class Spawned:
    """`IsolatedProcesses`, and the subprocesses that it has started."""

    def __init__(self, program: str = ISOLATE, **options: Any) -> None:
        self.program = program
        self.spawn: Callable[[int], Any] = self.forked
        """Starts a process; a test may replace it."""
        self.processes: list[Forked] = []
        self.isolates = IsolatedProcesses(self.start, **options)

    def start(self, fd: int) -> Any:
        return self.spawn(fd)

    def forked(self, fd: int) -> Any:
        self.processes.append(forked(self.program, str(fd), passed=fd))
        return self.processes[-1]

    def run(
        self, *, alone: bool = False, releases: int = 0, attempts: int = 1, kind: type[Attempt] = Attempt
    ) -> Outcome:
        running = self.job(releases=releases, attempts=attempts, kind=kind)
        running.alone = alone
        return run_isolated(self.isolates, running)

    def job(self, *, releases: int = 0, attempts: int = 1, kind: type[Attempt] = Attempt) -> Attempt:
        claimed = ClaimedJob(1, 1, "q", "t", "{}", attempts, 3, releases=releases)
        return kind(claimed, None, float("inf"), Target(), isolated=True)

    def ended(self) -> list[bool]:
        return [process.poll() is not None for process in self.processes]
