"""A worker that was frozen past its lease wakes after others have taken its jobs: it changes nothing.

`WAYS` of `tests/programs/zombies.py` lists the ways to end. One line there adds one to every test here.

The whole of `sqlq work` is frozen, as a machine is. A live supervisor would go on renewing for a frozen
child, since it would see its death.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text

import sqlq
from sqlq.model.job import ClaimedJob, JobDetails
from sqlq.model.outcome import Finished
from tests import kit
from tests.faults import account, guard
from tests.kit import NOW, claim, committed, failed, wait_until
from tests.kit.processes import WorkerProcess, worker_process
from tests.kit.scenario import Scenario
from tests.programs import effects, zombies
from tests.programs.zombies import WAYS

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def guarded(engine: Engine, database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    guard.install(engine)
    effects.create(engine)
    monkeypatch.setenv(effects.VARIABLE, database_url)


@contextmanager
def frozen(app: sqlq.App, folder: Path, url: str) -> Iterator[WorkerProcess]:
    """A worker of another process that holds a job for each of the ways, frozen in the middle of them."""
    options = ("--lease", "1s", "--grace", "0s", "-c", str(len(WAYS) + 1))
    with worker_process(folder, f"{zombies.__name__}:app", url, *options) as zombie:
        tasks = [app.task(name=way, backoff="0s", max_attempts=4)(lambda: "by the owner") for way in WAYS]
        app.enqueue_many([task.new() for task in tasks])
        started = [folder / f"started {way}" for way in WAYS]
        wait_until(lambda: all(file.exists() for file in started), timeout=60, what="every job running")
        wait_until(lambda: freeze(app, zombie), what="it freezing at a moment at which it holds no lock")
        yield zombie


def freeze(app: sqlq.App, worker: WorkerProcess) -> bool:
    """Freeze a worker with all its processes, unless one is in the middle of a transaction: then nobody could
    take its jobs over."""
    os.killpg(worker.process.pid, signal.SIGSTOP)
    wait_until(lambda: is_stopped(worker), what="all its processes standing still")
    unlocked = "SELECT id FROM jobs FOR UPDATE SKIP LOCKED"
    if is_free(app, f"SELECT count(*) = {len(WAYS)} FROM ({unlocked}) AS unlocked"):
        return True
    os.killpg(worker.process.pid, signal.SIGCONT)
    return False


def is_free(app: sqlq.App, *questions: str) -> bool:
    """Return whether all queries for unlocked rows find one, or on SQLite whether the database has no lock.

    No query waits for a lock.
    """
    url = app.database.engine.url
    if url.get_backend_name() == "sqlite":
        with closing(sqlite3.connect(str(url.database), timeout=0, isolation_level=None)) as conn:
            try:
                conn.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                return False
            return True
    with app.database.begin() as conn:
        return all(conn.scalar(text(question)) for question in questions)


def is_stopped(worker: WorkerProcess) -> bool:
    """Whether the signal has arrived everywhere: beside other load a process may run on for a while."""
    command = ["ps", "-o", "state=", "-g", str(worker.process.pid)]
    states = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(states.stdout.split()) == {"T"}


def take_over(app: sqlq.App, number: int = len(WAYS)) -> None:
    """Rescue its jobs as soon as their leases have run out, as any worker would."""
    taken: list[Any] = []

    def rescue() -> bool:
        taken.extend(kit.rescue(app))
        return len(taken) == number

    wait_until(rescue, what="the leases running out")


def wake(zombie: WorkerProcess, folder: Path) -> None:
    """Let it run on, end its jobs in each of the ways, and leave."""
    (folder / "woken").touch()
    os.killpg(zombie.process.pid, signal.SIGCONT)
    dropped = len(WAYS) - 1  # all but "release"
    wait_until(lambda: zombie.log.read_text().count("does not count") >= dropped, what="outcomes dropped")
    assert zombie.stop() == 0
    log = zombie.log.read_text()
    account.record("G4: frozen past the lease", illegal_transitions=log.count(guard.ILLEGAL))
    assert guard.ILLEGAL not in log
    assert f"stopped: {len(WAYS)} lost" in log.splitlines()[-1], log


def unchanged(app: sqlq.App, before: list[JobDetails]) -> None:
    after = app.jobs.list()
    # each would be a zombie's: owners here end their jobs without one
    written = effects.committed(app.database.engine)
    stale = sum(job not in before for job in after)
    figures = {"cases": len(WAYS), "stale_settles_accepted": stale, "effects_difference": len(written)}
    account.demand("G4: frozen past the lease", figures)
    assert after == before


MEANWHILE = [
    "another finished it",
    pytest.param("another runs it", marks=pytest.mark.slow),
    pytest.param("another failed it", marks=pytest.mark.slow),
    "an operator's retry reset the attempts, and another runs it",
]


@pytest.mark.variants
@pytest.mark.parametrize("meanwhile", MEANWHILE)
def test_a_frozen_worker_changes_nothing_when_it_wakes(
    app: sqlq.App, tmp_path: Path, database_url: str, meanwhile: str
) -> None:
    held: list[ClaimedJob] = []
    with frozen(app, tmp_path, database_url) as zombie:
        take_over(app)
        if meanwhile == "another finished it":
            assert app.worker(drain=True).run().finished == len(WAYS)
        else:
            held = claim(app, "owner", lease_ms=3_600_000)
        if "fail" in meanwhile or "operator" in meanwhile:
            assert len(kit.settle(app, held, failed("no"))) == len(WAYS)
        if "operator" in meanwhile:
            assert len(app.jobs.retry(all=True)) == len(WAYS)
            held = claim(app, "owner", lease_ms=3_600_000)
            assert {job.attempts for job in held} == {1}, "the number of the zombie's attempt, too"
        before = app.jobs.list()
        assert len(before) == len(WAYS)
        wake(zombie, tmp_path)
        unchanged(app, before)
    if "runs it" in meanwhile:
        assert len(kit.settle(app, held, Finished())) == len(WAYS), "whoever has the job can end it"


HELD = "jobs WHERE reserved_at IS NOT NULL"


def test_a_frozen_child_keeps_its_jobs_while_its_supervisor_lives(
    app: sqlq.App, tmp_path: Path, database_url: str
) -> None:
    def leases() -> tuple[Any, ...]:
        return tuple(committed(app.database.engine, HELD, "lease_expires_at"))

    options = ("--lease", "3s", "-c", str(len(WAYS)))
    with worker_process(tmp_path, f"{zombies.__name__}:app", database_url, *options) as worker:
        job = app.enqueue(app.task(name="success")(lambda: None).new())
        wait_until((tmp_path / "started success").exists, timeout=60, what="the job running")
        (child,) = worker.children()
        wait_until(lambda: freeze_alone(app, child), what="it freezing at a moment at which it holds no lock")
        # longer than a lease, and no other worker may take it meanwhile
        seen = {leases()}
        while len(seen) < 5:
            wait_until(lambda: leases() not in seen, what="a renewal")
            seen.add(leases())
            assert kit.rescue(app) == []
        (tmp_path / "woken").touch()
        os.kill(child, signal.SIGCONT)
        wait_until(lambda: app.jobs.get(job.id).state == "finished", what="the job finished")
        assert worker.stop() == 0
    done = app.jobs.get(job.id)
    assert (done.attempts, done.lease_token, done.result) == (1, 1, "by the zombie")


def freeze_alone(app: sqlq.App, child: int) -> bool:
    """Freeze one process, unless it is in the middle of a transaction, which would keep its supervisor from
    renewing."""
    os.kill(child, signal.SIGSTOP)
    unlocked = "SELECT id FROM {} FOR UPDATE SKIP LOCKED"
    if is_free(app, unlocked.format("jobs"), unlocked.format("sqlq_workers")):
        return True
    os.kill(child, signal.SIGCONT)
    return False


def test_no_job_runs_twice_after_the_machine_slept(
    app: sqlq.App, tmp_path: Path, database_url: str, engine: Engine
) -> None:
    """All of its workers were away for longer than their leases, and each is there to renew them again."""
    expired = f"jobs WHERE lease_expires_at < {NOW[engine.dialect.name]}"
    with (
        Scenario(tmp_path / "sleepers", database_url) as sleepers,
        sleepers.working_at(2, "--lease", "6s", "-c", "3"),
    ):
        sleepers.enqueue_all(sleepers.new("hang", n) for n in range(6))
        wait_until(lambda: len(sleepers.ran()) == 6, what="all jobs running")
        for host in sleepers.hosts:
            os.killpg(host.process.pid, signal.SIGSTOP)
        wait_until(lambda: sleepers.count(expired) == 6, what="the leases running out")
        for host in sleepers.hosts:
            os.killpg(host.process.pid, signal.SIGCONT)
        wait_until(lambda: sleepers.count(expired) == 0, what="the leases renewed, or taken")
        sleepers.touch("go")
        sleepers.wait_done()
        assert {app.jobs.get(id).state for id in sleepers.made} == {"finished"}
        assert sleepers.ran() == dict.fromkeys(range(6), 1)
