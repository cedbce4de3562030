"""However workers die, each run of a schedule gets its job, and gets it once."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

import sqlq
from sqlq.store import schedules
from sqlq.testing import tick
from tests.faults.dying import dying_process
from tests.faults.points import Points
from tests.faults.scorecard import record
from tests.faults.ticks import HOUR, MINUTE, account, moments_of
from tests.kit import wait_until
from tests.kit.processes import worker_process

pytestmark = pytest.mark.integration

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)

MODULE = """
import sqlq
app = sqlq.App()
{schedules}
"""


def test_a_process_that_dies_in_a_tick_leaves_it_undone_or_done(
    app: sqlq.App, engine: Engine, database_url: str
) -> None:
    task = app.task(name="note")(lambda n: n)
    names = ["hourly", "minutely"]
    app.schedules.add("hourly", task.new(1), every="1h", catch_up="all")
    app.schedules.add("minutely", task.new(2), cron="* * * * *", catch_up="all")
    tick(app, NOON, since=NOON)
    with dying_process() as dying:
        points = Points(app, engine, partial(dying, database_url), "tick")
        points.all(lambda n: (NOON + n * MINUTE).isoformat())
    last = len(points.moments) + 1
    wanted = {
        "minutely": [NOON + n * MINUTE for n in range(1, last + 1)],
        "hourly": [NOON + HOUR] if last >= 60 else [],
    }
    lost, doubled = account(app.jobs.list(limit=10_000), wanted)
    record("schedules: death in a tick", cases=last, ticks_lost=lost, ticks_doubled=doubled)
    assert (lost, doubled) == (0, 0), points.moments
    assert sum(app.schedules.get(name).ticks for name in names) == sum(map(len, wanted.values()))


def wait_for_ticks(app: sqlq.App, name: str, number: int) -> None:
    wait_until(lambda: app.schedules.get(name).ticks >= number, what=f"{number} ticks of {name}")


@pytest.mark.parametrize("kills", [3, pytest.param(12, marks=pytest.mark.slow)])
def test_workers_that_are_killed_lose_and_double_no_tick(
    app: sqlq.App, database_url: str, tmp_path: Path, kills: int
) -> None:
    seed = 20_261_122
    chance = random.Random(seed)
    names = [f"beat{n}" for n in range(5)]
    folder = tmp_path / "work"
    folder.mkdir()
    declared = "\n".join(
        f'@app.task(name="{name}", schedule=sqlq.Schedule(every="1s", catch_up="all"), max_attempts=1)\n'
        f"def {name}(): pass"
        for name in names
    )
    (folder / "beats.py").write_text(MODULE.format(schedules=declared))
    start = partial(worker_process, folder, "beats:app", database_url, "-p", "2", "-c", "2")
    with start() as one, start() as two:
        wait_until(lambda: len(app.schedules.list()) == len(names), what="the schedules")
        begun = {each.name: each.last_at for each in app.schedules.list()}
        workers = [one, two]
        for victim in range(kills):
            ticks = app.schedules.get(names[0]).ticks
            wait_for_ticks(app, names[0], ticks + chance.randint(1, 2))
            child = workers[victim % 2].children()
            if child and chance.random() < 0.7:
                os.kill(chance.choice(child), signal.SIGKILL)
            else:  # the whole host, but never the last one
                workers[victim % 2].kill()
                workers[victim % 2].__init__(folder, "beats:app", database_url, "-p", "2", "-c", "2")  # type: ignore[misc]
        ticks = app.schedules.get(names[0]).ticks
        wait_until(lambda: app.schedules.get(names[0]).ticks > ticks, what="another tick after the storm")
    for each in workers:
        if each.process.poll() is None:
            each.kill()
    found = {each.name: each for each in app.schedules.list()}
    jobs = [job for job in app.jobs.list(limit=100_000) if job.schedule in names]
    first = {job.schedule: job.scheduled_for for job in jobs}  # the newest come first
    wanted = {
        name: [moment for moment in moments_of(each, begun[name]) if moment >= (first[name] or NOON)]
        for name, each in found.items()
    }
    lost, doubled = account(jobs, wanted)
    record(
        "schedules: workers killed at random",
        cases=len(jobs),
        seed=seed,
        ticks_lost=lost,
        ticks_doubled=doubled,
    )
    assert (lost, doubled) == (0, 0)
    assert sum(each.ticks for each in found.values()) == len(jobs) >= 5 * kills


def test_a_clock_that_steps_either_way_loses_and_doubles_no_tick(app: sqlq.App) -> None:
    """The database's clock, which alone counts, is put forward and back between ticks."""
    task = app.task(name="note")(lambda: None)
    app.schedules.add("minutely", task.new(), cron="* * * * *", catch_up="all")
    chance = random.Random(7)
    tick(app, NOON, since=NOON)
    clock = furthest = NOON
    for _ in range(60):
        clock += chance.choice((MINUTE, 7 * MINUTE, -13 * MINUTE, timedelta(seconds=20)))
        furthest = max(furthest, clock)
        schedules.tick(app.database, at=clock)
    tick(app, furthest)
    wanted = [NOON + n * MINUTE for n in range(1, (furthest - NOON) // MINUTE + 1)]
    lost, doubled = account(app.jobs.list(limit=10_000), {"minutely": wanted})
    record("schedules: the clock stepped", cases=len(wanted), ticks_lost=lost, ticks_doubled=doubled)
    assert (lost, doubled) == (0, 0)


OLD = """
@app.task(name="beat", schedule=sqlq.Schedule(every="1s", catch_up="all"), max_attempts=1)
def beat(): pass
@app.task(name="gone", schedule=sqlq.Schedule(every="1s", catch_up="all"), max_attempts=1)
def gone(): pass
"""
NEW = """
@app.task(name="beat", schedule=sqlq.Schedule(every="2s", catch_up="all"), max_attempts=1)
def beat(): pass
@app.task(name="gone", max_attempts=1)
def gone(): pass
"""


def test_the_new_release_decides_the_plan_in_a_rolling_deploy(
    app: sqlq.App, database_url: str, tmp_path: Path
) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "old.py").write_text(MODULE.format(schedules=OLD))
    (folder / "new.py").write_text(MODULE.format(schedules=NEW))

    def state(name: str) -> tuple[str, str]:
        found: dict[str, Any] = {each.name: each for each in app.schedules.list()}
        return (found[name].state, str(found[name].plan)) if name in found else ("", "")

    with worker_process(folder, "old:app", database_url) as old:
        wait_until(lambda: state("beat") == ("active", "every 1 s"), what="the old schedule")
        # workers that start within a second may be of one deploy
        wait_until(lambda: app.schedules.get("gone").ticks > 2, what="ticks of more than a second")
        with worker_process(folder, "new:app", database_url) as new:
            wait_until(lambda: state("beat") == ("active", "every 2 s"), what="the new schedule")
            assert state("gone")[0] == "retired"
            # an old child that dies is started anew with old code, and changes nothing back
            (child,) = old.children()
            known = {worker.pid for worker in app.workers.list()}
            os.kill(child, signal.SIGKILL)
            wait_until(lambda: set(old.children()) - {child}, what="another child of the old supervisor")
            wait_until(lambda: {worker.pid for worker in app.workers.list()} - known, what="it is entered")
            ticks = app.schedules.get("beat").ticks
            wait_until(lambda: app.schedules.get("beat").ticks >= ticks + 2, what="two more ticks")
            assert state("beat") == ("active", "every 2 s")
            assert state("gone")[0] == "retired"
            assert (old.stop(), new.stop()) == (0, 0)
    had = Counter((job.schedule, job.scheduled_for) for job in app.jobs.list(limit=10_000))
    assert set(had.values()) == {1}
