"""`sqlq work` as processes: a supervisor, the workers it watches, and theirs. They are killed, and nothing is
lost."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import psutil
import pytest
from sqlalchemy import text

from sqlq.worker.supervise.supervisor import notify
from tests.faults.account import record
from tests.kit import needs, wait_until
from tests.kit.processes import WorkerProcess, is_alive, reasons, run_program
from tests.kit.scenario import Scenario

pytestmark = pytest.mark.integration


@pytest.fixture
def play(tmp_path: Path, database_url: str) -> Iterator[Scenario]:
    with Scenario(tmp_path / "play", database_url, "play", anew=True) as play:
        yield play


@pytest.mark.parametrize(
    ("kills", "processes"), [(3, 1), *(pytest.param(25, n, marks=pytest.mark.slow) for n in (1, 2))]
)
def test_the_jobs_of_a_dead_process_are_released_at_once(play: Scenario, kills: int, processes: int) -> None:
    """Not when the lease runs out, which takes 30 s here."""
    seconds = []
    with play.working("--lease", "30s", "-p", str(processes)) as worker:
        for _ in range(kills):
            (play.folder / "go").unlink(missing_ok=True)
            waiting = play.enqueue("wait")
            wait_until(partial(play.starts, waiting), what="the job running")
            (first,) = play.starts(waiting)
            killed_at = time.monotonic()
            os.kill(first.pid, signal.SIGKILL)
            wait_until(partial(play.started, waiting, 2), timeout=20, what="its next start")
            following = play.starts(waiting)[1]
            assert following.pid not in worker.children(), "the next attempt runs alone"
            seconds.append(following.at - killed_at)
            play.wait_done()
            done = play.app.jobs.get(waiting)
            assert (done.attempts, reasons(done), done.releases) == (2, ["worker_lost"], 0)
    record("recovery of a killed process", cases=kills, recovery_seconds=seconds)
    assert max(seconds) < 15


def test_a_worker_goes_on_when_its_fork_server_was_killed(play: Scenario) -> None:
    waiting = play.enqueue("wait")
    with play.working("--log-level", "debug") as worker:
        wait_until(partial(play.starts, waiting), what="the job running")
        (server,) = psutil.Process(worker.process.pid).children()
        assert server.name() == "sqlq-forks"
        pid = play.starts(waiting)[0].pid
        server.kill()
        with pytest.raises(psutil.TimeoutExpired):
            psutil.Process(pid).wait(0.5)
        assert play.app.jobs.get(waiting).attempts == 1, "its worker runs on"
        os.kill(pid, signal.SIGKILL)
        wait_until(partial(play.started, waiting, 2), timeout=60, what="its next start")
        assert worker.said("a process starts anew: ")
        play.touch("go")
        play.wait_done()
        assert worker.stop() == 0


def test_a_poison_job_ends_as_worker_lost_and_harms_no_other(play: Scenario) -> None:
    good = [play.new("work").set(max_attempts=3) for _ in range(500)]
    poison = play.new("poison")
    jobs = play.app.enqueue_many(
        [*good[:5], poison, *good[5:200], poison, *good[200:400], poison, *good[400:]]
    )
    poisons = {job.id for job in jobs if job.task.endswith(".poison")}
    with play.working():
        play.wait_done(timeout=120)
    starts = Counter(note.job for note in play.notes())
    failed = {job.id: job for job in play.app.jobs.list(state="failed", limit=1000)}
    assert failed.keys() == poisons
    for id in poisons:
        assert (failed[id].attempts, failed[id].reason) == (3, "worker_lost")
        # an attempt counts before its process is up: without a start where its worker dies just then
        assert 2 <= starts[id] <= 3
        assert reasons(failed[id]) == ["worker_lost", "worker_lost"]
        others = [note.pid for note in play.starts(id)][1:]
        assert len(set(others)) == len(others), "after the first, each attempt had a process of its own"
    assert all(starts[job.id] >= 1 for job in jobs)
    record("poison", cases=len(jobs), lost=len(failed) - 3)


def test_children_stop_when_their_supervisor_is_killed(play: Scenario) -> None:
    running = play.enqueue("wait")
    with play.working("-p", "2", "--grace", "1s") as worker:
        wait_until(lambda: play.starts(running), what="the job running")
        children = worker.children()
        assert len(children) == 2
        worker.process.send_signal(signal.SIGKILL)
        worker.process.wait(10)
        wait_until(lambda: not any(map(is_alive, children)), timeout=60, what="the children gone")
        assert worker.said("the supervisor is gone")
    row = play.app.jobs.get(running)
    assert (row.state, row.attempts) == ("available", 0)


@needs("cheap")
def test_an_isolated_handler_that_goes_on_past_its_timeout_is_killed(play: Scenario) -> None:
    late, done, gone = play.enqueue("alone_too_long"), play.enqueue("alone"), play.enqueue("alone_and_gone")
    other = play.enqueue("work")
    with play.working() as worker:
        play.wait_done()
        (child,) = worker.children()
        failed = play.app.jobs.get(late)
        assert (failed.state, failed.reason, failed.attempts) == ("failed", "timeout", 1)
        lost = play.app.jobs.get(gone)
        assert (lost.state, lost.reason) == ("failed", "worker_lost")
        assert lost.message == "the process of its own in which this job ran exited with code 5"
        pids = [note.pid for note in play.starts(late)]
        assert len(pids) == 2, "it was asked once"
        (pid,) = set(pids)
        assert pid != child
        assert not is_alive(pid)
        assert play.app.jobs.get(done).result not in (None, child)
        assert play.starts(other)[0].pid == child, "the others never noticed"


@needs("cheap")
def test_a_thread_past_its_timeout_ends_its_process_but_no_other_job(play: Scenario) -> None:
    stuck, waiting = play.enqueue("stuck"), play.enqueue("wait")
    with play.working() as worker:
        wait_until(lambda: worker.said("goes on past its timeout"), what="the thread noticed")
        (first,) = {note.pid for note in [*play.starts(stuck), *play.starts(waiting)]}
        later = play.enqueue("work")
        wait_until(lambda: play.starts(later), what="a replacement at work")
        assert play.starts(later)[0].pid != first, "it takes no new jobs"
        assert is_alive(first), "another job still runs there"
        play.touch("go")
        wait_until(lambda: not is_alive(first), what="the process ended")
        play.wait_done()
    assert (play.app.jobs.get(stuck).state, play.app.jobs.get(stuck).reason) == ("failed", "timeout")
    assert (play.app.jobs.get(waiting).state, play.app.jobs.get(waiting).attempts) == ("finished", 1)


@needs("cheap")
def test_a_process_ends_although_a_coroutine_left_a_thread(play: Scenario) -> None:
    """Python waits for it at the exit of a process, without end."""
    job = play.enqueue("leaves_a_thread")
    with play.working("--max-jobs", "1") as worker:
        wait_until(lambda: play.starts(job), what="the job running")
        (pid,) = [note.pid for note in play.starts(job)]
        wait_until(lambda: not is_alive(pid), what="the process ended")
        assert (play.app.jobs.get(job).state, play.app.jobs.get(job).reason) == ("failed", "timeout")
        assert worker.said("a thread that a handler has started does not end")
        assert (play.folder / "left.txt").exists(), "what is called at exit was called"
        assert worker.stop() == 0
        assert not worker.said("its jobs are given back")


@pytest.mark.variants
@needs("cheap")
def test_children_are_recycled_and_no_job_notices(play: Scenario) -> None:
    with play.working("--max-jobs", "20") as worker:
        for times in range(4):
            jobs = play.app.enqueue_many([play.new("work") for _ in range(20)])
            play.wait_done()
            assert all(play.app.jobs.get(job.id).attempts == 1 for job in jobs)
            replaced = partial(lambda most: worker.log.read_text().count("takes its place") > most, times)
            wait_until(replaced, what="a process replaced")
        assert worker.stop() == 0
    assert len({note.pid for note in play.notes()}) > 1
    assert "Traceback" not in worker.log.read_text()


@needs("cheap")
def test_signals_to_the_whole_group_stop_in_good_order(play: Scenario) -> None:
    """`timeout` and some process managers signal their child and its group. Signals at the same time count
    once. Those of the same number may be merged on the way, so these differ."""
    job = play.enqueue("wait")
    with play.working("-p", "2") as worker:
        wait_until(lambda: play.starts(job), what="the job running")
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            os.killpg(worker.process.pid, number)
        wait_until(lambda: worker.said("once more stops at once"), what="the signal noticed")
        play.touch("go")
        assert worker.process.wait(30) == 0
    assert (play.app.jobs.get(job).state, play.app.jobs.get(job).attempts) == ("finished", 1)
    assert not worker.said("stopped at once")
    assert not worker.said("Traceback")


@needs("cheap")
def test_a_hang_up_under_nohup_is_ignored(play: Scenario) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with play.working() as worker:
            signal.signal(signal.SIGHUP, before)
            worker.process.send_signal(signal.SIGHUP)
            play.touch("go")
            play.enqueue("wait")
            play.wait_done()
            assert not worker.said("stopping")
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("runs", ["nothing", "wait", "deaf"])
def test_the_supervisor_exits_when_the_grace_time_is_over(play: Scenario, runs: str) -> None:
    """One handler observes `cancelled`, another does not and cannot be stopped. Both jobs are released."""
    grace = 0 if runs == "nothing" else 1
    with play.working("--grace", "1s") as worker:
        given_back = [play.enqueue(runs)] if runs != "nothing" else []
        for job in given_back:
            wait_until(partial(play.starts, job), what="the job running")
        told = time.monotonic()
        assert worker.stop() == 0
        seconds = time.monotonic() - told - grace
    record("leaving when told to", exit_seconds=[max(0.0, seconds)])
    assert seconds < 15
    for job in given_back:
        row = play.app.jobs.get(job)
        assert (row.state, row.attempts, row.releases) == ("available", 0, 1)
    assert "Traceback" not in worker.log.read_text()


@needs("cheap")
@pytest.mark.parametrize("answers", [True, False], ids=["answers", "is_locked"])
def test_a_second_signal_stops_at_once_and_gives_jobs_back(play: Scenario, answers: bool) -> None:
    """It gives them back unless its database does not answer."""
    job = play.enqueue("wait")
    with play.working() as worker, ExitStack() as until_the_end:
        wait_until(lambda: play.starts(job), what="the job running")
        (child,) = worker.children()
        if not answers:
            until_the_end.enter_context(play.engine.connect()).execute(text("BEGIN IMMEDIATE"))
        worker.process.send_signal(signal.SIGTERM)
        wait_until(lambda: worker.said("once more stops at once"), what="the first signal noticed")

        def asked_again() -> bool:
            worker.process.send_signal(signal.SIGTERM)
            return worker.process.poll() is not None

        wait_until(asked_again, what="it leaving, once the repeat is no part of the first request")
        assert worker.process.wait(10) == 128 + signal.SIGTERM
        wait_until(lambda: not is_alive(child), what="the child gone")
        assert worker.said("when its lease has run out") is not answers
    assert play.app.jobs.get(job).state == ("available" if answers else "running")


@needs("cheap")
def test_children_that_cannot_start_end_the_supervisor(play: Scenario) -> None:
    with play.working() as worker:
        play.touch("broken")
        os.kill(worker.children()[0], signal.SIGKILL)
        assert worker.process.wait(60) == 1
        assert worker.said("5 worker processes in a row exited with code 3 before they were ready: giving up")


@needs("cheap")
def test_an_app_that_cannot_be_imported_is_logged_once(play: Scenario) -> None:
    (play.folder / "broken_shop.py").write_text("import nowhere")
    worker = WorkerProcess(play.folder, "broken_shop:app", play.url, anew=True)
    assert worker.process.wait(30) == 1
    assert len([line for line in worker.log.read_text().splitlines() if " metrics at " not in line]) == 1
    assert worker.said("cannot be imported")


@needs("cheap")
def test_the_health_file_shows_whether_the_supervisor_runs(play: Scenario) -> None:
    def healthy(*options: str) -> int:
        return run_program("-m", "sqlq", "health", "alive", *options, cwd=play.folder).returncode

    assert healthy() == 1
    with play.working("--health-file", "alive") as worker:
        wait_until((play.folder / "alive").exists, what="a sign of life")
        assert healthy() == 0
        worker.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: healthy("--max-age", "1s") == 1, what="the lack of it noticed")
        worker.process.send_signal(signal.SIGCONT)
        wait_until(lambda: healthy("--max-age", "2s") == 0, what="life again")


@pytest.mark.parametrize("address", ["notify", "@sqlq-test"])
@needs("cheap")
def test_systemd_learns_when_the_workers_work_and_that_the_supervisor_lives(
    play: Scenario, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        name = f"{address}-{os.getpid()}" if address[0] == "@" else str(play.folder / address)
        manager.bind(f"\0{name[1:]}" if name[0] == "@" else name)
        manager.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", name)

        def said(wanted: bytes) -> list[bytes]:
            states = [manager.recv(99)]
            while states[-1] != wanted:
                states.append(manager.recv(99))
            return states

        with play.working("-p", "2") as worker:
            assert b"STOPPING=1" not in said(b"READY=1")
            assert len(play.app.workers.list()) == 2, "both work when it is ready"
            said(b"WATCHDOG=1")
            said(b"WATCHDOG=1")
            worker.process.send_signal(signal.SIGTERM)
            assert b"READY=1" not in said(b"STOPPING=1")


def test_a_manager_that_is_deaf_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        for _ in range(10_000):  # more than the socket holds
            notify("WATCHDOG=1")
        assert manager.recv(99) == b"WATCHDOG=1"
    notify("READY=1")  # nobody is there
