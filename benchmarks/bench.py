"""Runs subjects: what they do in their own environment, and their workers; and checks that all jobs were
done, once each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.environments import TREE, Environments, variables
from benchmarks.peers import find
from benchmarks.servers import Place, Servers
from benchmarks.subject import NOOP, Subject
from benchmarks.work import CALLS, Calls

LOOK_SECONDS = 0.02
"""How often a drain is looked at: it is over at the first look that finds nothing left."""
PATIENCE_SECONDS = 300.0


@dataclass(frozen=True)
class Size:
    """How large everything is."""

    jobs: int = 20_000
    enqueued: int = 3_000
    ticks: int = 500
    idle_seconds: float = 30.0
    late_seconds: float = 10.0
    growth: float = 1.0
    """A factor for the backlogs of the growth measures."""
    passing: int = 200_000
    lots: int = 10
    """Into how many batches these are divided."""
    naps: tuple[int, ...] = (1, 10, 100, 1000)
    nap_seconds: float = 3.0
    producers: tuple[int, ...] = (1, 2, 4, 8)
    warm_seconds: float = 2.0
    kills: int = 20


QUICK = Size(ticks=200, idle_seconds=10.0)
SMOKE = Size(
    jobs=1_000,
    enqueued=120,
    ticks=20,
    idle_seconds=0.5,
    late_seconds=0.3,
    growth=0.001,
    passing=1_000,
    lots=2,
    naps=(10,),
    nap_seconds=0.3,
    producers=(2,),
    warm_seconds=0.3,
    kills=1,
)


class WrongCountError(Exception):
    """A measurement after which not exactly the expected number of jobs was done."""


class Bench:
    def __init__(
        self, servers: Servers, environments: Environments, size: Size, patience: float = PATIENCE_SECONDS
    ) -> None:
        self.servers = servers
        self.environments = environments
        self.size = size
        self.patience = patience

    def inside(self, subject: Subject, command: str, *arguments: object) -> Any:
        """Run a command of `benchmarks.inside` in the subject's environment and return what it found."""
        done = subprocess.run(
            self._inside(subject, command, *arguments),
            capture_output=True,
            text=True,
            cwd=TREE,
            env=variables({CALLS: str(self.servers.folder)}),
            timeout=self.patience,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{subject.name} could not {command}: {_last_words(done.stderr)}")
        return json.loads(done.stdout.splitlines()[-1])

    def started_inside(self, subject: Subject, command: str, *arguments: object) -> subprocess.Popen[str]:
        """Start such a command and return the process, to be talked to."""
        return subprocess.Popen(
            self._inside(subject, command, *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=TREE,
            env=variables({CALLS: str(self.servers.folder)}),
        )

    def _inside(self, subject: Subject, command: str, *arguments: object) -> list[str]:
        program = ["python", "-m", "benchmarks.inside", subject.name, command, *map(str, arguments)]
        return self.environments.command(subject, program)

    @contextmanager
    def place(self, subject: Subject, kind: str) -> Iterator[Place]:
        """Yield a database with the subject's tables and nothing in them."""
        owner = find("sqlq") if subject.name in ("sqlq-async", "sqlq-lines", "limit") else subject
        with self.servers.place(kind, owner.name, lambda url: self.inside(owner, "prepare", url)) as place:
            yield place

    @contextmanager
    def workers(
        self,
        subject: Subject,
        place: Place,
        *,
        task: str = NOOP,
        concurrency: int = 10,
        processes: int = 1,
        starts: int = 0,
        options: tuple[str, ...] = (),
        more: dict[str, str] | None = None,
    ) -> Iterator[Workers]:
        """Run worker processes of a subject, and with `starts` note the times when so many jobs start."""
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=self.servers.folder)))
            calls = Calls(folder)
            if starts:
                calls.note_starts(starts)
            workers = Workers(calls, folder / "words", self.patience)
            stack.callback(workers.stop)
            told = {CALLS: str(folder)} | subject.environment(place.url, concurrency) | (more or {})
            for command in subject.workers(place.url, task, concurrency, processes):
                workers.start(self.environments.command(subject, [*command, *options]), variables(told))
            yield workers

    def check(
        self, subject: Subject, place: Place, workers: Workers | None, expected: int, what: str = "settled"
    ) -> None:
        """Raise `WrongCountError` unless exactly so many jobs are settled, by the store's own word, and their
        handler ran as often."""
        left = place.number(subject.left)
        if left:
            raise WrongCountError(f"{left} of {expected} jobs are left")
        if subject.settled and (settled := place.number(subject.settled)) != expected:
            raise WrongCountError(f"{settled} jobs are settled instead of {expected}")
        if workers is not None and (called := workers.calls.count()) != expected:
            raise WrongCountError(f"the handler ran {called} times for {expected} jobs")


class Workers:
    """Worker processes that run, and what their handlers have counted."""

    def __init__(self, calls: Calls, words: Path, patience: float) -> None:
        self.calls = calls
        self._words = words
        self._patience = patience
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, command: list[str], environment: dict[str, str]) -> None:
        with self._words.open("ab") as words:
            process = subprocess.Popen(
                command, cwd=TREE, env=environment, stdout=words, stderr=words, start_new_session=True
            )
        self.processes.append(process)

    def words(self) -> str:
        """Return the output of the workers so far."""
        return self._words.read_text(errors="replace") if self._words.exists() else ""

    def wait_for(self, condition: Callable[[], bool], what: str, look: float = LOOK_SECONDS) -> float:
        """Wait until a condition holds, and return the time in seconds of the monotonic clock."""
        until = time.monotonic() + self._patience
        while not condition():
            if time.monotonic() > until:
                so_far = f"after {self.calls.count()} calls"
                raise WrongCountError(
                    f"not {what} within {self._patience:g} s, {so_far}; {_last_words(self.words())}"
                )
            if any(process.poll() not in (None, 0) for process in self.processes):
                raise RuntimeError(f"a worker ended: {_last_words(self.words())}")
            time.sleep(look)
        return time.monotonic()

    def family(self) -> list[psutil.Process]:
        """Return the processes and their children."""
        found = []
        for process in self.processes:
            try:
                parent = psutil.Process(process.pid)
                found += [parent, *parent.children(recursive=True)]
            except psutil.NoSuchProcess:
                pass
        return found

    def processor_seconds(self) -> float:
        """How much processor time the processes and their children have used so far."""
        return sum(sum(process.cpu_times()[:2]) for process in self.family())

    def stop(self) -> None:
        """Stop them as their users do, and kill what does not leave."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        until = time.monotonic() + 10
        for process in self.processes:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                pass
        for process in self.processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
        self.calls.keep()


def _last_words(text: str) -> str:
    return " ".join(text.split())[-400:] or "it said nothing"
