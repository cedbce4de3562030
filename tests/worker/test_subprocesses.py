"""Processes for one job at a time, which of them is kept for the next job, and what forks them."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

import sqlq
from sqlq.config.constants import MAX_RELEASES
from sqlq.model.outcome import Finished, Outcome, Released, Retried, SelfCompleted
from sqlq.worker.attempt.attempt import Attempt
from sqlq.worker.run import isolated
from sqlq.worker.run.executor import Executor
from sqlq.worker.run.isolated import NOT_STARTED_MS
from sqlq.worker.settle.settle import Counts, Settler
from tests.kit import for_each, needs, run_isolated, wait_until, worker_of
from tests.kit.command import Command
from tests.kit.isolated import DEAF, HANGS, ISOLATE, Spawned
from tests.kit.processes import ROOT, worker_process
from tests.kit.workers import listening


@pytest.fixture
def spawned() -> Iterator[type[Spawned]]:
    made: list[Spawned] = []

    class Noted(Spawned):
        def __init__(self, *program: str, **options: Any) -> None:
            super().__init__(*program, **options)
            made.append(self)

    yield Noted
    for each in made:
        each.isolates.close()


def test_a_job_that_needs_its_own_process_gets_an_unused_one(spawned: type[Spawned]) -> None:
    some = spawned()
    assert some.run() == Finished()
    assert some.run(alone=True) == Finished()
    assert len(some.processes) == 2
    wait_until(lambda: some.ended() == [False, True], timeout=30, what="the process of one job having ended")
    assert some.run() == Finished()
    assert some.run() == Finished()
    assert some.ended() == [False, True], "the other one is kept"


def test_few_subprocesses_start_at_a_time(spawned: type[Spawned]) -> None:
    some = spawned(at_a_time=2)
    first, *others = [some.job() for _ in range(3)]
    assert [some.isolates.let_in(job) for job in (first, *others)] == [True, True, False]
    some.isolates.let_out(first)
    assert some.isolates.let_in(others[-1])


@pytest.mark.parametrize("says", [b"no JSON\n", b'{"outcome": {"is": "of another release"}}\n'])
def test_a_subprocess_with_an_unreadable_message_is_killed_and_its_job_lost(
    spawned: type[Spawned], says: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    some = spawned(ISOLATE.replace("link.send(outcome=", f"link._socket.sendall({says!r}); dict(a="))
    lost = some.run()
    assert isinstance(lost, SelfCompleted)
    assert isinstance(lost.otherwise, Retried)
    assert lost.otherwise.reason == "worker_lost"
    assert "job 1: what its process says cannot be read; the process is killed" in caplog.text
    assert some.ended() == [True]


def test_a_job_is_due_at_once_when_its_process_dies_and_later_when_it_dies_again(
    spawned: type[Spawned],
) -> None:
    some = spawned(ISOLATE.replace("link.send(outcome=", "sys.exit(3); dict(a="))
    ends: list[Any] = [some.run(attempts=attempts) for attempts in (1, 2)]
    assert [type(end.otherwise) for end in ends] == [Retried, Retried]
    assert ends[0].otherwise.delay_ms == 0
    assert ends[1].otherwise.delay_ms > 0


def test_a_job_is_not_released_for_ever_when_its_subprocess_fails_to_start(spawned: type[Spawned]) -> None:
    some = spawned("raise SystemExit(3)")
    assert some.run() == Released(NOT_STARTED_MS)
    assert isinstance(some.run(releases=MAX_RELEASES), Retried)


def test_a_subprocess_that_hangs_at_its_start_is_killed_and_its_job_released(
    spawned: type[Spawned], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolated, "START_SECONDS", 0.1)
    some = spawned(HANGS)
    assert some.run() == Released(NOT_STARTED_MS)
    assert some.ended() == [True]


def test_a_process_that_has_begun_in_time_is_not_killed_for_its_start(spawned: type[Spawned]) -> None:
    some = spawned(ISOLATE.replace("(began=True)", "(began=True), link.receive()"))

    class Begun(Attempt):
        def mark_started(self) -> None:
            super().mark_started()
            (isolate,) = some.isolates._all
            some.isolates._kill_hanging(isolate, self)  # as the timer that fires now
            isolate.link.send(go=True)

    assert some.run(kind=Begun) == Finished()
    assert some.ended() == [False]


def test_a_job_is_not_released_for_ever_when_no_subprocess_can_start(spawned: type[Spawned]) -> None:
    def none(fd: int) -> subprocess.Popen[bytes]:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    some = spawned()
    some.spawn = none
    assert some.run() == Released(NOT_STARTED_MS)
    assert isinstance(some.run(releases=MAX_RELEASES), Retried)


def test_no_slot_waits_while_a_subprocess_starts(spawned: type[Spawned]) -> None:
    some, may_start, outcomes = spawned(at_a_time=2), threading.Event(), SimpleQueue[Outcome]()
    starting = threading.Semaphore(0)
    spawn = some.spawn

    def slow(fd: int) -> Any:
        starting.release()
        assert may_start.wait(30)
        return spawn(fd)

    some.spawn = slow
    executors = Executor(
        10, lambda _: None, lambda _, outcome: outcomes.put(outcome), lambda: True, some.isolates
    )
    executors.offer([some.job()])
    assert starting.acquire(timeout=30)
    coroutines = [some.job() for _ in range(4)]
    for job in coroutines:
        job.isolated, job.is_async = False, True
    offering = threading.Thread(target=executors.offer, args=([some.job(), *coroutines],))
    offering.start()
    for _ in coroutines:  # of an unknown task
        assert isinstance(outcomes.get(timeout=10), Retried | Released)
    may_start.set()
    assert [outcomes.get(timeout=30) for _ in range(2)] == [Finished()] * 2
    offering.join()
    executors.close()
    wait_until(lambda: some.ended() == [True, True])


def test_a_cancel_waits_for_no_subprocess_that_does_not_read(spawned: type[Spawned]) -> None:
    """The job fills the pipe almost, so that the cancel has no room."""
    some = spawned(DEAF.replace("link.receive()", ""))
    running = some.job()
    running.claimed = running.claimed._replace(payload="x" * 215_000)
    slot = threading.Thread(target=run_isolated, args=(some.isolates, running))
    slot.start()
    wait_until(lambda: running.started, what="the job sent")
    cancelling = threading.Thread(target=running.cancel)
    cancelling.start()
    cancelling.join(10)
    waited = cancelling.is_alive()
    some.isolates.close()
    slot.join(30)
    assert not waited


def test_an_exception_of_the_subprocess_pool_costs_no_slot(
    spawned: type[Spawned], monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(running: Attempt, *_: object) -> Outcome:
        raise SystemExit

    some, outcomes = spawned(), SimpleQueue[Outcome]()
    monkeypatch.setattr(some.isolates, "execute", raises)
    executors = Executor(1, lambda _: None, lambda _, end: outcomes.put(end), lambda: True, some.isolates)
    executors.offer([some.job()])
    assert isinstance(outcomes.get(timeout=30), Retried)
    executors.close()


@needs("cheap")
def test_a_subprocess_is_killed_before_its_job_is_released(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawned = Spawned(DEAF)
    settled: list[list[bool]] = []
    settle = Settler.settle

    def noted(settler: Settler, job: Attempt, outcome: Outcome) -> None:
        settled.append(spawned.ended())
        settle(settler, job, outcome)

    monkeypatch.setattr(Settler, "settle", noted)
    try:
        app.enqueue(app.task(name="t", isolate=True)(lambda: None).new())
        told = listening(app)
        with worker_of(app, isolates=spawned.isolates, grace="0s") as worker:
            wait_until(lambda: told, what="it has started")
        assert settled == [[True]]
        assert worker.counts == Counts(released=1)
    finally:
        spawned.isolates.close()


# -- handlers there ------------------------------------------------------------------------------------------

ALONE = "tests.programs.alone"


def drained(folder: Path, url: str, *options: str) -> str:
    """Run what is available of `tests/programs/alone.py`, and return the log."""
    with worker_process(folder, f"{ALONE}:app", url, "--drain", *options, ready=False) as worker:
        assert worker.process.wait(60) == 0, worker.log.read_text()
    return worker.log.read_text()


@pytest.mark.parametrize(("end", "timeout"), [("late", "5s"), ("gone", "1h")])
@needs("cheap")
def test_a_job_that_completed_itself_is_finished_however_its_attempt_ends(
    app: sqlq.App, tmp_path: Path, database_url: str, end: str, timeout: str
) -> None:
    job = app.enqueue(app.named(f"{ALONE}.completes").new(end).set(timeout=timeout))
    assert "stopped: 1 finished" in drained(tmp_path, database_url)
    assert app.result(job) == "done"


@pytest.mark.parametrize("slots", ["1", "2"])
@needs("cheap")
def test_a_drain_runs_all_that_wait_for_processes_of_their_own(
    app: sqlq.App, tmp_path: Path, database_url: str, slots: str
) -> None:
    """More of them than there are slots, and processes: it gives none back, to be run later."""
    jobs = app.enqueue_many([app.named(f"{ALONE}.own_pid").new()] * 60)
    drained(tmp_path, database_url, "--isolate", "-c", slots)
    found = [app.jobs.get(job.id) for job in jobs]
    assert [(job.state, job.releases) for job in found] == [("finished", 0)] * 60


@needs("cheap")
def test_an_asyncio_task_that_exits_ends_no_process_and_a_coroutine_finds_its_job(
    app: sqlq.App, tmp_path: Path, database_url: str
) -> None:
    exits = app.enqueue(app.named(f"{ALONE}.exits_in_a_task").new())
    jobs = app.enqueue_many([app.named(f"{ALONE}.returns_its_id").new()] * 2)
    drained(tmp_path, database_url, "-c", "1")
    done = app.jobs.get(exits.id)
    assert (done.state, done.reason, done.exception) == ("failed", "error", "SystemExit")
    assert [app.result(job) for job in jobs] == [job.id for job in jobs]


@needs("cheap")
@for_each("task", ["stay", "astay", "returns_astay"])
def test_a_stopped_handler_runs_its_finally_and_its_process_goes_on(
    app: sqlq.App, tmp_path: Path, database_url: str, task: str
) -> None:
    folder, options = tmp_path / task, ("--isolate", "-c", "1", "--grace", "0s")
    new = app.named(f"{ALONE}.{task}").new
    cancelled = app.enqueue(new("cancel"))
    with worker_process(folder, f"{ALONE}:app", database_url, *options) as worker:
        wait_until((folder / "cancel.began").exists, what="the handler running")
        assert app.jobs.cancel([cancelled.id]) == {cancelled.id: "requested"}
        late = app.enqueue(new("late").set(timeout="200ms"))
        next_pid = app.result(app.enqueue(app.named(f"{ALONE}.own_pid").new()), timeout="60s")
        released = app.enqueue(new("stop"))
        wait_until((folder / "stop.began").exists, what="another one running")
        assert worker.stop() == 0
    pids = {(folder / f"{why}.ended").read_text() for why in ("cancel", "late", "stop")}
    assert pids == {str(next_pid)}
    assert app.jobs.get(cancelled.id).state == "cancelled"
    assert app.jobs.get(late.id).reason == "timeout"
    assert app.jobs.get(released.id).reason == "worker_lost", "its only attempt"


PRELOADED = """
import os, socket, sqlite3, threading
from pathlib import Path
import sqlq

with open("imports", "a") as imports:
    imports.write(f"{os.getpid()}\\n")
opened = %s
app = sqlq.App()

@app.task(isolate="fresh")
def fresh() -> int:
    return os.getpid()
"""


@for_each(
    ("opened", "imports"),
    [
        ("open('log', 'a'), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)", 1),
        ("threading.Thread(target=threading.Event().wait, daemon=True).start()", 3),
        ("socket.socketpair()", 3),
        ("sqlite3.connect('other.db')", 3),
    ],
)
@needs("cheap")
def test_subprocesses_are_forked_unless_the_import_has_opened_what_none_can_share(
    app: sqlq.App, tmp_path: Any, database_url: str, opened: str, imports: int
) -> None:
    run = Command(tmp_path, SQLQ_DATABASE_URL=database_url)
    (tmp_path / "shop.py").write_text(PRELOADED % opened)
    (tmp_path / "imports").unlink(missing_ok=True)
    jobs = [app.enqueue(app.named("shop.fresh").new()) for _ in range(2)]
    said = run.work("-c", "1", "--log-level", "debug")
    assert ("no fork server: processes would share " in said.err) is (imports > 1), said.err
    assert len({app.result(job) for job in jobs}) == 2, "nothing passes from one job to the next"
    assert len((tmp_path / "imports").read_text().split()) == imports


@pytest.mark.parametrize("what", ["exit_codes", "descriptors", "owner", "standstill"])
def test_a_fork_server_forks_processes_like_those_that_start_anew(what: str) -> None:
    command = [sys.executable, "-m", "tests.programs.fork_server", what]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, start_new_session=True
    )
    assert done.returncode == 0, done.stderr
