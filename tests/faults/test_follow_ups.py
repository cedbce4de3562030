"""Workers are killed in the middle of everything: each job that ends is followed once, whoever ended it."""

from __future__ import annotations

import os
import random
import signal
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import Engine, text

import sqlq
from tests.faults import effects
from tests.faults.follow_ups import count_followed
from tests.kit import wait_until
from tests.kit.processes import WorkerProcess, worker_process

pytestmark = pytest.mark.integration

MODULE = """
import os, signal
import sqlq
from tests.faults.effects import have_effect
app = sqlq.App()

@app.task(queue="follow", max_attempts=50, backoff="0s")
def follow(ended: sqlq.JobOutcome) -> None: note(ended.id)

def note(n):
    fd = os.open("ran.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, f"{n}\\n".encode())
    os.close(fd)

followed = {"on_success": follow, "on_failure": follow, "backoff": "0s", "max_attempts": 50}

@app.task(**followed)
def finishes(n): note(n)

@app.task(**followed)
def completes(n):
    note(n)
    have_effect()

@app.task(isolate=True, **followed)
def completes_alone(n): completes(n)

@app.task(**{**followed, "max_attempts": 2})
def fails(n):
    note(n)
    raise ValueError(n)

@app.task(**{**followed, "max_attempts": 1})
def dies(n):
    note(n)
    os.kill(os.getpid(), signal.SIGKILL)

@app.task(**followed)
def cancels(n): raise sqlq.Cancel("not wanted")
"""
KINDS = ("finishes", "completes", "fails", "finishes", "cancels")


FOLLOWER = '{"task": "followed.follow", "queue": "follow"}'


def new_job(kind: str, n: int) -> sqlq.NewJob:
    attempts = {"fails": 2, "dies": 1}.get(kind, 50)
    return sqlq.NewJob(f"followed.{kind}", f'{{"args": [{n}]}}', "default", attempts)


def followed_once(
    app: sqlq.App, engine: Engine, folder: Path, url: str, *, number: int, kills: int, dying: int, seed: int
) -> None:
    chance = random.Random(seed)
    folder.mkdir()
    (folder / "followed.py").write_text(MODULE)
    effects.create(engine)
    new = [new_job(KINDS[n % len(KINDS)], n) for n in range(number)] + [new_job("dies", -1)] * dying
    new += [new_job("completes_alone", -2)] * dying
    chance.shuffle(new)
    # The row names the callback, or the worker that ends the job knows it of its task. Whoever finds a job
    # that has lost its worker for the last time knows no task.
    app.enqueue_many(
        [
            replace(job, on_success=FOLLOWER, on_failure=FOLLOWER)
            if i % 2 or (job.max_attempts or 0) < 50
            else job
            for i, job in enumerate(new)
        ]
    )
    ran = folder / "ran.txt"

    def is_past(lines: int) -> bool:
        return ran.exists() and ran.read_bytes().count(b"\n") >= lines

    def is_done() -> bool:
        with engine.connect() as conn:
            return bool(conn.execute(text("SELECT count(*) = 0 FROM jobs")).scalar_one())

    def kill_one(worker: WorkerProcess) -> None:
        if children := worker.children():
            with suppress(ProcessLookupError):
                os.kill(chance.choice(children), signal.SIGKILL)

    options = ("--lease", "1s", "-p", "2", "-c", "4")
    with worker_process(folder, "followed:app", url, *options) as first:
        for kill in range(1, kills + 1):
            wait_until(partial(is_past, kill * number // (kills + 2)), timeout=90, what="some more jobs")
            kill_one(first)
        wait_until(partial(is_past, number // 2), timeout=90, what="half of the jobs")
        first.kill()  # the supervisor, too: the rest of it is for a rescue
    with worker_process(folder, "followed:app", url, *options):
        wait_until(is_done, timeout=180, what="all jobs done, and what follows them")
    count_followed(
        "G14: follow-ups of jobs whose workers are killed",
        app.jobs.list(queue="default", limit=10_000),
        app.jobs.list(queue="follow", limit=10_000),
    )
    committed = effects.committed(engine)
    completed = [
        job.id
        for task in ("completes", "completes_alone")
        for job in app.jobs.list(task=f"followed.{task}", state="finished", limit=10_000)
    ]
    assert committed == sorted(completed), "with the effect, the end and what follows it"


def test_each_job_gets_one_callback_while_workers_are_killed(
    app: sqlq.App, engine: Engine, tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(effects.VARIABLE, database_url)
    followed_once(app, engine, tmp_path / "work", database_url, number=80, kills=2, dying=1, seed=20_261_122)


@pytest.mark.slow
def test_each_of_many_jobs_gets_one_callback_while_workers_are_killed(
    app: sqlq.App, engine: Engine, tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(effects.VARIABLE, database_url)
    seed = int.from_bytes(os.urandom(4))
    print(f"seed {seed}")
    followed_once(app, engine, tmp_path / "work", database_url, number=1_000, kills=30, dying=5, seed=seed)
