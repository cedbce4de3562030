"""A stuck worker process is killed and replaced, and its jobs go on; one that only seems stuck is left alone.

It is stuck when it is frozen, or in a call that holds the interpreter's lock.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sqlq.admin.doctor.doctor import examine
from tests.kit import let_pass, wait_until
from tests.kit.processes import Project, WorkerProcess, reasons

pytestmark = pytest.mark.integration

MODULE = """
import ctypes, dataclasses, os, signal, threading, sqlq

app = sqlq.App()
if os.path.exists("hangs"):
    open("importing.txt", "w").close()
    while os.path.exists("hangs"):
        threading.Event().wait(0.01)

def begin():
    job = sqlq.current_job()
    with open("ran.txt", "a") as file:
        print(job.id, os.getpid(), job.attempt, file=file)
    return job

def hold_the_interpreter():
    ctypes.PyDLL(None).usleep(120_000_000)

@app.task
def quick():
    begin()

@app.task(timeout="1s", max_attempts=1)
def late_once():
    begin()
    hold_the_interpreter()

@app.task
def holds():
    if begin().attempt == 1:
        hold_the_interpreter()

@app.task
def locks():
    if begin().attempt == 1:
        with app.database.begin() as conn:
            conn.exec_driver_sql("UPDATE jobs SET headers = headers")
            os.kill(os.getpid(), signal.SIGSTOP)

@app.task(timeout="1s", backoff="0s")
def late():
    if begin().attempt == 1:
        while not os.path.exists("go"):
            threading.Event().wait(0.01)

@app.task
def waits():
    begin()
    while not os.path.exists("go"):
        threading.Event().wait(0.01)

@dataclasses.dataclass
class Order:
    how: str

    def __post_init__(self):
        if self.how == "kills":
            os.kill(os.getpid(), signal.SIGKILL)
        hold_the_interpreter()

@app.task
def reads(order: Order):
    begin()

@app.task(isolate=True, timeout="4s", max_attempts=1)
def alone():
    begin().progress(1)
    while not os.path.exists("go"):
        threading.Event().wait(0.01)
"""


class Play(Project):
    def enqueue(self, task: str, **options: Any) -> int:
        made = self.app.task(name=f"play.{task}", **options)(lambda: None)
        return self.app.enqueue(made.new()).id

    def ran(self, id: int) -> list[int]:
        """The process of each start of a job."""
        return [int(pid) for job, pid, _ in self.lines() if int(job) == id]

    def working(self, *options: str, ready: bool = True) -> Any:
        return super().working("-c", "1", "--stuck-after", "6s", *options, ready=ready)

    def is_well(self, file: Path) -> bool:
        return self.run("health", str(file), "--max-age", "4s").returncode == 0

    def state(self) -> str:
        (worker,) = self.app.workers.list()
        return worker.state

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        given = [sys.executable, "-m", "sqlq", "-d", self.url, *command]
        return subprocess.run(given, capture_output=True, text=True, check=False, cwd=self.folder)


@pytest.fixture
def play(tmp_path: Path, database_url: str) -> Iterator[Play]:
    with Play(tmp_path / "play", database_url, MODULE) as play:
        yield play


def is_replaced(worker: WorkerProcess, pid: int) -> bool:
    return pid not in worker.children() and len(worker.children()) == 1


def test_a_process_that_holds_the_interpreter_past_a_timeout_is_killed(play: Play) -> None:
    job, behind = play.enqueue("late_once", timeout="1s", max_attempts=1), play.enqueue("quick")
    with play.working() as worker:
        failed = play.ended(job)
        assert (failed.state, failed.reason, failed.attempts) == ("failed", "timeout", 1)
        assert failed.exception == "sqlq.errors.JobTimeoutError"
        ((stuck,), (pid,)) = play.ran(job), (wait_until(lambda: play.ran(behind)) or [0])
        assert pid != stuck
        assert play.ended(behind).state == "finished"
        lines = [line for line in worker.log.read_text().splitlines() if f"worker process {stuck}" in line]
        assert f"it runs jobs [{job}]" in lines[0]
        assert "it is killed" in lines[1]
        assert all("WARNING" in line for line in lines[:2])


def test_a_frozen_process_is_killed_and_its_late_job_runs_again_alone(play: Play) -> None:
    job = play.enqueue("late", timeout="1s", backoff="0s")
    with play.working() as worker:
        (pid,) = wait_until(lambda: play.ran(job), what="the job running")
        os.kill(pid, signal.SIGSTOP)
        wait_until(partial(is_replaced, worker, pid), what="its replacement")
        done = play.ended(job)
        assert (done.state, done.attempts, reasons(done)) == ("finished", 2, ["timeout"])
        assert play.ran(job)[1] not in worker.children(), "the next attempt has a process of its own"


def test_a_frozen_process_is_killed_whose_job_has_no_timeout(play: Play) -> None:
    job = play.enqueue("holds")
    with play.working() as worker:
        done = play.ended(job)
        assert (done.state, done.attempts, reasons(done)) == ("finished", 2, ["worker_lost"])
        assert "gave no sign of life" in done.errors[0]["message"]
        assert worker.said(f"it runs jobs [{job}]")


@pytest.mark.parametrize("how", ["kills", "holds"])
def test_a_process_that_dies_reading_arguments_costs_that_job_its_attempts(play: Play, how: str) -> None:
    made = play.app.task(name="play.reads", max_attempts=2, backoff="0s", timeout="1s")(lambda order: None)
    job, behind = play.app.enqueue(made.new({"how": how})).id, play.enqueue("quick")
    with play.working("--stuck-after", "10m" if how == "kills" else "6s") as worker:
        failed = play.ended(job)
        assert (failed.state, failed.attempts, failed.releases) == ("failed", 2, 0)
        assert reasons(failed)[0] == "worker_lost"
        assert (done := play.ended(behind)).state == "finished"
        assert (done.attempts, done.errors) == (1, [])
        assert worker.log.read_text().count("another takes its place") == 1, "its second attempt is alone"


@pytest.mark.slow
def test_a_frozen_process_is_killed_that_locks_jobs(play: Play) -> None:
    job = play.enqueue("locks")
    with play.working():
        wait_until(lambda: play.ran(job), what="the job running")
        # on SQLite it holds the lock of the whole file
        behind = play.enqueue("quick")
        assert play.ended(behind).attempts == 1
        assert reasons(play.ended(job)) == ["worker_lost"]


@pytest.mark.slow
def test_a_frozen_process_that_runs_nothing_is_replaced(play: Play) -> None:
    with play.working("--stuck-after", "10m") as worker:
        (pid,) = worker.children()
        wait_until(lambda: play.state() == "idle", what="it being at work")
        os.kill(pid, signal.SIGSTOP)
        wait_until(partial(is_replaced, worker, pid), timeout=120, what="its replacement")
        assert play.ended(play.enqueue("quick")).attempts == 1


def test_a_process_of_a_single_job_is_watched_while_its_worker_is_frozen(play: Play) -> None:
    job = play.enqueue("alone", isolate=True, timeout="4s", max_attempts=1)
    with play.working() as worker:
        (child,) = worker.children()
        # the child writes it after its start, which its worker has noted by then
        wait_until(lambda: play.app.jobs.get(job).progress is not None, what="the job's progress")
        os.kill(child, signal.SIGSTOP)
        failed = play.ended(job)
        assert (failed.state, failed.reason) == ("failed", "timeout")


@pytest.mark.slow
def test_a_silent_process_is_shown_and_not_killed_when_it_goes_on(play: Play) -> None:
    job = play.enqueue("waits")
    with play.working("--stuck-after", "90s") as worker:
        (pid,) = wait_until(lambda: play.ran(job), what="the job running")
        with play.app.database.begin():  # on SQLite it is not frozen while it holds the write lock
            os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: play.state() == "stuck", timeout=80, what="its state")
        (found,) = [found for found in examine(play.app.database) if found.check == "stuck"]
        assert f"pid {pid} is stuck" in found.said
        assert f"job {job} (play.waits)" in found.said
        os.kill(pid, signal.SIGCONT)
        assert worker.said("interpreter lock")
        wait_until(lambda: play.state() == "busy", what="its state again")
        (play.folder / "go").touch()
        assert play.ended(job).attempts == 1
        assert worker.children() == [pid]


@pytest.mark.slow
def test_a_process_is_not_stuck_after_the_machine_slept(play: Play) -> None:
    job = play.enqueue("late", timeout="1s")
    waiting = play.enqueue("waits")
    with play.working("-c", "2") as worker:
        wait_until(lambda: play.ran(job), what="the job with a timeout running")
        (pid,) = wait_until(lambda: play.ran(waiting), what="the job running")
        for each in (pid, worker.process.pid):
            os.kill(each, signal.SIGSTOP)
        let_pass(9, "a process that is frozen alone is dead by then")
        os.kill(worker.process.pid, signal.SIGCONT)
        passed = time.monotonic()
        os.kill(pid, signal.SIGCONT)
        assert time.monotonic() - passed < 2
        (play.folder / "go").touch()
        assert reasons(play.ended(job)) == ["timeout"]
        assert play.ended(waiting).attempts == 1
        assert not worker.said("is stuck")
        assert worker.children() == [pid]


@pytest.mark.slow
def test_a_process_that_never_starts_is_unhealthy(play: Play) -> None:
    (play.folder / "hangs").touch()
    alive = play.folder / "alive"
    options = ("--health-file", str(alive), "--start-timeout", "5s", "--stuck-after", "10m")
    with play.working(*options, ready=False) as worker:
        wait_until((play.folder / "importing.txt").exists, what="the import")
        assert play.is_well(alive)
        wait_until(lambda: not play.is_well(alive), what="its age")
        assert worker.log.read_text().count("has not begun to work") == 1
        (play.folder / "hangs").unlink()
        worker.wait_ready()
        wait_until(
            lambda: play.run("health", str(alive), "--max-age", "4s").returncode == 0, what="its youth"
        )
        assert play.ended(play.enqueue("quick")).state == "finished"
        assert worker.stop() == 0
