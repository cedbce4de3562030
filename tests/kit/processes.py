"""Real workers as users run them: `sqlq work` in processes of their own."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

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

    def __init__(
        self, folder: Path, module: str, url: str, *options: str, anew: bool = False, by: Sequence[str] = ()
    ) -> None:
        """Unless it is to be started `anew`, by the interpreter, it is forked by a process that has imported
        sqlq: see `tests.kit.preloaded`. `by` is a command that starts the interpreter."""
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / f"worker-{len(list(folder.glob('worker-*.log')))}.log"
        command = ["-a", module, "-d", url, "work", *options, *MORE]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(folder)))}
        self.process: subprocess.Popen[bytes] | Forked
        with self.log.open("wb") as log:
            if anew:
                self.process = subprocess.Popen(
                    [*by, sys.executable, "-m", "sqlq", *command],
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
        def has_begun() -> bool:
            return self.said("working on") or self.process.poll() is not None

        wait_until(has_begun, timeout=60, what="the worker starting")
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


def run_program(
    *words: str, cwd: Path = ROOT, timeout: float = 120, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a Python program to its end, in an interpreter of its own that finds sqlq."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(cwd))), **environment}
    run = partial(subprocess.run, cwd=cwd, env=env, timeout=timeout, check=False)
    return run([sys.executable, *words], capture_output=True, text=True)


def reasons(job: JobDetails) -> list[str]:
    """Return why each attempt of a job failed."""
    return [error["reason"] for error in job.errors]


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
