"""Real workers as users run them: `sqlq work` in processes of their own."""

from __future__ import annotations

import itertools
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from sqlalchemy import text

import sqlq
from sqlq.model.job import JobDetails
from tests.kit.preloaded import Forked, preloaded
from tests.kit.waiting import wait_until

ROOT = Path(__file__).parents[2]
OPERATED = "SQLQ_TEST_OPERATED"
"""With it workers show metrics, payloads are encrypted, and a waiter waits for each job: see `operated`."""
MORE = [
    *shlex.split(os.environ.get("SQLQ_TEST_WORK_OPTIONS", "")),
    *(["--metrics-port", "0"] if os.environ.get(OPERATED) else []),
]
"""Options for every worker: what holds without them must hold with them."""


class WorkerProcess:
    """A running `sqlq work`; its log is in `log`."""

    def __init__(self, folder: Path, module: str, url: str, *options: str, anew: bool = False) -> None:
        """Unless it is to be started `anew`, by the interpreter, it is forked by a process that has imported
        sqlq: see `tests.kit.preloaded`."""
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / f"worker-{len(list(folder.glob('worker-*.log')))}.log"
        command = ["-a", module, "-d", url, "work", *options, *MORE]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(folder)))}
        self.process: subprocess.Popen[bytes] | Forked
        with self.log.open("wb") as log:
            if anew:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "sqlq", *command],
                    cwd=folder,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    stdout=log,
                    stderr=log,
                )
            else:
                self.process = preloaded().start(command, folder, environment, log, log, new_session=True)

    def said(self, text: str) -> bool:
        return text in self.log.read_text()

    def wait_ready(self) -> None:
        wait_until(
            lambda: self.said("working on") or self.process.poll() is not None,
            timeout=60,
            what="the worker starting",
        )
        assert self.process.poll() is None, self.log.read_text()

    def kill(self) -> None:
        """End all its processes at once, as the loss of the machine would."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)

    def children(self) -> list[int]:
        """The worker processes, which their fork server has forked."""
        found = _children(self.process.pid)
        return [pid for server in found for pid in _children(server)]

    def stop(self, timeout: float = 30) -> int:
        """End it as an operator would, and return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)


def _children(pid: int) -> list[int]:
    listed = subprocess.run(
        ["ps", "-o", "pid=,comm=", "--ppid", str(pid)], capture_output=True, text=True, check=False
    )
    return [int(line.split()[0]) for line in listed.stdout.splitlines() if "isolate" not in line]


@contextmanager
def worker_process(
    folder: Path, module: str, url: str, *options: str, ready: bool = True, anew: bool = False
) -> Iterator[WorkerProcess]:
    """Run `sqlq work` while the block lasts; without `ready` the block begins before it is at work."""
    worker = WorkerProcess(folder, module, url, *options, anew=anew)
    try:
        if ready:
            worker.wait_ready()
        yield worker
    finally:
        try:
            worker.kill()
        except ProcessLookupError:  # it has ended, and its children with it
            worker.process.wait(10)


class Project:
    """A folder with a module of tasks, and the App as the producer sees it."""

    def __init__(self, folder: Path, url: str, source: str, module: str = "play") -> None:
        folder.mkdir()
        (folder / f"{module}.py").write_text(source)
        self.folder, self.url, self.module, self.app = folder, url, module, sqlq.App(url)

    def working(self, *options: str, ready: bool = True) -> Any:
        """Run `sqlq work` on the module while a block lasts."""
        return worker_process(self.folder, f"{self.module}:app", self.url, *options, ready=ready, anew=True)

    def lines(self) -> list[list[str]]:
        """Return the words of each line that handlers have written into ran.txt."""
        file = self.folder / "ran.txt"
        return [line.split() for line in file.read_text().splitlines()] if file.exists() else []

    def live(self) -> int:
        """Return the number of jobs that have not ended."""
        schema = self.app.database.schema
        with self.app.database.read() as conn:
            return int(conn.scalar(text(f"SELECT count(*) FROM {f'{schema}.' if schema else ''}jobs")) or 0)

    def wait_done(self, timeout: float = 60) -> None:
        wait_until(lambda: self.live() == 0, timeout=timeout, what="all jobs done")

    def ended(self, id: int) -> JobDetails:
        """Wait for the end of a job, and return it."""
        wait_until(lambda: self.app.jobs.get(id).state in ("finished", "failed"), what="the job's end")
        return self.app.jobs.get(id)

    def touch(self, name: str) -> None:
        (self.folder / name).touch()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.app.close()


def reasons(job: JobDetails) -> list[str]:
    """Return why each attempt of a job failed."""
    return [error["reason"] for error in job.errors]


class Crowd:
    """Programs of `python -m MODULE ROLE …`, which run `play` with a role, and note numbers in a folder."""

    def __init__(self, module: str, folder: Path) -> None:
        self.module, self.folder = module, folder
        self.alive: list[subprocess.Popen[str]] = []
        self._numbers = itertools.count(1)

    def start(self, role: str, url: str, seed: int) -> None:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                self.module,
                role,
                url,
                str(self.folder),
                str(next(self._numbers)),
                str(seed),
            ],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.alive.append(process)

    def ready(self) -> None:
        """Wait until each has begun."""
        for process in self.alive:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"

    def end(self, number: int = 0) -> list[dict[str, Any]]:
        """Stop so many of those that started last, or all, and return their reports."""
        leaving, self.alive[-number:] = self.alive[-number:], []
        for process in leaving:
            assert process.stdin is not None
            process.stdin.close()
            process.stdin = None
        reports = []
        for process in leaving:
            out, _ = process.communicate(timeout=120)
            assert process.returncode == 0
            reports.append(json.loads(out.splitlines()[-1]))
        return reports

    def kill(self, *places: int) -> None:
        """End these of them, or all, as the OOM killer would."""
        for process in [self.alive.pop(place) for place in places or [0] * len(self.alive)]:
            process.kill()
            process.communicate()

    def noted(self, what: str) -> list[int]:
        return [int(line) for file in self.folder.glob(f"{what}-*") for line in file.read_text().split()]


class Note:
    """Appends a number to a file, whole or not at all, and before it returns."""

    def __init__(self, file: Path) -> None:
        self._file = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def __call__(self, number: int) -> None:
        os.write(self._file, f"{number}\n".encode())


Role = Callable[[str, Path, int, random.Random, threading.Event], dict[str, Any]]
"""Works until the event, and returns its report; its arguments are URL, folder, number and chance."""


def play(roles: Mapping[str, Role]) -> None:
    """Be a program of a crowd: work until standard input ends, and print a report as a line of JSON."""
    role, url, folder, number, seed = sys.argv[1:]
    over = threading.Event()

    def listen() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=listen, daemon=True).start()
    print("ready", flush=True)
    chance = random.Random(f"{seed} {number}")
    print(json.dumps(roles[role](url, Path(folder), int(number), chance, over)), flush=True)


def is_alive(pid: int) -> bool:
    """Whether a process runs. One that has ended does not, although nobody has waited for it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    if not Path("/proc").exists():
        return True
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
