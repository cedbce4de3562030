"""A stuck worker process is killed and replaced, and its jobs go on; one that only seems stuck is left alone.

It is stuck when it is frozen, or in a call that holds the interpreter's lock.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from sqlq.admin.doctor.doctor import examine
from tests.kit import let_pass, wait_until
from tests.kit.processes import WorkerProcess, reasons, run_program
from tests.kit.scenario import Scenario

pytestmark = pytest.mark.integration


def pids(play: Scenario, id: int) -> list[int]:
    """Return the process of each start of a job."""
    return [note.pid for note in play.starts(id)]


def is_well(play: Scenario, file: Path) -> bool:
    done = run_program("-m", "sqlq", "-d", play.url, "health", str(file), "--max-age", "4s", cwd=play.folder)
    return done.returncode == 0


def state(play: Scenario) -> str:
    (worker,) = play.app.workers.list()
    return worker.state


@pytest.fixture
def play(tmp_path: Path, database_url: str) -> Iterator[Scenario]:
    options = ("-c", "1", "--stuck-after", "6s")
    with Scenario(tmp_path / "play", database_url, "play", *options, anew=True) as play:
        yield play


def is_replaced(worker: WorkerProcess, pid: int) -> bool:
    return pid not in worker.children() and len(worker.children()) == 1


def test_a_process_that_holds_the_interpreter_past_a_timeout_is_killed(play: Scenario) -> None:
    job, behind = play.enqueue("late_once"), play.enqueue("work")
    with play.working() as worker:
        failed = play.ended(job)
        assert (failed.state, failed.reason, failed.attempts) == ("failed", "timeout", 1)
        assert failed.exception == "sqlq.errors.JobTimeoutError"
        ((stuck,), (pid,)) = pids(play, job), (wait_until(lambda: pids(play, behind)) or [0])
        assert pid != stuck
        assert play.ended(behind).state == "finished"
        log = worker.log.read_text().splitlines()
        runs, killed, *_ = [line for line in log if f"worker process {stuck}" in line]
        assert f"it runs jobs [{job}]" in runs
        assert "it is killed" in killed
        assert "WARNING" in runs
        assert "WARNING" in killed


def test_a_frozen_process_is_killed_and_its_late_job_runs_again_alone(play: Scenario) -> None:
    job = play.enqueue("late")
    with play.working() as worker:
        (pid,) = wait_until(lambda: pids(play, job), what="the job running")
        os.kill(pid, signal.SIGSTOP)
        wait_until(partial(is_replaced, worker, pid), what="its replacement")
        done = play.ended(job)
        assert (done.state, done.attempts, reasons(done)) == ("finished", 2, ["timeout"])
        assert pids(play, job)[1] not in worker.children(), "the next attempt has a process of its own"


def test_a_frozen_process_is_killed_whose_job_has_no_timeout(play: Scenario) -> None:
    job = play.enqueue("holds")
    with play.working() as worker:
        done = play.ended(job)
        assert (done.state, done.attempts, reasons(done)) == ("finished", 2, ["worker_lost"])
        assert "gave no sign of life" in done.errors[0]["message"]
        assert worker.said(f"it runs jobs [{job}]")


@pytest.mark.parametrize("how", ["kills", "holds"])
def test_a_process_that_dies_reading_arguments_costs_that_job_its_attempts(play: Scenario, how: str) -> None:
    job = play.app.enqueue(play.app.named("tests.programs.play.reads").new({"how": how})).id
    behind = play.enqueue("work")
    with play.working("--stuck-after", "10m" if how == "kills" else "6s") as worker:
        failed = play.ended(job)
        assert (failed.state, failed.attempts, failed.releases) == ("failed", 2, 0)
        assert reasons(failed)[0] == "worker_lost"
        assert (done := play.ended(behind)).state == "finished"
        assert (done.attempts, done.errors) == (1, [])
        assert worker.log.read_text().count("another takes its place") == 1, "its second attempt is alone"


@pytest.mark.slow
def test_a_frozen_process_is_killed_that_locks_jobs(play: Scenario) -> None:
    job = play.enqueue("locks")
    with play.working():
        wait_until(lambda: pids(play, job), what="the job running")
        # on SQLite it holds the lock of the whole file
        behind = play.enqueue("work")
        assert play.ended(behind).attempts == 1
        assert reasons(play.ended(job)) == ["worker_lost"]


@pytest.mark.slow
def test_a_frozen_process_that_runs_nothing_is_replaced(play: Scenario) -> None:
    with play.working("--stuck-after", "10m") as worker:
        (pid,) = worker.children()
        wait_until(lambda: state(play) == "idle", what="it being at work")
        os.kill(pid, signal.SIGSTOP)
        wait_until(partial(is_replaced, worker, pid), timeout=120, what="its replacement")
        assert play.ended(play.enqueue("work")).attempts == 1


def test_a_process_of_a_single_job_is_watched_while_its_worker_is_frozen(play: Scenario) -> None:
    job = play.enqueue("alone_in_progress")
    with play.working() as worker:
        (child,) = worker.children()
        # the child writes it after its start, which its worker has noted by then
        wait_until(lambda: play.app.jobs.get(job).progress is not None, what="the job's progress")
        os.kill(child, signal.SIGSTOP)
        failed = play.ended(job)
        assert (failed.state, failed.reason) == ("failed", "timeout")


@pytest.mark.slow
def test_a_silent_process_is_shown_and_not_killed_when_it_goes_on(play: Scenario) -> None:
    job = play.enqueue("waits")
    with play.working("--stuck-after", "90s") as worker:
        (pid,) = wait_until(lambda: pids(play, job), what="the job running")
        with play.app.database.begin():  # on SQLite it is not frozen while it holds the write lock
            os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: state(play) == "stuck", timeout=80, what="its state")
        (found,) = [found for found in examine(play.app.database) if found.check == "stuck"]
        assert f"pid {pid} is stuck" in found.said
        assert f"job {job} (tests.programs.play.waits)" in found.said
        os.kill(pid, signal.SIGCONT)
        assert worker.said("interpreter lock")
        wait_until(lambda: state(play) == "busy", what="its state again")
        (play.folder / "go").touch()
        assert play.ended(job).attempts == 1
        assert worker.children() == [pid]


@pytest.mark.slow
def test_a_process_is_not_stuck_after_the_machine_slept(play: Scenario) -> None:
    job = play.enqueue("late")
    waiting = play.enqueue("waits")
    with play.working("-c", "2") as worker:
        wait_until(lambda: pids(play, job), what="the job with a timeout running")
        (pid,) = wait_until(lambda: pids(play, waiting), what="the job running")
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
def test_a_process_that_never_starts_is_unhealthy(play: Scenario) -> None:
    (play.folder / "hangs").touch()
    alive = play.folder / "alive"
    options = ("--health-file", str(alive), "--start-timeout", "5s", "--stuck-after", "10m")
    with play.working(*options, ready=False) as worker:
        wait_until((play.folder / "importing.txt").exists, what="the import")
        assert is_well(play, alive)
        wait_until(lambda: not is_well(play, alive), what="its age")
        assert worker.log.read_text().count("has not begun to work") == 1
        (play.folder / "hangs").unlink()
        worker.wait_ready()
        wait_until(lambda: is_well(play, alive), what="its youth")
        assert play.ended(play.enqueue("work")).state == "finished"
        assert worker.stop() == 0
