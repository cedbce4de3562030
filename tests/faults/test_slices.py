"""The coupons of the examples, their workers killed at random: each merchant gets one."""

from __future__ import annotations

import os
import random
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from sqlalchemy import Engine, text

import sqlq
from tests.faults import account
from tests.kit import execute, wait_until
from tests.kit.processes import ROOT, WorkerProcess, run_program, worker_process

pytestmark = pytest.mark.integration

SLICE = 10
SEED = 20_261_122


def run(folder: Path, *arguments: str) -> str:
    """Run a command of the example's README."""
    done = run_program("coupons.py", *arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def kill_one(worker: WorkerProcess, chance: random.Random) -> None:
    """Kill one of the processes that run handlers, or in which one may be about to."""
    with suppress(psutil.NoSuchProcess):
        found = [child.pid for child in psutil.Process(worker.process.pid).children(recursive=True)]
        if found:
            os.kill(chance.choice(found), signal.SIGKILL)


def each_gets_one(
    app: sqlq.App, engine: Engine, folder: Path, url: str, *, merchants: int, kills: int, seed: int
) -> bool:
    """Return whether a kill met the job while it ran; else this has proved nothing."""
    chance = random.Random(seed)
    shutil.copytree(ROOT / "examples" / "coupons", folder)
    assert run(folder, "setup", str(merchants)) == f"{merchants:,} merchants"
    id = int(run(folder, "give", "spring").removeprefix("job "))

    def given() -> int:
        cursor = app.jobs.get(id).cursor
        return cursor[0] if cursor else 0

    def has_come_on(before: int) -> bool:
        return given() > before or app.jobs.get(id).state == "finished"

    killed = 0
    with worker_process(folder, "coupons:app", url, "--lease", "2s") as worker:
        while killed < kills and app.jobs.get(id).state != "finished":
            before = given()
            wait_until(lambda: has_come_on(before), timeout=90, what="another slice")  # noqa: B023
            kill_one(worker, chance)
            killed += 1
        worker.kill()  # the supervisor, too: the rest is for a rescue
    with worker_process(folder, "coupons:app", url, "--lease", "2s"):
        wait_until(lambda: app.jobs.get(id).state == "finished", timeout=180, what="the job done")
    with engine.connect() as conn:
        per_merchant = text(
            "SELECT m.id, count(c.id) FROM merchants m LEFT JOIN coupons c ON c.merchant_id = m.id GROUP BY 1"
        )
        numbers = {row[0]: row[1] for row in conn.execute(per_merchant)}
    lost = sum(number == 0 for number in numbers.values())
    doubled = sum(number > 1 for number in numbers.values())
    figures = {"cases": merchants, "slices_lost": lost, "slices_doubled": doubled}
    account.demand("G14: slices of a job whose workers are killed", figures, seed=seed)
    done = app.jobs.get(id)
    assert (lost, doubled, len(numbers)) == (0, 0, merchants)
    assert (done.result, done.cursor) == (merchants, [merchants, merchants])
    assert run(folder, "check") == f"{merchants:,} merchants have one coupon, 0 have none, 0 have several"
    return done.attempts > 1


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch, database_url: str) -> None:
    monkeypatch.setenv("SQLQ_DATABASE_URL", database_url)
    monkeypatch.setenv("COUPONS_SLICE", str(SLICE))


@pytest.mark.parametrize(
    ("kills", "sizes"), [(2, [2_000, 20_000, 200_000]), pytest.param(30, [100_000], marks=pytest.mark.slow)]
)
def test_each_merchant_gets_one_coupon_though_the_workers_are_killed(
    app: sqlq.App, engine: Engine, tmp_path: Path, database_url: str, kills: int, sizes: list[int]
) -> None:
    for merchants in sizes:  # where this process gets little time, few are done too soon
        folder = tmp_path / str(merchants)
        if each_gets_one(app, engine, folder, database_url, merchants=merchants, kills=kills, seed=SEED):
            return
        execute(engine, "DROP TABLE coupons")
        execute(engine, "DROP TABLE merchants")
    pytest.fail("killed too late, each time, for this to prove anything")
