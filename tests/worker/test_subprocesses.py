"""Processes for one job at a time, which of them is kept for the next job, and what forks them."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import sqlq
from sqlq.model.outcome import Outcome
from sqlq.worker.attempt.attempt import Attempt
from sqlq.worker.settle.settle import Counts, Settler
from tests.kit import for_each, needs, wait_until, worker_of
from tests.kit.command import Command
from tests.kit.isolated import DEAF, Spawned
from tests.kit.processes import ROOT, worker_process
from tests.kit.workers import listening


@needs("cheap")
def test_a_subprocess_ends_before_its_job_is_released(app: sqlq.App, monkeypatch: pytest.MonkeyPatch) -> None:
    spawned = Spawned(DEAF)
    settled: list[list[bool]] = []
    settle = Settler.settle

    def noted(settler: Settler, job: Attempt, outcome: Outcome) -> None:
        settled.append(spawned.ended())
        settle(settler, job, outcome)

    monkeypatch.setattr(Settler, "settle", noted)
    with closing(spawned.isolates):
        app.enqueue(app.task(name="t", isolate=True)(lambda: None).new())
        told = listening(app)
        with worker_of(app, isolates=spawned.isolates, grace="0s") as worker:
            wait_until(lambda: told, what="it has started")
    assert settled == [[True]]
    assert worker.counts == Counts(released=1)


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
    assert (app.jobs.get(cancelled.id).state, app.jobs.get(late.id).reason) == ("cancelled", "timeout")
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
    args = [sys.executable, "-m", "tests.programs.fork_server", what]
    done = subprocess.run(args, cwd=ROOT, capture_output=True, text=True, check=False, start_new_session=True)
    assert done.returncode == 0, done.stderr
